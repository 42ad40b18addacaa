"""A program may assign a setting's value as a text, in any spelling, to runs of every trainer over examples; what it
gives as a reward is called."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgrad.application.settings.dpo import DPORun
from rollgrad.application.settings.kd import KDRun
from rollgrad.application.settings.kto import KTORun
from rollgrad.application.settings.prm import PRMRun
from rollgrad.application.settings.rm import RMRun
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sft import SFTRun
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


def test_several_rewards_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigurationError, match=r"reward is a list, which cannot be called: give one function\."):
        container_with(RLConfig(), [3, 4], None, {})  # type: ignore[arg-type]


def test_several_functions_are_told_the_one_that_they_become() -> None:
    def right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]

    def short(completions: list[str], **kwargs: Any) -> list[float]:
        return [-float(len(text)) for text in completions]

    with pytest.raises(ConfigurationError) as error:
        container_with(RLConfig(), [right, short], None, {})  # type: ignore[arg-type]
    names: dict[str, Any] = {"right": right, "short": short}
    exec(str(error.value).partition("weighs: ")[2], names)
    rewards = names["rewards"](completions=["7", "12"], answer=["7", "8"], step=0)
    assert rewards == {"rewards": {"right": [1.0, 0.0], "short": [-1.0, -2.0]}}
