"""Runs that sample, judge, select and learn, again and again: their sections, and the runs that they consist of.

Importable without torch; `loop_rules.py` holds the rules across settings.
"""

from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import define, evolve

from rollgrad.application.settings.derived import longest_sample
from rollgrad.application.settings.dpo import DPORun, PreferenceModelConfig, has_reference
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.run import WITH_VLLM, RLConfig
from rollgrad.application.settings.sections.actor import ActorConfig
from rollgrad.application.settings.sections.ckpt import CheckpointConfig, Resume
from rollgrad.application.settings.sections.cluster import ClusterConfig
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.application.settings.sections.ds import DeepSpeedConfig
from rollgrad.application.settings.sections.eval import EvalConfig
from rollgrad.application.settings.sections.examples import (
    ExampleDataConfig,
    ExampleFormat,
    ExampleModelConfig,
    ExampleTrainConfig,
    PairDataConfig,
)
from rollgrad.application.settings.sections.logger import LoggerConfig
from rollgrad.application.settings.sections.ref import RefConfig
from rollgrad.application.settings.sections.reward import RewardConfig
from rollgrad.application.settings.sections.rollout import RolloutConfig
from rollgrad.application.settings.sections.train import TrainConfig
from rollgrad.application.settings.sections.vllm import VLLMConfig
from rollgrad.application.settings.sft import SFTRun, SupervisedModelConfig, SupervisedTrainConfig
from rollgrad.domain.algorithms.preference_settings import PreferenceSettings
from rollgrad.domain.settings import COUNT, NOT_NEGATIVE, Range, own_first, section, setting

RENDERING_ROOM = 256
"""Tokens that a reply may have more when its text is rendered again: the end of its turn, and the reward before it."""

IMAGES = "images"
"""Column with the images of what is learned from."""


class Reference(StrEnum):
    """Reference of iterated preference learning."""

    INITIAL = "initial"
    """The model that the loop began with."""
    PREVIOUS = "previous"
    """The model that the iteration begins with."""


@define(kw_only=True)
class LoopConfig:
    """The loop."""

    iterations: int = setting(3, "Times that the model samples, is judged, and learns.", COUNT)


@define(kw_only=True)
class RSConfig(LoopConfig):
    """The loop, and which replies are learned from."""

    top_k: int = setting(1, "Best different replies to each prompt that are learned from.", COUNT)
    min_reward: float | None = setting(None, "Least reward of such a reply; none takes the best, however bad.")
    min_margin: float = setting(
        0.0, "Least difference between the rewards of the best and the worst reply to a prompt.", NOT_NEGATIVE
    )


@define(kw_only=True)
class IterDPOConfig(LoopConfig):
    """The loop, and which replies are compared."""

    min_margin: float = setting(
        0.0,
        "Least difference between the rewards of the best and the worst reply to a prompt, which become a pair; where "
        "they are equal there is none.",
        NOT_NEGATIVE,
    )
    reference: Reference = setting(
        Reference.INITIAL,
        "Reference of each iteration: initial, the model that the loop began with, or previous, the one that the "
        "iteration begins with.",
    )


@define(kw_only=True)
class CSFTConfig(LoopConfig):
    """The loop, and how a prompt says what its reply is worth."""

    suffix: str = setting(
        " <rm_score>: {reward:.2f} ",
        "Text behind the prompt's own, in the last user message, before the template renders it; {reward} is the "
        "reward of the reply.",
        Range(lambda text: _formats(text), "a text with {reward}, such as ' <rm_score>: {reward:.2f} '"),
    )
    normalize: bool = setting(
        True, "Subtract the mean of the iteration's rewards, and divide by their standard deviation."
    )
    target: float = setting(5.0, "Reward that the trained model is asked for, in later iterations and in evaluation.")


def _formats(suffix: str) -> bool:
    try:
        return suffix.format(reward=1.0) != suffix.format(reward=2.0)
    except (ValueError, LookupError, AttributeError, TypeError):
        return False


@define(kw_only=True)
class LoopRun:
    """A run that samples, judges, selects and learns, again and again."""

    loop: LoopConfig = section(LoopConfig, "The loop.")
    actor: ExampleModelConfig = section(ExampleModelConfig, "The model that samples and is trained.")
    data: DataConfig = section(DataConfig, "The prompts.")
    rollout: RolloutConfig = section(RolloutConfig, "How replies are sampled: batch_size prompts an iteration.")
    vllm: VLLMConfig = section(VLLMConfig, "The engines of rollout.engine vllm.", only_if=WITH_VLLM)
    reward: RewardConfig = section(RewardConfig, "What a reply is worth.")
    train: ExampleTrainConfig = section(ExampleTrainConfig, "How the examples of an iteration become optimizer steps.")
    eval: EvalConfig = section(EvalConfig, "Evaluation, of the first model and of each iteration's.")
    cluster: ClusterConfig = section(ClusterConfig, "Processes of their own for models and engines.")
    ds: DeepSpeedConfig = section(DeepSpeedConfig, "How models are divided over their processes.")
    ckpt: CheckpointConfig = section(CheckpointConfig, "What is written where.")
    logger: LoggerConfig = section(LoggerConfig, "Where metrics go.")


