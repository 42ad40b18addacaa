"""FunctionReward: what a user's function may return, and one sentence for each way in which it can go wrong."""

import asyncio
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgrad.adapters.rewards.function import FunctionReward, load_reward_function
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import ConfigurationError, RewardError


def ask(response: str = "7", label: Any = "7") -> RewardRequest:
    prompt = Prompt(token_ids=(1,), text="3+4=", label=label)
    return RewardRequest(prompt=prompt, response=response, stop_reason=StopReason.STOP)


async def score(func: Any, count: int = 1, *, timeout: float = 5.0) -> list[Reward]:
    return await FunctionReward(func, timeout=timeout).score([ask(str(index)) for index in range(count)])


async def test_keywords_are_used_where_the_function_takes_them() -> None:
    def by_name(*, labels: list[Any], prompts: list[str], queries: list[str]) -> list[float]:
        assert (labels, prompts, queries) == (["7"], ["3+4="], ["3+4=0"])
        return [1.0]

    assert (await score(by_name))[0].value == 1.0


async def test_other_names_are_filled_by_position() -> None:
    def by_position(q: list[str], p: list[str], y: list[Any]) -> list[float]:
        assert (q, p, y) == (["3+4=0"], ["3+4="], ["7"])
        return [1.0]

    assert (await score(by_position))[0].value == 1.0


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5],
        (1.0, 0.5),
        torch.tensor([1.0, 0.5]),
        torch.tensor([[1.0], [0.5]], dtype=torch.bfloat16),
        [torch.tensor(1), torch.tensor(0.5)],
        {"rewards": torch.tensor([1.0, 0.5])},
    ],
    ids=repr,
)
async def test_rewards_may_be_any_sequence_of_numbers(returned: Any) -> None:
    assert [reward.value for reward in await score(lambda q, p, y: returned, 2)] == [1.0, 0.5]


@pytest.mark.parametrize("returned", [1, True, 1.0, torch.tensor(1), {"rewards": 1}], ids=repr)
async def test_a_number_is_enough_for_one_reply(returned: Any) -> None:
    assert (await score(lambda q, p, y: returned))[0] == Reward(value=1.0, score=1.0)


async def test_scores_and_logs_go_to_their_reply() -> None:
    answer = {"rewards": [1.0, 2.0], "scores": [0, 1], "extra_logs": {"tries": torch.tensor([3, 4]), "share": 0.5}}
    assert await score(lambda q, p, y: answer, 2) == [
        Reward(value=1.0, score=0.0, metrics={"tries": 3.0, "share": 0.5}),
        Reward(value=2.0, score=1.0, metrics={"tries": 4.0, "share": 0.5}),
    ]


async def test_answers_and_feedback_go_to_their_reply() -> None:
    answer = {"rewards": [1.0, 2.0, 3.0], "answers": [7, None, ""], "feedback": [None, " no digit\n", " "]}
    found = await score(lambda q, p, y: answer, 3)
    assert [(reward.answer, reward.feedback) for reward in found] == [("7", None), (None, "no digit"), ("", None)]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"rewards": [1, 1], "answers": ["7"]}, "answers that is no list of one text for each of 2 replies"),
        ({"rewards": [1, 1], "feedback": ["7"]}, "feedback that is no list of one text for each of 2 replies"),
        ({"rewards": [1, 1], "answers": "77"}, "answers that is no list of one text for each of 2 replies"),
        ([1.0], "1 rewards for 2 replies"),
        (1.0, "1 rewards for 2 replies"),
        ([1.0, math.nan], "reward nan for reply 1 of 2"),
        (torch.tensor([math.inf, 0.0]), "reward inf for reply 0 of 2"),
        ({"rewards": [1, 1], "scores": [1, -math.inf]}, "score -inf for reply 1 of 2"),
        ({"rewards": [1, 1], "scores": [1]}, "1 scores for 2 replies"),
        ({"rewards": [1, 1], "extra_logs": {"x": [1, 2, 3]}}, r"3 extra_logs\['x'\] for 2 replies"),
        ({"reward": [1, 1]}, "needs the key 'rewards'; rewards with names are a mapping below it"),
        ([{"right": 1}, {"right": 0}], r"not numbers .*: rewards with names are {'rewards': {NAME: "),
        (None, "not numbers"),
        (["1.0", "0.5"], "not numbers"),
        ([[1.0], [2.0]], "not numbers"),
    ],
    ids=repr,
)
async def test_what_is_not_one_finite_number_a_reply_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(RewardError, match=f"^reward_func returned .*{message}"):
        await score(lambda q, p, y: returned, 2)


