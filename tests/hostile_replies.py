"""Replies that attack who judges them, and the full run of them: every reply through every built-in judge.

`python -m tests.hostile_replies` takes about half an hour of two cores, prints what it measured, and fails if a reply
had an effect beyond its verdict; with names of tasks it asks the scorers of those alone.
tests/integration/test_hostile_replies.py has the short form.
"""

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field

from rollgrad.adapters.data.reasoning_gym.source import ReasoningGymReward
from rollgrad.adapters.rewards.judge_pool import _Worker
from rollgrad.adapters.rewards.verifiers import VerifierReward
from rollgrad.application.settings.sections.reward import Verifier
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.ports.reward_source import RewardSource

PATTERN = r"<think>.*</think>\s*<answer>(\s*\S+\s*)*</answer>"
"""A format that takes for ever on some replies, as patterns of users may."""
EVALUATING = (
    *("spiral_matrix", "n_queens", "string_insertion", "binary_matrix", "countdown", "puzzle24", "number_sorting"),
    *("polynomial_multiplication", "simple_integration", "intermediate_integration", "bitwise_arithmetic"),
)
"""Tasks whose scorers hand the answer, or something beside it, to `eval`."""
LENIENT = ("game_of_life_halting",)
"""Tasks whose scorers take any text for one of two answers."""
WITHOUT_DEFAULTS = ("composite",)
"""Tasks that cannot be made without settings."""


@define
class Traps:
    """Places where an effect beyond a verdict would be seen: a file that appears, a connection, a secret that gets
    out."""

    folder: Path
    port: int
    connections: list[Any] = field(factory=list)

    def sprung(self) -> list[str]:
        """Names of the effects so far."""
        return [path.name for path in self.folder.iterdir()] + [f"connection from {who}" for who in self.connections]


