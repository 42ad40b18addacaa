"""Several rewards as one: weights, names, what does not apply, and the settings that ask for them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollgrad.adapters.rewards.function import FunctionReward
from rollgrad.adapters.rewards.weighted import WeightedRewards
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.reward import Verifier
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import ConfigurationError, NotApplicableError, RewardError
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.entrypoints.composition.rl.container import rl_container


def ask(reply: str, label: str = "42") -> RewardRequest:
    prompt = Prompt(token_ids=(), text="What is 6 x 7? ", label=label)
    return RewardRequest(prompt=prompt, response=reply, stop_reason=StopReason.STOP)


def constant(value: Any) -> FunctionReward:
    return FunctionReward(lambda completions: value, timeout=60.0)


async def score(sources: dict[str, RewardSource], weights: dict[str, float] | None = None) -> Reward:
    (reward,) = await WeightedRewards(sources, weights).score([ask("42")])
    return reward


async def test_the_sum_is_that_of_one_function_that_returns_all_by_name() -> None:
    weights = {"right": 1.0, "brief": -0.5, "polite": 2.0}
    parts = {"right": [1.0], "brief": [0.25], "polite": [0.5]}
    (one,) = await FunctionReward(lambda completions: {"rewards": parts}, timeout=60.0, weights=weights).score(
        [ask("42")]
    )
    apart = await score({name: constant(value) for name, value in parts.items()}, weights)
    of_two = {"right": parts["right"], "brief": parts["brief"]}
    mixed = await score({"both": constant({"rewards": of_two}), "polite": constant([0.5])}, weights)
    assert one == apart == mixed
    assert (await score({"a": constant([1.0]), "b": constant([2.0])})).value == 3.0


async def test_what_does_not_apply_counts_nothing() -> None:
    (trl,) = await WeightedRewards({"code": constant([None]), "math": constant([1.0])}).score([ask("42")])
    assert (trl.value, trl.parts) == (1.0, {"code": 0.0, "math": 1.0})
    weighed = await score({"code": constant([None]), "math": constant([1.0])}, {"code": 1.0, "math": 2.0})
    assert (weighed.value, weighed.parts) == (2.0, {"code": 0.0, "math": 1.0})
    with pytest.raises(NotApplicableError, match="None of the rewards code, math applies"):
        await score({"code": constant([None]), "math": constant([None])})


async def test_scores_answers_and_feedback_are_those_of_the_parts() -> None:
    graded = {"rewards": [1.0], "scores": [0.5], "answers": ["42"], "feedback": ["right"], "extra_logs": {"n": 3}}
    reward = await score(
        {"a": constant(graded), "b": constant({"rewards": [1.0], "feedback": ["long"]})}, {"a": 2.0, "b": 0.5}
    )
    assert (reward.value, reward.score, reward.answer, reward.feedback) == (2.5, 1.5, "42", "right\nlong")
    assert reward.metrics == {"n": 3.0, "a": 1.0, "b": 1.0}


async def test_an_error_waits_for_the_others_and_names_its_function() -> None:
    ended = []

    async def slow(completions: Sequence[str]) -> list[float]:
        await asyncio.sleep(0)
        ended.append(1)
        return [0.0]

    def broken(completions: Sequence[str]) -> list[float]:
        raise KeyError("gold")

    sources = {"broken": FunctionReward(broken, timeout=60.0, name="broken"), "slow": FunctionReward(slow, timeout=60)}
    with pytest.raises(RewardError, match=r"^broken raised KeyError"):
        await score(sources)
    assert ended == [1]


async def test_each_has_a_time_limit_of_its_own() -> None:
    async def hangs(completions: Sequence[str]) -> list[float]:
        await asyncio.Event().wait()
        return [0.0]

    sources = {"hangs": FunctionReward(hangs, timeout=0.05, name="hangs"), "fine": constant([1.0])}
    with pytest.raises(RewardError, match=r"^hangs gave no answer for 1 reply within 0\.05 s"):
        await score(sources)


async def test_names_are_told_apart() -> None:
    with pytest.raises(ConfigurationError, match="Two rewards are called b: give one of them another name"):
        await score({"a": constant({"rewards": {"b": [1.0]}}), "b": constant([1.0])})
    with pytest.raises(ConfigurationError, match=r"The rewards are a, b, but reward.weights names a, c: give one"):
        await score({"a": constant([1.0]), "b": constant([1.0])}, {"a": 1.0, "c": 1.0})


async def test_settings_name_functions_and_a_verifier_together(tmp_path: Path) -> None:
    brief, more = tmp_path / "brief.py", tmp_path / "more.py"
    brief.write_text("def reward_func(completions):\n    return [float(len(text) < 4) for text in completions]\n")
    more.write_text("def polite(completions):\n    return [float('please' in text) for text in completions]\n")
    config = RLConfig()
    config.reward.function_path = f"{brief}, {more}:polite"
    config.reward.verifier = Verifier.LAST_NUMBER
    config.reward.weights = {"brief": 0.25, "polite": 0.5, "last_number": 1.0}
    assert [name for _, name in config.reward.sources] == ["brief", "polite", "last_number"]
    container = rl_container(config)
    try:
        first, second = await container.reward().score([ask("42"), ask("please, 42")])
    finally:
        container.shutdown_resources()
    assert (first.value, second.value) == (1.25, 1.5)
    assert second.parts == {"brief": 0.0, "polite": 1.0, "last_number": 1.0}
    assert first.answer == "42"