def raising(queries: list[str], prompts: list[str], labels: list[Any]) -> None:
    raise KeyError("gold")


async def async_raising(queries: list[str], prompts: list[str], labels: list[Any]) -> None:
    raise KeyError("gold")


@pytest.mark.parametrize("func", [raising, async_raising])
async def test_what_the_function_raised_is_named(func: Any) -> None:
    with pytest.raises(RewardError, match="reward_func raised KeyError: 'gold'"):
        await score(func)


@pytest.mark.parametrize("error", [SystemExit, StopIteration, KeyboardInterrupt])
async def test_a_function_cannot_end_the_run(error: type[BaseException]) -> None:
    def reward_func(queries: Any, prompts: Any, labels: Any) -> None:
        raise error("enough")

    with pytest.raises(RewardError, match=r"^reward_func raised .*enough"):
        await score(reward_func)


def slow(queries: list[str], prompts: list[str], labels: list[Any]) -> list[float]:
    time.sleep(60.0)
    return [1.0]


async def async_slow(queries: list[str], prompts: list[str], labels: list[Any]) -> list[float]:
    await asyncio.sleep(60.0)
    return [1.0]


@pytest.mark.parametrize("func", [slow, async_slow])
async def test_a_function_over_its_deadline_is_left_behind(func: Any) -> None:
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"no answer for 1 reply within 0\.1 s.*--reward\.timeout"):
        await score(func, timeout=0.1)
    assert time.monotonic() - start < 30.0


async def test_a_timeout_of_the_functions_own_is_not_taken_for_the_deadline() -> None:
    async def gives_up(queries: list[str], prompts: list[str], labels: list[Any]) -> None:
        raise TimeoutError("judge server")

    with pytest.raises(RewardError, match="raised TimeoutError: judge server"):
        await score(gives_up)


async def test_a_plain_function_does_not_block_the_loop() -> None:
    together = threading.Barrier(10)

    def meet(queries: list[str], prompts: list[str], labels: list[Any]) -> list[float]:
        together.wait(60.0)
        return [1.0] * len(queries)

    reward = FunctionReward(meet, timeout=120.0)
    await asyncio.gather(*(reward.score([ask()]) for _ in range(10)))


async def test_a_function_is_loaded_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text("import math\ndef reward_func(queries, prompts, labels):\n    return [math.pi] * len(queries)\n")
    assert (await score(load_reward_function(str(path))))[0].value == math.pi


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("missing.py", None, "no such file: name one that is there"),
        (
            "other.py",
            "from math import log\ndef score(): ...",
            r"defines no function reward_func or compute_score \(it defines score\): .*other\.py:NAME",
        ),
        ("value.py", "reward_func = 1", "defines no function"),
        (
            "kind.py",
            "class reward_func: ...",
            r"names the class reward_func, .* judge = reward_func\(\) .*kind\.py:judge",
        ),
        ("object.py", "class A:\n def __call__(self): ...\njudge = A()", r"\(it defines judge\)"),
        ("named.py:other", "def reward_func(queries): ...", r"defines no function other \(it defines reward_func\)"),
        ("broken.py", "def reward_func(:", "cannot be imported: SyntaxError"),
        ("needs.py", "import no_such_module_here", "cannot be imported: ModuleNotFoundError: No module named"),
        ("notes.txt", "hello", "must be a Python file"),
    ],
)
def test_a_file_without_a_usable_function_is_refused(
    name: str, source: str | None, message: str, tmp_path: Path
) -> None:
    if source is not None:
        (tmp_path / name.partition(":")[0]).write_text(source)
    with pytest.raises(ConfigurationError, match=rf"--reward\.function_path .*{name}.*{message}"):
        load_reward_function(str(tmp_path / name))
