"""A program may assign a setting's value as a text, in any spelling, as a path, a list or a number; other types are
refused, and what it gives as a reward is called."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollgrad.adapters.rewards.none import NoReward
from rollgrad.application.settings.dpo import DPORun
from rollgrad.application.settings.kd import KDRun
from rollgrad.application.settings.kto import KTORun
from rollgrad.application.settings.loop import RSRun
from rollgrad.application.settings.prm import PRMRun
from rollgrad.application.settings.rm import RMRun
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.errors import ConfigurationError, ManyProblemsError, RollgradError
from rollgrad.entrypoints.generation import generate, score
from rollgrad.entrypoints.kinds import settle
from rollgrad.entrypoints.library import container_with, evaluate, train
from rollgrad.entrypoints.loop import loop
from rollgrad.entrypoints.offline import train_dpo, train_kd, train_kto, train_prm, train_rm, train_sft

CASES = [
    (train_sft, SFTRun),
    (train_dpo, DPORun),
    (train_kto, KTORun),
    (train_rm, RMRun),
    (train_prm, PRMRun),
    (train_kd, KDRun),
]


@pytest.mark.parametrize(("train_on_examples", "kind"), CASES)
def test_a_text_becomes_the_choice_that_it_names(
    train_on_examples: Callable[..., Any], kind: Any, tmp_path: Path
) -> None:
    run = kind()
    run.actor.dtype = "BF16"
    run.ckpt.output_dir = str(tmp_path / "run")
    with pytest.raises(RollgradError, match=r"actor\.model_name_or_path"):  # which is not set
        train_on_examples(run)
    assert run.actor.dtype is DType.BFLOAT16


@pytest.mark.parametrize(("train_on_examples", "kind"), CASES)
def test_one_that_names_none_is_refused(train_on_examples: Callable[..., Any], kind: Any) -> None:
    run = kind()
    run.actor.dtype = "bf17"
    with pytest.raises(ConfigurationError, match=r"actor.dtype is 'bf17', which is none of auto, bfloat16, .*: change"):
        train_on_examples(run)


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


def test_a_program_may_assign_paths_lists_and_numbers_of_other_types() -> None:
    run = RLConfig()
    for section, name, value in (
        (run.data, "prompt_dataset", Path("sums.jsonl")),
        (run.actor, "eps_clip_low_high", [0.2, 1]),
        (run.rollout, "n_samples_per_prompt", np.int64(4)),
        (run.rollout, "engine", "vLLM"),
    ):
        setattr(section, name, value)
    settle(run)
    assert (run.data.prompt_dataset, run.actor.eps_clip_low_high) == ("sums.jsonl", (0.2, 1.0))
    assert (type(run.rollout.n_samples_per_prompt), run.rollout.engine) == (int, Engine.VLLM)


def test_values_of_wrong_types_are_refused_together() -> None:
    run = RLConfig()
    for section, name, value in (
        (run.actor, "lora", {"rank": 8}),
        (run.actor, "dtype", "bf17"),
        (run.rollout, "batch_size", "2"),
        (run.rollout, "top_p", None),
        (run.agent, "tools", [len]),
    ):
        setattr(section, name, value)
    with pytest.raises(ManyProblemsError) as caught:
        train(run)
    assert str(caught.value).splitlines() == [
        "actor.lora is {'rank': 8}, but it must be a section of settings: set actor.lora.NAME for each of its own.",
        "rollout.batch_size is '2', but it must be an integer: change --rollout.batch_size.",
        "rollout.top_p is None, but it must be a number: change --rollout.top_p.",
        "agent.tools is [<built-in function len>], but it must be text or null: name the file or the module with the "
        "code in --agent.tools, or give it to the call as docs/library.md says.",
        "actor.dtype is 'bf17', which is none of auto, bfloat16, float16, float32: change --actor.dtype.",
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda: evaluate(with_text_for_a_number(RLConfig())),
        lambda: generate(with_text_for_a_number(RLConfig()), "out.jsonl"),
        lambda: score(with_text_for_a_number(RLConfig()), "in.jsonl", "out.jsonl"),
        lambda: loop(with_text_for_a_number(RSRun())),
    ],
    ids=["evaluate", "generate", "score", "loop"],
)
def test_every_call_that_takes_settings_refuses_them(call: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"rollout\.max_new_tokens is '24', but it must be an integer"):
        call()


def with_text_for_a_number(run: Any) -> Any:
    """Returns the settings of a run, one of them of a wrong type."""
    run.rollout.max_new_tokens = "24"
    return run
