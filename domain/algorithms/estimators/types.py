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
    """Input of an estimator; half-precision arrays become float32.

    `rewards_N`: each turn's reward, at the last token of its action segment. `token_rewards_N`: further rewards of each
    token, such as -coef * KL. `action_mask_N`: bool. `turn_ids_N`: int64, turn of each action token within its rollout,
    in the order in which they were sampled; None takes every run of adjacent action tokens for a turn. `lengths_S`,
    `group_ids_S`, `sample_ids_S`: int64; sequences of one group answer one prompt, sequences of one sample are branches
    of one rollout. `values_N`: from the critic. `baselines_S`: reward of the prompt's greedy rollout.
    `logprobs_N`, `collision_N`: of the policy before the update, the second as `TokenScores` has it.
    `state_ids_N`: int64, state in which the turn of each action token was played, equal for the same.
    `reward_parts_SK`, `part_weights_K`: named rewards, which add up over a rollout's branches, and their weights.
    `roles_S`: the role of each sequence; None without any."""

    rewards_N: Tensor = field(converter=_at_least_float32)
    token_rewards_N: Tensor = field(converter=_at_least_float32)
    action_mask_N: Tensor
    lengths_S: Tensor
    group_ids_S: Tensor
    sample_ids_S: Tensor
    turn_ids_N: Tensor | None = None
    values_N: Tensor | None = field(default=None, converter=optional(_at_least_float32))
    baselines_S: Tensor | None = None
    reward_parts_SK: Tensor | None = None
    part_weights_K: Tensor | None = None
    state_ids_N: Tensor | None = None
    logprobs_N: Tensor | None = field(default=None, converter=optional(_at_least_float32))
    collision_N: Tensor | None = field(default=None, converter=optional(_at_least_float32))
    roles_S: tuple[str, ...] | None = None

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
    """`advantages_N`, which multiply the policy's loss, and `returns_N`, the critic's targets; both 0 outside
    actions. `metrics` are numbers by names of the estimator's own, which are the metrics `advantage/NAME`."""

    advantages_N: Tensor
    returns_N: Tensor
    metrics: Mapping[str, float] = field(factory=dict)


Estimator = Callable[..., Advantages]
"""Takes inputs and parameters; an estimator that was registered with settings of its own takes these third."""
