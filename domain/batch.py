"""`PackedBatch`: sequences laid end to end, without padding, as estimators and losses consume them.

Invariants: per-token arrays sit on the token's own position (the log-prob of token t is at t); padding and the
next-token shift exist only inside the adapter whose library needs them; what is not an action holds 0 in float
arrays, and no result depends on it. `select` and `concat` never change a sample, so any split or order of the same
samples holds the same information.
"""

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.domain.trajectory import SegmentKind, Trajectory

_TOKEN_FIELDS = [
    "tokens_N",
    "positions_N",
    "action_mask_N",
    "rewards_N",
    "rollout_logprobs_N",
    "versions_N",
    "old_logprobs_N",
    "ref_logprobs_N",
    "values_N",
    "advantages_N",
    "returns_N",
    "loss_weights_N",
    "value_weights_N",
]
_SEQUENCE_FIELDS = ["lengths_S", "prompt_lengths_S", "group_ids_S", "sample_ids_S", "scores_S", "truncated_S"]


@frozen(kw_only=True, eq=False)
class PackedBatch:
    """`S` sequences of `N` tokens in total.

    From the rollout: `tokens_N` int64, `positions_N` int64 (from 0 in each sequence), `action_mask_N` bool,
    `rewards_N` float32 (each turn's reward on the last token of its action segment), `rollout_logprobs_N` float32
    (under the sampling distribution), `versions_N` int32, `lengths_S`, `prompt_lengths_S`, `group_ids_S`,
    `sample_ids_S` int64, `scores_S` float32, `truncated_S` bool.

    Filled in on the way (None until then): `old_logprobs_N` (policy before the update; None means "equal to the
    current policy", so that the ratio is exactly 1), `ref_logprobs_N`, `values_N`, `advantages_N`, `returns_N`, and
    `loss_weights_N` / `value_weights_N`: the weight of each token in the loss of the whole optimizer step, so that
    a loss is always the plain sum of weight x token loss, however the step is split.
    """

    tokens_N: Tensor
    positions_N: Tensor
    action_mask_N: Tensor
    rewards_N: Tensor
    rollout_logprobs_N: Tensor
    versions_N: Tensor
    lengths_S: Tensor
    prompt_lengths_S: Tensor
    group_ids_S: Tensor
    sample_ids_S: Tensor
    scores_S: Tensor
    truncated_S: Tensor
    old_logprobs_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    values_N: Tensor | None = None
    advantages_N: Tensor | None = None
    returns_N: Tensor | None = None
    loss_weights_N: Tensor | None = None
    value_weights_N: Tensor | None = None

    @property
    def starts_S(self) -> Tensor:
        """Index of each sequence's first token."""
        return self.lengths_S.cumsum(0) - self.lengths_S

    @property
    def sequence_ids_N(self) -> Tensor:
        """Which sequence (0..S-1) each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.lengths_S.device), self.lengths_S)

    @property
    def token_count(self) -> int:
        """N."""
        return len(self.tokens_N)

    def __len__(self) -> int:
        return len(self.lengths_S)

    def select(self, indices: Sequence[int] | Tensor) -> "PackedBatch":
        """The sequences at `indices`, in that order."""
        index_S = torch.as_tensor(indices, dtype=torch.int64)
        lengths_S = self.lengths_S[index_S]
        offsets_S = self.starts_S[index_S] - (lengths_S.cumsum(0) - lengths_S)
        index_N = torch.arange(int(lengths_S.sum())) + torch.repeat_interleave(offsets_S, lengths_S)
        columns: dict[str, Any] = {name: getattr(self, name)[index_S] for name in _SEQUENCE_FIELDS}
        for name in _TOKEN_FIELDS:
            column_N = getattr(self, name)
            columns[name] = None if column_N is None else column_N[index_N]
        return PackedBatch(**columns)


def pack(trajectories: Sequence[Trajectory]) -> PackedBatch:
    """Lays trajectories end to end.

    Raises:
        ValueError: `trajectories` is empty.
    """
    if not trajectories:
        raise ValueError("Nothing to pack: a batch holds at least one trajectory.")
    lengths_S = torch.tensor([len(t) for t in trajectories], dtype=torch.int64)
    total = int(lengths_S.sum())
    action_mask_N = torch.zeros(total, dtype=torch.bool)
    rewards_N = torch.zeros(total)
    start = 0
    for trajectory in trajectories:
        for segment in trajectory.segments:
            if segment.kind is SegmentKind.ACTION:
                action_mask_N[start + segment.start : start + segment.stop] = True
                rewards_N[start + segment.stop - 1] = segment.reward
        start += len(trajectory)
    starts_S = lengths_S.cumsum(0) - lengths_S
    return PackedBatch(
        tokens_N=torch.cat([t.token_ids_T for t in trajectories]),
        positions_N=torch.arange(total) - torch.repeat_interleave(starts_S, lengths_S),
        action_mask_N=action_mask_N,
        rewards_N=rewards_N,
        rollout_logprobs_N=torch.cat([t.logprobs_T for t in trajectories]),
        versions_N=torch.cat([t.versions_T for t in trajectories]),
        lengths_S=lengths_S,
        prompt_lengths_S=torch.tensor([t.prompt_length for t in trajectories]),
        group_ids_S=torch.tensor([t.group_id for t in trajectories]),
        sample_ids_S=torch.tensor([t.sample_id for t in trajectories]),
        scores_S=torch.tensor([t.score for t in trajectories], dtype=torch.float32),
        truncated_S=torch.tensor([t.stop_reason.truncated for t in trajectories]),
    )
