"""A run that trains a process reward model on labelled steps: its sections, and the rules across them.

Importable without torch.
"""

from collections.abc import Iterator

from attrs import define

from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.rules.examples import example_errors
from rollgrad.application.settings.sections.examples import (
    ExampleAdamConfig,
    ExampleModelConfig,
    ExampleTrainConfig,
    StepDataConfig,
    with_default_lrs,
)
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.settings import own_first, section, setting


@define(kw_only=True, field_transformer=with_default_lrs)
class StepAdamConfig(ExampleAdamConfig):
    """AdamW on float32 master weights; biases and norm weights are not decayed."""

    default_lrs = (1e-6, 1e-5)


@define(kw_only=True)
class StepModelConfig(ExampleModelConfig):
    """The model that becomes a process reward model, and its optimizer."""

    adam: StepAdamConfig = section(StepAdamConfig, "AdamW.")


@define(kw_only=True)
class StepRewardConfig:
    """The loss of a step: cross-entropy of its label over two tokens, as what the model says after the step."""

    reward_tokens: tuple[str, str] = setting(
        ("+", "-"), "The token for a step that is right, and the one for a step that is wrong; each is one token."
    )


@define(kw_only=True, field_transformer=own_first)
class PRMRun(OfflineRun):
    """A run that trains a process reward model on labelled steps."""

    actor: StepModelConfig = section(StepModelConfig, "The model that becomes a process reward model.")
    prm: StepRewardConfig = section(StepRewardConfig, "The loss of a step.")
    data: StepDataConfig = section(StepDataConfig, "The solutions with labelled steps.")
    train: ExampleTrainConfig = section(ExampleTrainConfig, "How solutions become optimizer steps.")

    def evaluated(self) -> tuple[str, ...]:
        """Returns the metrics of `StepObjective`."""
        return "loss", "step_accuracy", "first_error_accuracy", "error_f1"


def prm_errors(run: PRMRun) -> list[ConfigurationError]:
    """Returns every rule that the settings of a run break that trains a process reward model."""
    return example_errors(run, step_problems)


def step_problems(run: PRMRun) -> Iterator[str]:
    """Yields what is wrong with the steps and the tokens that judge them."""
    data, default = run.data, StepDataConfig()
    if data.placeholder == "":
        yield "data.placeholder is empty, so that no step ends: set --data.placeholder to the text at their ends."
    if data.placeholder is not None and (data.prompt_key, data.separator) != (None, default.separator):
        yield (
            f"data.placeholder is {data.placeholder!r}, so that a row is one text, but data.prompt_key or "
            "data.separator is set: leave them out, or --data.placeholder."
        )
    for name in ("system_prompt", "chat_template_kwargs", "input_template", "image_key"):
        if data.placeholder is not None and getattr(data, name) is not None:
            yield (
                f"data.placeholder is {data.placeholder!r}, so that a row is one text as the model reads it, but "
                f"data.{name} is set: leave --data.{name} out, or --data.placeholder."
            )
    if run.actor.float32_head:
        yield (
            "actor.float32_head is set, but the two tokens of a process reward model are always compared in float32: "
            "leave --actor.float32_head out."
        )
    if run.prm.reward_tokens[0] == run.prm.reward_tokens[1]:
        yield (
            f"prm.reward_tokens are both {run.prm.reward_tokens[0]!r}, so that they tell nothing: set "
            "--prm.reward_tokens to two different tokens."
        )
