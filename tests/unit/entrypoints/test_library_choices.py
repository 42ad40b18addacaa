"""A program may assign a setting's value as a text, in any spelling, to runs of every trainer over examples; what it
gives as a reward is called."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgrad.adapters.rewards.none import NoReward
from rollgrad.application.settings.dpo import DPORun
from rollgrad.application.settings.kd import KDRun
from rollgrad.application.settings.kto import KTORun
from rollgrad.application.settings.prm import PRMRun
from rollgrad.application.settings.rm import RMRun
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.errors import ConfigurationError, RollgradError
from rollgrad.entrypoints.library import container_with
from rollgrad.entrypoints.offline import train_dpo, train_kd, train_kto, train_prm, train_rm, train_sft

CASES = [
    (train_sft, SFTRun),
    (train_dpo, DPORun),
    (train_kto, KTORun),
    (train_rm, RMRun),
    (train_prm, PRMRun),
    (train_kd, KDRun),
]


@pytest.mark.parametrize(("train", "kind"), CASES)
def test_a_text_becomes_the_choice_that_it_names(train: Callable[..., Any], kind: Any, tmp_path: Path) -> None:
    run = kind()
    run.actor.dtype = "BF16"
    run.ckpt.output_dir = str(tmp_path / "run")
    with pytest.raises(RollgradError, match=r"actor\.model_name_or_path"):  # which is not set
        train(run)
    assert run.actor.dtype is DType.BFLOAT16


@pytest.mark.parametrize(("train", "kind"), CASES)
def test_one_that_names_none_is_refused(train: Callable[..., Any], kind: Any) -> None:
    run = kind()
    run.actor.dtype = "bf17"
    with pytest.raises(ConfigurationError, match=r"actor.dtype is 'bf17', which is none of auto, bfloat16, .*: change"):
        train(run)


def test_rewards_that_cannot_judge_are_refused_before_anything_is_loaded() -> None:
    refused: list[tuple[Any, str]] = [
        ([3, "x"], r"(?s)reward has a int, which cannot be called: give a function .*reward has a str, which"),
        (3, "reward is a int, which cannot be called"),
        ([], "reward is an empty list"),
        ([NoReward(), NoReward()], r"Two of the rewards NoReward, NoReward are called NoReward: give functions"),
    ]
    for reward, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            container_with(RLConfig(), reward, None, {})


async def test_several_functions_are_one_reward_with_their_names() -> None:
    def right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]

    def short(completions: list[str], **kwargs: Any) -> list[float]:
        return [-float(len(text)) for text in completions]

    config = RLConfig()
    config.reward.weights = {"right": 1.0, "short": 0.1}
    reward = container_with(config, [right, short], None, {}).reward()
    prompt = Prompt(token_ids=(), text="", metadata={"answer": "42"})
    (judged,) = await reward.score([RewardRequest(prompt=prompt, response="42", stop_reason=StopReason.STOP)])
    assert judged.parts == {"right": 1.0, "short": -2.0}
    assert judged.value == pytest.approx(0.8)
