"""Environments of other libraries, by stand-ins of the same shape: how prompts, replies and answers are translated."""

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollgrad.adapters.environments.episode_thread import EpisodeThread
from rollgrad.adapters.environments.gem import GemEnvironment
from rollgrad.adapters.environments.global_randomness import GlobalRandomness
from rollgrad.adapters.environments.gymnasium import GymnasiumEnvironment
from rollgrad.adapters.environments.opening import opening, prompt_seed
from rollgrad.adapters.environments.skyrl import SkyRLEnvironment
from rollgrad.adapters.environments.textarena import TextArenaEnvironment
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import Action, assistant_message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.environment import Environment, StepResult

SECONDS = 60.0
"""After which a test has hung."""


def act(text: str) -> Action:
    generation = Generation(token_ids=[1], logprobs=[-1.0], versions=[0], stop_reason=StopReason.STOP)
    return Action(text=text, generation=generation, message=assistant_message(text))


def ask(text: str = "Play.", **given: Any) -> Prompt:
    return Prompt(token_ids=(1,), text=text, messages=({"role": "user", "content": text},), **given)


async def play(environment: Environment, prompt: Prompt, *replies: str) -> tuple[Any, list[StepResult]]:
    try:
        start = await environment.reset(prompt)
        return start, [await environment.step(act(reply)) for reply in replies]
    finally:
        await environment.close()


def said(result: StepResult) -> str:
    return "".join(str(message["content"]) for message in result.observation)  # type: ignore[index]


# --- prompts


@pytest.mark.parametrize(
    ("given", "seed"),
    [
        ({"metadata": {"seed": 5}, "label": 9}, 5),
        ({"label": {"seed": "6"}}, 6),
        ({"label": 7}, 7),
        ({"label": "8"}, 8),
        ({"label": 2**40 + 3}, 3),
        ({"label": -1}, 2**32 - 1),
    ],
)
def test_a_prompts_seed(given: dict[str, Any], seed: int) -> None:
    assert prompt_seed(ask(**given)) == seed


def test_a_prompt_without_a_seed_has_one_of_its_own() -> None:
    seeds = [prompt_seed(ask(text, label=label)) for text in ("a", "b") for label in (None, "x", True)]
    assert len(set(seeds)) == 6
    assert seeds[0] == prompt_seed(ask("a"))
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_the_observation_joins_what_the_user_said() -> None:
    prompt = Prompt(
        token_ids=(1,), text="", messages=({"role": "system", "content": "S"}, {"role": "user", "content": "U"})
    )
    assert opening(prompt, "O") == [{"role": "system", "content": "S"}, {"role": "user", "content": "U\n\nO"}]
    assert opening(Prompt(token_ids=(1,), text="T"), "O") == [{"role": "user", "content": "T\n\nO"}]
    assert opening(Prompt(token_ids=(1,), text=""), "O") == [{"role": "user", "content": "O"}]
    alone = Prompt(token_ids=(1,), text="", messages=({"role": "system", "content": "S"},))
    assert opening(alone, "O") == [{"role": "system", "content": "S"}, {"role": "user", "content": "O"}]
    assert opening(ask("U"), "") == [{"role": "user", "content": "U"}]


# --- the thread


async def test_calls_run_in_order_in_one_thread_that_ends() -> None:
    thread = EpisodeThread("The game", timeout=SECONDS)
    idents = await asyncio.gather(*(thread.call("a step", threading.get_ident) for _ in range(20)))
    workers = [one for one in threading.enumerate() if one.ident == idents[0]]
    await thread.close()
    await thread.close()
    for worker in workers:
        worker.join(SECONDS)
    assert not any(worker.is_alive() for worker in workers)
    idents = list(idents)
    assert len(set(idents)) == 1
    assert idents[0] != threading.get_ident()


async def test_a_call_that_hangs_is_named_and_holds_nothing_up() -> None:
    released = threading.Event()

    thread = EpisodeThread("The game", timeout=0.05)
    with pytest.raises(TimeoutError, match=r"The game did not finish a step within 0\.05 s"):
        await thread.call("a step", released.wait)
    released.set()
    await thread.close()