@contextlib.contextmanager
def traps() -> Iterator[Traps]:
    """Traps, in a folder where everybody may write."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as listener:
        folder = Path(name)
        folder.chmod(0o777)
        made = Traps(folder, listener.getsockname()[1])

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    made.connections.append(listener.accept()[1])

        threading.Thread(target=listen, daemon=True).start()
        yield made
        listener.shutdown(socket.SHUT_RDWR)


def code(set_traps: Traps) -> list[str]:
    """Expressions that do something, each in one of the ways that get around one guard or another."""
    file = str(set_traps.folder / "effect")
    touch = f"touch {file}"
    system = f"__import__('os').system('{touch}')"
    connect = f"__import__('socket').create_connection(('127.0.0.1', {set_traps.port}))"
    return [
        system,
        f"open('{file}', 'w').write('x')",
        f"open('{file}' + __import__('os').environ.get('HOME', '').replace('/', '_'), 'w')",
        connect,
        f"exec('import os; os.system(\"{touch}\")')",
        f"eval('__imp' + 'ort__(\"os\").system(\"{touch}\")')",
        f"getattr(__import__('os'), 'sys' + 'tem')('{touch}')",
        f"[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0](['touch', '{file}'])",
        f"(lambda f: f('{touch}'))(__import__('os').system)",
        f"[__import__('os').system('{touch}') for _ in range(1)]",
        f"__builtins__['__import__']('os').system('{touch}')",
        f'sympify("{system}")'.replace("'", "`").replace("`", "'"),
        f"S(\"__import__('os').system('{touch}')\")",
        f"sin(\"__import__('os').system('{touch}')\")",
        f"Integer(\"__import__('os').system('{touch}')\")",
        f"lambdify((), \"__import__('os').system('{touch}')\")()",
        f"Lambda(x, __import__('os').system('{touch}'))",
        f"parse_expr(\"__import__('os').system('{touch}')\")",
        f"Function('f').__init__.__globals__['sys'].modules['os'].system('{touch}')",
        f"x.func.__module__.__class__.__mro__[1].__subclasses__()[0]('{touch}')",
        f"f'{{{system}}}'",
        f"(y := __import__('os')).system('{touch}')",
        f"breakpoint() or {system}",
        f"print({system})",
        f"__import__('subprocess').run('{touch}', shell=True)",
        f"__import__('pathlib').Path('{file}').touch()",
        f"__import__('pickle').loads(b\"cos\\nsystem\\n(S'{touch}'\\ntR.\")",
        f"__import__('ctypes').CDLL(None).system(b'{touch}')",
        f"__import__('threading').Thread(target=lambda: {system}).start()",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "__import__('os').kill(1, 9)",
        "__import__('os').killpg(0, 9)",
        "__import__('os')._exit(0)",
        "__import__('os').abort()",
        "__import__('os').fork()",
        "[__import__('os').write(n, b'v' * 11) for n in range(3, 20)]",
        "__import__('sys').exit(0)",
        "exit()",
        "__import__('time').sleep(10 ** 6)",
        "__import__('signal').pause()",
        "setattr(__import__('builtins'), 'float', lambda x: 1.0)",
        "__import__('builtins').__dict__.update(float=lambda x: 1.0)",
        "[setattr(c, 'score_answer', lambda *a: 1.0) for c in object.__subclasses__() if hasattr(c, 'score_answer')]",
        "[setattr(type(o), 'score_answer', lambda self, answer, entry: 1.0) for o in __import__('gc').get_objects()"
        " if hasattr(type(o), 'score_answer')]",
        "__import__('sys')._getframe(1).f_locals['self'].__class__.__dict__",
        "globals().update(score_answer=1.0)",
        "vars().clear()",
        "__import__('sys').modules.clear()",
        "__import__('random').seed(0)",
        "__import__('warnings').simplefilter('error')",
        "1 .__class__.__mro__",
        "''.join(open('/proc/self/environ'))",
        "open('/etc/passwd').read()",
        "__import__('os').listdir('/')",
    ]


TOWERS = (
    *("9**9**9**9", "9^9^9^9", "9^{9^{9^{9}}}", "2**2**2**2**2**2", "(10**10)**(10**10)", "factorial(10**9)"),
    *("\\frac{1}{9^{9^{9}}}", "((10!)!)!", "10**10**10 % 7", "1e999999999", "'a'*10**11", "[0]*10**11", "1<<10**12"),
    *("\\sum_{n=1}^{10^{12}} \\frac{1}{n}", "\\int_0^1 x^{x^{x^x}} dx", "bytearray(10**11)", "\\binom{10^9}{10^8}"),
    *("range(10**12)", "sum(range(10**12))", "(x+y+z)**4000", "expand((x+y+z)**4000)", "Pow(9, Pow(9, Pow(9, 9)))"),
)
"""Small texts that ask for much time or memory."""


def nested() -> Iterator[str]:
    """Brackets and commands in each other."""
    for opening, closing in (("(", ")"), ("[", "]"), ("{", "}"), ("\\boxed{", "}"), ("\\frac{1}{", "}"), ("-", "")):
        for depth in (200, 5_000, 200_000):
            yield opening * depth + "1" + closing * depth
    for opening in ("(", "[[", "\\boxed{", "\\left(", "<answer>", "<think>", '{"a":', "$", "\\sqrt", "lambda:", "f("):
        for depth in (300, 50_000):
            yield opening * depth


def long() -> Iterator[str]:
    """Megabytes."""
    for piece in ("a", "1", " ", "\n", "1,", "000,", "1 ", "+1", "\\", "{}", "</answer>", "x^", "é", "</think>", "0."):
        yield piece * ((3 << 20) // len(piece.encode()))


UNICODE = (
    *(
        "\ud800",
        "7\udfff",
        "\ud83d",
        "\x00",
        "7\x00",
        "\x1b[2J",
        "\u2028",
        "\u2029\x85",
        "\ufeff7",
        "\u202e7",
        "\uffff",
    ),
    *(
        "٣٤٥",
        "７７",
        "²³",
        "½",
        "Ⅶ",
        "7\u0301",
        "e\u0301" * 50_000,
        "\U0010ffff",
        "𝟕",
        "−7",
        "\u200b7\u200b",
        "＿＿import＿＿('os')",
    ),
)
"""Characters that are no text, are not seen, or look like others."""
NUMBERS = (
    *("nan", "inf", "-inf", "-0", "1_000", "0x7f", "1" * 5_000, "1e5000", "-" * 50 + "1", "1/0", "0/0", "0**-1"),
    *("1+1j", "None", "True", "[]", "{}", "''", "...", "NotImplemented", "1;2", "1\n2", "#", "'", '"', "zoo", "oo-oo"),
)
"""Values that are not what a scorer counts on, of which one may be the answer."""


def replies(set_traps: Traps) -> list[str]:
    """At least 200 different replies, without the tags of an answer."""
    attacks = code(set_traps)
    wrapped = [text for attack in attacks[:30] for text in (f"[{attack}, 1]", f"1 + {attack}", f"sqrt({attack})")]
    return list(dict.fromkeys([*attacks, *wrapped, *TOWERS, *nested(), *long(), *UNICODE, *NUMBERS]))


def ask(response: str, label: Any, *, task: str = "", entry: Any = None) -> RewardRequest:
    """A reply to judge."""
    prompt = Prompt(token_ids=(1,), text="?", label=label, datasource=task, metadata=entry or {})
    return RewardRequest(prompt=prompt, response=response, stop_reason=StopReason.STOP)


def tasks() -> list[str]:
    """All tasks of reasoning-gym that can be made without settings."""
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - set(WITHOUT_DEFAULTS))


def entry(task: str) -> dict[str, Any]:
    """One question of a task."""
    import reasoning_gym

    return dict(reasoning_gym.create_dataset(task, size=1, seed=3)[0])


def score(judge: RewardSource, requests: Sequence[RewardRequest]) -> list[Reward]:
    """The rewards of replies."""
    return list(asyncio.run(judge.score(requests)))


def certain(judge: RewardSource, request: RewardRequest) -> Reward:
    """The reward of a reply that nothing is wrong with; asked again where a busy machine was late."""
    for _ in range(100):
        reward = score(judge, [request])[0]
        if not reward.metrics.get("judge_timed_out"):
            break
    return reward


def verifiers(timeout: float) -> dict[str, tuple[RewardSource, str, str]]:
    """The built-in verifiers, each with a reply that is right and one that is wrong (label 7)."""
    right = "<think>so</think><answer>7</answer>"
    return {
        kind.value: (
            VerifierReward(kind, timeout=timeout, format_pattern=PATTERN if kind is Verifier.FORMAT else None),
            {Verifier.EXACT_MATCH: "7", Verifier.MATH: "so $7$"}.get(kind, right),
            "no",
        )
        for kind in Verifier
    }


def forms(reply: str) -> tuple[str, ...]:
    """A reply in the ways that verifiers look for an answer."""
    return (reply, f"\\boxed{{{reply}}}", f"$${reply}$$", f"<think>{reply}</think><answer>{reply}</answer>")


class Starts:
    """Counts processes of judges as they start: verdicts wait for them, or for the other one meanwhile."""

    def __init__(self) -> None:
        self.begun = self.under_way = 0
        start = _Worker._start

        def counted(worker: _Worker) -> None:
            self.begun += 1
            self.under_way += 1
            try:
                start(worker)
            finally:
                self.under_way -= 1

        _Worker._start = counted  # type: ignore[method-assign]


def main(timeout: float = 2.0) -> None:
    """Sends all replies to all judges and prints what came of it."""
    os.environ["ROLLGRAD_TEST_SECRET"] = "hunter2"
    counts = {"verdicts": 0, "timed out": 0, "failed": 0, "earned": 0}
    slowest = {"else": 0.0, "while a process started": 0.0}
    starts = Starts()
    with traps() as set_traps:
        all_replies = replies(set_traps)
        print(f"{len(all_replies)} replies, {len(tasks())} tasks of reasoning-gym, {len(Verifier)} verifiers")

        async def timed(judge: RewardSource, request: RewardRequest) -> Reward:
            begin, before, starting = time.monotonic(), starts.begun, starts.under_way > 0
            reward = (await judge.score([request]))[0]
            when = "while a process started" if starting or starts.begun > before else "else"
            slowest[when] = max(slowest[when], time.monotonic() - begin)
            counts["verdicts"] += 1
            counts["timed out"] += int(reward.metrics.get("judge_timed_out", 0))
            counts["failed"] += int(reward.metrics.get("judge_failed", 0))
            return reward

        async def attack(name: str, judge: RewardSource, requests: list[RewardRequest]) -> None:
            begin = time.monotonic()
            for first in range(0, len(requests), 2):  # two at a time, so that a verdict's time is not that of a queue
                rewards = await asyncio.gather(*(timed(judge, one) for one in requests[first : first + 2]))
                for reward, request in zip(rewards, requests[first : first + 2], strict=True):
                    if (
                        judge is gym
                        and reward.value >= 1.0
                        and name not in LENIENT
                        and request.response.removeprefix("<answer>").split("<")[0] not in NUMBERS
                    ):
                        counts["earned"] += 1
                        print(f"{name}: {request.response[:100]!r} earns {reward.value}")
            assert set_traps.sprung() == [], (name, set_traps.sprung())
            print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)

        gym = ReasoningGymReward("reasoning_gym:chain_sum", timeout=timeout)
        for name, (judge, right, wrong) in verifiers(timeout).items():
            asyncio.run(attack(name, judge, [ask(form, "7") for reply in all_replies for form in forms(reply)]))
            assert certain(judge, ask(right, "7")).value == 1.0
            assert certain(judge, ask(wrong, "7")).value == 0.0
            judge.close()  # type: ignore[attr-defined]
        for task in set(sys.argv[1:]) or tasks():
            made = entry(task)
            asked = [ask(f"<answer>{reply}</answer>", made["answer"], task=task, entry=made) for reply in all_replies]
            asyncio.run(attack(task, gym, asked))
        gym.close()
    told = ", ".join(f"{when} {seconds:.1f} s" for when, seconds in slowest.items())
    print(f"{counts}; {starts.begun} processes started; the slowest verdicts of {timeout:g} s: {told}")


if __name__ == "__main__":
    main()