@define(kw_only=True, field_transformer=own_first)
class RSRun(LoopRun):
    """Rejection sampling."""

    loop: RSConfig = section(RSConfig, "The loop, and which replies are learned from.")
    actor: SupervisedModelConfig = section(SupervisedModelConfig, "The model that samples and is trained.")
    train: SupervisedTrainConfig = section(SupervisedTrainConfig, "How replies become optimizer steps.")


@define(kw_only=True, field_transformer=own_first)
class IterDPORun(LoopRun):
    """Iterated preference learning."""

    loop: IterDPOConfig = section(IterDPOConfig, "The loop, and which replies are compared.")
    actor: PreferenceModelConfig = section(PreferenceModelConfig, "The model that samples and is trained.")
    dpo: PreferenceSettings = section(PreferenceSettings, "The loss of preference pairs.")


@define(kw_only=True, field_transformer=own_first)
class CSFTRun(LoopRun):
    """Supervised fine-tuning on condition of the reward."""

    loop: CSFTConfig = section(CSFTConfig, "The loop, and how a prompt says what its reply is worth.")
    actor: SupervisedModelConfig = section(SupervisedModelConfig, "The model that samples and is trained.")
    train: SupervisedTrainConfig = section(SupervisedTrainConfig, "How replies become optimizer steps.")


def target_suffix(run: LoopRun) -> str | None:
    """Returns the text after the prompts of a model that was trained on condition of the reward; None of others."""
    return run.loop.suffix.format(reward=run.loop.target) if isinstance(run, CSFTRun) else None


def sampling_run(run: LoopRun, *, model: str | None = None, trained: bool = False) -> RLConfig:
    """Returns the settings by which a model of the loop, by default the first, samples, is judged and is evaluated.
    `trained`: the loop has trained it."""
    names = ("num_nodes", "num_gpus_per_node", "dtype", "float32_head")
    actor = ActorConfig(**{name: getattr(run.actor, name) for name in names})
    actor.model_name_or_path = model or run.actor.model_name_or_path
    suffix = target_suffix(run) if trained else None
    return RLConfig(
        actor=actor,
        data=run.data if suffix is None else evolve(run.data, prompt_suffix=suffix),
        rollout=run.rollout,
        vllm=run.vllm,
        reward=run.reward,
        train=TrainConfig(seed=run.train.seed),
        eval=run.eval,
        cluster=run.cluster,
        ds=run.ds,
        ckpt=run.ckpt,
        logger=run.logger,
    )


def training_run(run: LoopRun, *, examples: str, model: str | None = None, output_dir: str | None = None) -> OfflineRun:
    """Returns the settings by which a model of the loop, by default the first, learns from the file `examples`."""
    data: dict[str, Any] = {
        name: getattr(run.data, name) for name in ("apply_chat_template", "chat_template", "chat_template_kwargs")
    }
    data |= {"dataset": examples, "max_tokens": longest_sample(sampling_run(run)) + RENDERING_ROOM}
    if run.data.image_key is not None:
        data["image_key"] = IMAGES
    initial = run.actor.model_name_or_path
    common: dict[str, Any] = {
        "actor": evolve(run.actor, model_name_or_path=model or initial),
        "train": run.train,
        "cluster": run.cluster,
        "ds": run.ds,
        "ckpt": evolve(run.ckpt, output_dir=output_dir or run.ckpt.output_dir, resume=Resume.AUTO),
        "logger": run.logger,
    }
    if output_dir:  # each iteration counts its steps from 1, and has curves of its own
        iteration, logger = Path(output_dir).parent, run.logger
        common["logger"] = evolve(
            logger,
            tensorboard_dir=logger.tensorboard_dir and str(Path(logger.tensorboard_dir) / iteration.name),
            run_name=f"{logger.run_name or iteration.parent.name}-{iteration.name}" if logger.report_to else None,
        )
    if isinstance(run, IterDPORun):
        from_start = run.loop.reference is Reference.INITIAL and model not in (None, initial) and has_reference(run.dpo)
        reference = RefConfig(model_name_or_path=initial) if from_start else RefConfig()
        return DPORun(**common, data=PairDataConfig(**data), dpo=run.dpo, ref=reference)
    kind = ExampleFormat.COMPLETION if isinstance(run, CSFTRun) else ExampleFormat.TOKENS
    return SFTRun(**common, data=ExampleDataConfig(**data, format=kind))