async def test_what_a_call_raises_arrives_and_what_closing_raises_does_not() -> None:
    def fail() -> None:
        raise TimeoutError("its own")

    thread = EpisodeThread("The game", timeout=SECONDS)
    with pytest.raises(TimeoutError, match="its own"):
        await thread.call("a step", fail)
    assert await thread.call("a step", lambda: 3) == 3
    await thread.close(fail)


def test_streams_of_the_global_generators_are_apart() -> None:
    def draws(stream: GlobalRandomness) -> tuple[float, float]:
        with stream.installed():
            return random.random(), float(np.random.random())

    random.seed(1)
    np.random.seed(1)
    outside = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    one, two = GlobalRandomness(3), GlobalRandomness(3)
    interleaved = [draws(stream) for stream in (one, two, one, two)]
    assert interleaved[0] == interleaved[1] != interleaved[2] == interleaved[3]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == outside  # type: ignore[index]


def test_a_game_that_hangs_holds_others_up_until_its_deadline_alone() -> None:
    """And what it draws afterwards, or restores, is nothing of theirs."""
    hangs, over = threading.Event(), threading.Event()

    def hang() -> None:
        with GlobalRandomness(1, seconds=0.05).installed():
            hangs.set()
            assert over.wait(SECONDS)

    random.seed(1)
    outside = random.getstate()
    stuck = threading.Thread(target=hang)
    stuck.start()
    assert hangs.wait(SECONDS)
    alone, beside = GlobalRandomness(3), GlobalRandomness(3)
    with alone.installed():
        drawn = [random.random()]
        over.set()
        stuck.join(SECONDS)
        drawn.append(random.random())
    assert random.getstate() == outside
    with beside.installed():
        assert drawn == [random.random(), random.random()]


# --- Gymnasium


class Counter:
    """Reach 3 by adding -1, 0, 1; `space` is what Gymnasium would have."""

    def __init__(self, space: Any) -> None:
        self.action_space = space
        self.closed = 0

    def reset(self, *, seed: int) -> tuple[int, dict[str, Any]]:
        self.at = seed % 3
        return self.at, {}

    def step(self, action: Any) -> tuple[int, np.float64, bool, bool, dict[str, Any]]:
        self.at += int(np.asarray(action, dtype=float).sum())
        return self.at, np.float64(-1.0), self.at == 3, self.at < -1, {"at": self.at}

    def close(self) -> None:
        self.closed += 1


def discrete() -> Any:
    import gymnasium

    return gymnasium.spaces.Discrete(3, start=-1)


async def test_gymnasium_replies_become_actions() -> None:
    world = Counter(discrete())
    environment = GymnasiumEnvironment(lambda: world, render=lambda at: f"At {at}.")
    start, results = await play(environment, ask(label=1), "I go from 1 to 2: 1", "junk", "7", "+1")
    assert start == [{"role": "user", "content": "Play.\n\nAt 1."}]
    assert [result.reward for result in results] == [-1.0, 0.0, 0.0, -1.0]
    assert [result.metrics["invalid_actions"] for result in results] == [0.0, 1.0, 2.0, 2.0]
    assert said(results[1]) == "That is no valid action. Answer with a whole number from -1 to 1."
    assert [result.terminated for result in results] == [False, False, False, True]
    assert results[3].info == {"at": 3}
    assert world.closed == 1


async def test_gymnasium_truncation() -> None:
    environment = GymnasiumEnvironment(lambda: Counter(discrete()))
    _, results = await play(environment, ask(label=0), "-1", "-1")
    assert [(result.terminated, result.truncated) for result in results] == [(False, False), (False, True)]


