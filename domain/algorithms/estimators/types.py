"""Input, parameters and result of an estimator.

Contract of every estimator `f(inputs, params) -> Advantages`:

- Per-token arrays are [N] over packed sequences, at the token's own position.
- Only action tokens count. Environment tokens are skipped, as if the action tokens on either side were adjacent. A
  value at a masked position, even NaN, has no effect.
- The result does not depend on the order or packing of the sequences, as long as branches of one rollout keep their
  order among themselves.
- Roles are estimated apart (`estimate`): no estimator sees two of them in one call.
- An episode is a rollout with all its branches, whose turns follow each other in the order in which they were sampled:
  the last action token of a branch is followed by the first of the next. So the result does not depend on whether a
  template rewrote the history and thereby opened a branch.
"""

from collections.abc import Callable, Mapping

import torch
from attrs import evolve, field, fields, frozen
from attrs.converters import optional
from torch import Tensor

from rollgrad.domain.algorithms.settings import AdvantageSettings


def _at_least_float32(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


@frozen(kw_only=True, eq=False)
class EstimatorInput:
    """Input of an estimator; half-precision arrays become float32."""

    rewards_N: Tensor = field(converter=_at_least_float32)
    """Each turn's reward, at the last token of its action segment."""
    token_rewards_N: Tensor = field(converter=_at_least_float32)
    """Further rewards of each token, such as -coef * KL."""
    action_mask_N: Tensor
    """Bool."""
    lengths_S: Tensor
    group_ids_S: Tensor
    """Int64: sequences of one group answer one prompt."""
    sample_ids_S: Tensor
    """Int64: sequences of one sample are branches of one rollout."""
    turn_ids_N: Tensor | None = None
    """Int64: turn of each action token within its rollout, in the order of sampling; None takes every run of adjacent
    action tokens for a turn."""
    values_N: Tensor | None = field(default=None, converter=optional(_at_least_float32))
    """From the critic."""
    baselines_S: Tensor | None = None
    """Reward of the prompt's greedy rollout."""
    reward_parts_SK: Tensor | None = None
    """Named rewards, which add up over a rollout's branches."""
    part_weights_K: Tensor | None = None
    """Weights of the named rewards."""
    state_ids_N: Tensor | None = None
    """Int64: state in which the turn of each action token was played, equal for the same state."""
    logprobs_N: Tensor | None = field(default=None, converter=optional(_at_least_float32))
    """Log-probs of the policy before the update."""
    collision_N: Tensor | None = field(default=None, converter=optional(_at_least_float32))
    """Collision entropy of the policy before the update (`TokenScores`)."""
    roles_S: tuple[str, ...] | None = None
    """Role of each sequence; None without roles."""

    def of_role(self, role: str) -> tuple["EstimatorInput", Tensor]:
        """Returns the input of the sequences of one role, without roles, and the places of their tokens."""
        mine_S = torch.tensor([own == role for own in self.roles_S or ()], device=self.lengths_S.device)
        mine_N = torch.repeat_interleave(mine_S, self.lengths_S)
        chosen = {"N": mine_N, "S": mine_S}
        columns = {
            column.name: getattr(self, column.name)[chosen[axis]]
            for column in fields(type(self))
            if isinstance(getattr(self, column.name), Tensor) and (axis := column.name.rpartition("_")[2][0]) in chosen
        }
        return evolve(self, roles_S=None, **columns), mine_N


EstimatorParams = AdvantageSettings
"""The section `algo.advantage`, which estimators read: `gamma`, `lambd`, `critic_lambd`, `length_adaptive_alpha`,
`prefix_weight`, `pass_k`, `step_weight`, `no_std_norm`."""


@frozen(kw_only=True, eq=False)
class Advantages:
    """Result of an estimator; both arrays are 0 outside actions."""

    advantages_N: Tensor
    """Factors of the policy's loss."""
    returns_N: Tensor
    """Targets of the critic."""
    metrics: Mapping[str, float] = field(factory=dict)
    """Numbers by names of the estimator's own, which become the metrics `advantage/NAME`."""


Estimator = Callable[..., Advantages]
"""Takes inputs and parameters; an estimator that was registered with settings of its own takes these third."""
