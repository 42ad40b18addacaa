"""A run that trains a reward model on preference pairs: its sections, and the rules across them.

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
    LongRows,
    PairDataConfig,
    with_default_lrs,
)
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.settings import NOT_NEGATIVE, own_first, section, setting


@define(kw_only=True, field_transformer=with_default_lrs)
class RewardAdamConfig(ExampleAdamConfig):
    """AdamW on float32 master weights; biases and norm weights are not decayed."""

    default_lrs = (9e-6, 9e-5)


@define(kw_only=True)
class RewardModelConfig(ExampleModelConfig):
    """The model that becomes a reward model, and its optimizer."""

    adam: RewardAdamConfig = section(RewardAdamConfig, "AdamW.")


@define(kw_only=True)
class PairwiseRewardConfig:
    """The loss of a pair, -log sigmoid(r_chosen - r_rejected - margin), which others call sigmoid or logexp."""

    margin: bool = setting(
        False, "Take the margin from the column margin of each row (0 where it has none); without it all are 0."
    )
    centring: float = setting(
        0.0,
        "Weight of (r_chosen + r_rejected)^2, which holds scores around 0 (Eisenstein et al. 2023, arXiv:2312.09244); "
        "0.01 is usual.",
        NOT_NEGATIVE,
    )


@define(kw_only=True, field_transformer=own_first)
class RMRun(OfflineRun):
    """A run that trains a reward model on preference pairs."""

    actor: RewardModelConfig = section(RewardModelConfig, "The model that becomes a reward model.")
    rm: PairwiseRewardConfig = section(PairwiseRewardConfig, "The loss of a pair.")
    data: PairDataConfig = section(PairDataConfig, "The preference pairs.")
    train: ExampleTrainConfig = section(ExampleTrainConfig, "How pairs become optimizer steps.")

    def evaluated(self) -> tuple[str, ...]:
        """Returns the metrics of `RewardObjective`."""
        rewards = ("reward_gap", "chosen_reward", "rejected_reward")
        return "loss", "accuracy", "calibration_error", *rewards, "score_mean", "score_std"


def rm_errors(run: RMRun) -> list[ConfigurationError]:
    """Returns every rule that the settings of a run break that trains a reward model."""
    return example_errors(run, reward_problems)


def reward_problems(run: RMRun) -> Iterator[str]:
    """Yields what a reward model has no use for."""
    if run.data.overlong is LongRows.CUT:
        yield (
            "data.overlong is cut, but a reward model judges whole replies, by their last token: set --data.overlong "
            "to drop or error, or raise --data.max_tokens."
        )
    if run.actor.float32_head:
        yield (
            "actor.float32_head is set, but a reward model has no vocabulary's head, and its score is always computed "
            "in float32: leave --actor.float32_head out."
        )
    for name in ("aux_loss_coef", "router_z_loss_coef"):
        if coef := getattr(run.actor, name):
            yield (
                f"actor.{name} is {coef:g}, but reward models are trained without losses of routers: leave "
                f"--actor.{name} out."
            )