async def test_gymnasium_invalid_actions_may_cost_and_end() -> None:
    environment = GymnasiumEnvironment(lambda: Counter(discrete()), invalid_reward=-2.0, max_invalid_actions=2)
    _, results = await play(environment, ask(), "?", "0.5")
    assert [(result.reward, result.truncated) for result in results] == [(-2.0, False), (-2.0, True)]


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("(3, 2) so 1", 1),
        ("-1", -1),
        ("**0**", 0),
        ("1.", 1),
        ("x1", None),
        ("0.1", None),
        ("", None),
        ("9" * 5000, None),
    ],
)
async def test_gymnasium_takes_the_last_whole_number(reply: str, number: int | None) -> None:
    taken: list[Any] = []

    class Space:
        start, n = -9, 19

        def contains(self, action: Any) -> bool:
            taken.append(action)
            return False

    Space.__name__ = "Discrete"
    await play(GymnasiumEnvironment(lambda: Counter(Space())), ask(), reply)
    assert taken == ([] if number is None else [number])


async def test_gymnasium_text_spaces_take_the_reply() -> None:
    import gymnasium

    space = gymnasium.spaces.Text(2, charset="0123")
    _, results = await play(GymnasiumEnvironment(lambda: Counter(space)), ask(label=0), " 2 ", "seven")
    assert results[0].info == {"at": 2}
    assert said(results[1]) == "That is no valid action. Answer with 1 to 2 characters, each one of 0123"


async def test_gymnasium_other_spaces_need_a_parse_function() -> None:
    import gymnasium

    box = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    with pytest.raises(ConfigurationError, match=r"Box.*give GymnasiumEnvironment a parse function"):
        await play(GymnasiumEnvironment(lambda: Counter(box)), ask())
    environment = GymnasiumEnvironment(
        lambda: Counter(box), parse=lambda reply: np.array([float(reply)], dtype=np.float32)
    )
    _, results = await play(environment, ask(label=0), "1", "much", "3")
    assert [result.metrics["invalid_actions"] for result in results] == [0.0, 1.0, 2.0]


# --- GEM


class Dice:
    """GEM's shape: draws from the global generators."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        return "Roll.", {"suffix": "Say anything."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        rolled = random.randint(1, 10**9)
        return f"{action}: {rolled}", 0.5, action == "stop", action == "late", {"prefix": "Hear:"}


async def test_gem_episodes_of_one_seed_are_alike_however_they_interleave() -> None:
    games = [play(GemEnvironment(Dice), ask(label=4), "a", "late", "stop") for _ in range(8)]
    (start, results), *others = await asyncio.gather(*games)
    assert start == [{"role": "user", "content": "Play.\n\nRoll.\nSay anything."}]
    assert said(results[0]).startswith("Hear:\na: ")
    assert [(result.reward, result.terminated, result.truncated) for result in results] == [
        (0.5, False, False),
        (0.5, False, True),
        (0.5, True, False),
    ]
    for other_start, other in others:
        assert (other_start, list(map(said, other))) == (start, list(map(said, results)))


# --- TextArena


class HigherCard:
    """TextArena's shape: players in turn say a number; whoever is at 3 first wins. `raw` shows messages, not text."""

    def __init__(self, *, raw: bool, players: int) -> None:
        self.raw, self.players = raw, players

    def reset(self, num_players: int, seed: int | None = None) -> None:
        assert num_players == self.players
        self.player, self.rewards = 0, None
        self.log: list[tuple[int, str, None]] = [(-1, "Rules.", None)]
        self.seen = dict.fromkeys(range(self.players), 0)

    def get_observation(self) -> tuple[int, Any]:
        if not self.raw:
            return self.player, "".join(f"\n[{sender}] {text}" for sender, text, _ in self.log)
        start, self.seen[self.player] = self.seen[self.player], len(self.log)
        return self.player, self.log[start:]

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.log.append((self.player, action, None))
        if action == "3":
            self.rewards = {player: 1 if player == self.player else -1 for player in range(self.players)}
            return True, {}
        self.player = (self.player + 1) % self.players
        return False, {}

    def close(self) -> tuple[Any, Any]:
        return self.rewards, {0: {"reason": "3", "invalid_move": False}}


@pytest.mark.parametrize(
    ("raw", "news"), [(True, ["[Player 1] 1", ""]), (False, ["[0] 5\n[1] 1", ""])], ids=["messages", "text"]
)
async def test_textarena_shows_only_what_is_new_and_pays_at_the_end(raw: bool, news: list[str]) -> None:
    shown: list[str] = []

    def opponent(text: str) -> str:
        shown.append(text)
        return "1"

    environment = TextArenaEnvironment(lambda: HigherCard(raw=raw, players=2), opponent=opponent)
    start, results = await play(environment, ask(), "5", "3")
    assert start[0]["content"] == f"Play.\n\n{'Rules.' if raw else '[-1] Rules.'}"
    assert list(map(said, results)) == news
    assert [(result.reward, result.terminated) for result in results] == [(0.0, False), (1.0, True)]
    assert results[1].info["reason"] == "3"
    assert results[1].metrics == {"invalid_move": 0.0}
    assert shown == ["Rules.\n[Player 0] 5" if raw else "[-1] Rules.\n[0] 5"]


async def test_textarena_the_opponent_may_win() -> None:
    environment = TextArenaEnvironment(lambda: HigherCard(raw=True, players=2), opponent=lambda text: "3")
    _, (result,) = await play(environment, ask(), "5")
    assert (result.reward, result.terminated) == (-1.0, True)


def test_textarena_an_opponents_luck_is_the_prompts() -> None:
    def moves() -> list[str]:
        made: list[str] = []

        def opponent(text: str) -> str:
            made.append(str(random.randint(10, 10**6)))
            return made[-1]

        environment = TextArenaEnvironment(lambda: HigherCard(raw=True, players=2), opponent=opponent)
        asyncio.run(play(environment, ask(label=3), "5", "5", "3"))
        return made

    assert moves() == moves()


# --- SkyRL-Gym


class Echo:
    """SkyRL-Gym's shape."""

    closed = 0

    def __init__(self, answer: str) -> None:
        self.answer, self.turns = answer, 0

    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return [{"role": "system", "content": "Be right."}, *prompt], {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        done = action == self.answer
        observations = [] if done else [{"role": "user", "content": "Again."}]
        return {"observations": observations, "reward": float(done), "done": done, "metadata": {"said": action}}

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": self.turns, "name": "echo"}

    def close(self) -> None:
        Echo.closed += 1


async def test_skyrl_environments_make_the_conversation() -> None:
    before = Echo.closed
    environment = SkyRLEnvironment(lambda prompt: Echo(prompt.label))
    start, results = await play(environment, ask("2+2?", label="4"), "5", "4")
    assert start == [{"role": "system", "content": "Be right."}, {"role": "user", "content": "2+2?"}]
    assert results[0].observation == [{"role": "user", "content": "Again."}]
    assert [(result.reward, result.terminated) for result in results] == [(0.0, False), (1.0, True)]
    assert (results[0].metrics, results[1].metrics) == ({}, {"turns": 2.0})
    assert results[1].info == {"said": "4"}
    assert Echo.closed == before + 1


# --- all


@pytest.mark.parametrize(
    "make",
    [
        lambda hang: GymnasiumEnvironment(hang, timeout=0.05),
        lambda hang: GemEnvironment(hang, timeout=0.05),
        lambda hang: TextArenaEnvironment(hang, timeout=0.05),
        lambda hang: SkyRLEnvironment(lambda prompt: hang(), timeout=0.05),
    ],
    ids=["gymnasium", "gem", "textarena", "skyrl"],
)
async def test_an_environment_that_hangs_costs_its_own_episode(
    make: Callable[[Callable[[], Any]], Environment],
) -> None:
    released = threading.Event()

    environment = make(released.wait)
    with pytest.raises(TimeoutError, match=r"did not finish (re|in)\w+ within 0\.05 s"):
        await environment.reset(ask())
    released.set()
    await environment.close()
