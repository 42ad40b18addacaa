"""`PackedBatch`: sequences laid end to end, without padding, as estimators and losses consume them.

Invariants: per-token arrays sit on the token's own position (the log-prob of token t is at t). Padding and the
next-token shift exist only inside the adapter whose library needs them. Float arrays hold 0 at tokens that are no
actions, and no result depends on these entries. `select` never changes a sample, so any split or order of the same
samples holds the same information.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar

import torch
from attrs import Factory, evolve, field, fields, frozen
from torch import Tensor

from rollgrad.domain.batches.by_sequence import first_appearances, rollout_ids
from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.episodes.routed import laid_end_to_end
from rollgrad.domain.episodes.top_logprobs import end_to_end, unsaid
from rollgrad.domain.episodes.trajectory import Segment, SegmentKind, Trajectory
from rollgrad.domain.errors import TrajectoryError

Batch = TypeVar("Batch", bound="PackedBatch")


@frozen(kw_only=True, eq=False)
class PackedBatch:
    """`S` sequences of `N` tokens in total, and the columns that all trainers have.

    A subclass adds columns. The last part of a column's name is its shape, by which `select` knows it: N is an entry
    for each token, S one for each sequence, SK a row of K entries for each sequence, NLK K entries for each token and
    each of L layers. Tensors hold int64 where nothing else is said.
    """

    units_divisible: ClassVar[bool] = False
    """Whether a forward pass may have some sequences of a unit without the others, where all are too long for it: only
    if no loss compares them."""

    tokens_N: Tensor
    """Token ids."""
    action_mask_N: Tensor
    """Bool: tokens that are trained."""
    lengths_S: Tensor
    """Tokens of each sequence."""
    prompt_lengths_S: Tensor
    """Tokens of each sequence's prompt."""
    group_ids_S: Tensor
    """Group of each sequence. Neighbours of one group share the forward pass of an equal prompt."""
    unit_ids_S: Tensor = field(default=Factory(lambda batch: torch.arange(len(batch.lengths_S)), takes_self=True))
    """Unit of each sequence; by default each sequence is one. An optimizer step has all sequences of a unit or none: a
    preference pair, the branches of one rollout."""
    loss_weights_N: Tensor | None = None
    """Float32: weight of each token in the loss of the whole optimizer step, so that a loss is the plain sum of weight
    x token loss however the step is split; None until it is known."""
    shares_S: Tensor | None = None
    """Share of a forward pass that each sequence was planned for; None where no division was planned."""
    shares: int = 1
    """Number of equal shares of a forward pass. One process, or a group of them, computes each."""
    images_S: tuple[PlacedImages, ...] = ()
    """Images of each sequence, whose places count from its first token; empty where no sequence has any."""
    prescribed_S: tuple[tuple[Segment, ...], ...] = ()
    """Actions of each sequence that were sampled under a grammar; empty where no sequence has any."""
    teacher_prompts_S: tuple[tuple[int, ...], ...] = ()
    """Tokens that a teacher reads in the place of each sequence's prompt (`teaching.py`); empty where it reads the
    prompt."""
    datasources_S: tuple[str, ...] = ()
    """Origin of each sequence's prompt; empty where nobody asks."""
    experts_NLK: Tensor | None = None
    """Small integers: experts of a mixture that the model sends each token to (`episodes/routed.py`), where it replays
    them; None where its routers choose."""
    sampler_ids_NK: Tensor | None = None
    """Int32: the most likely tokens under the policy that sampled (`episodes/top_logprobs.py`); None where no engine
    reported them."""
    sampler_logprobs_NK: Tensor | None = None
    """Float32: log-probs of `sampler_ids_NK`."""
    teacher_ids_NK: Tensor | None = None
    """Int32: the tokens that a teacher finds most likely at the place of each trained token; None where no teacher has
    predicted."""
    teacher_logprobs_NK: Tensor | None = None
    """Float32 or float16: log-probs (nats) of `teacher_ids_NK`; one more, the last, is that of all other tokens
    together."""

    @property
    def predicted_N(self) -> Tensor:
        """Tokens whose log-probs a language model computes at their places: the sequences' own."""
        return self.tokens_N

    @property
    def starts_S(self) -> Tensor:
        """Index of each sequence's first token."""
        return self.lengths_S.cumsum(0) - self.lengths_S

    @property
    def sequence_ids_N(self) -> Tensor:
        """Sequence (0..S-1) that each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.lengths_S.device), self.lengths_S)

    @property
    def positions_N(self) -> Tensor:
        """Position of each token in its sequence, from 0, int64."""
        return torch.arange(self.token_count, device=self.lengths_S.device) - self.starts_S.repeat_interleave(
            self.lengths_S, output_size=self.token_count
        )

    @property
    def units_S(self) -> Tensor:
        """Unit (0..U-1, in order of first appearance) of each sequence."""
        return first_appearances(self.unit_ids_S)

    @property
    def unit_count(self) -> int:
        """Number of units (U)."""
        return int(self.units_S.max()) + 1

    @property
    def token_count(self) -> int:
        """Number of tokens (N)."""
        return len(self.tokens_N)

    def images_of(self, sequence: int) -> PlacedImages:
        """Returns the images of a sequence."""
        return self.images_S[sequence] if self.images_S else ()

    def filled(self, name: str) -> Tensor:
        """Returns a column that is filled in after packing.

        Raises:
            ValueError: it has not been filled in yet.
        """
        column: Tensor | None = getattr(self, name, None)
        if column is None:
            raise ValueError(f"The batch has no {name}: fill it in before computing the loss.")
        return column

    def placed(self, rows_A: Tensor) -> Tensor:
        """Returns a column of what is known of action tokens, one row each, at their places; 0 elsewhere."""
        column = rows_A.new_zeros(self.token_count, *rows_A.shape[1:])
        column[self.action_mask_N] = rows_A
        return column

    def for_other_models(self) -> Self:
        """Returns what other models than the policy that sampled compute with: their own routers choose experts, and
        none of them learns from likely tokens."""
        return evolve(self.without_sampler(), experts_NLK=None, teacher_ids_NK=None, teacher_logprobs_NK=None)

    def without_sampler(self) -> Self:
        """Returns the batch without the sampler's likely tokens, which updates with score centering alone read."""
        return evolve(self, sampler_ids_NK=None, sampler_logprobs_NK=None)

    def __len__(self) -> int:
        return len(self.lengths_S)

    def select(self, indices: Sequence[int] | Tensor) -> Self:
        """Returns the sequences at `indices`, in that order."""
        index_S = torch.as_tensor(indices, dtype=torch.int64)
        if torch.equal(index_S, torch.arange(len(self))):
            return self
        runs = self.runs(index_S)
        changed: dict[str, Any] = {
            name: torch.cat([column[start:stop] for start, stop in runs]) if axis == "N" and runs else column[index_S]
            for name, axis, column in self.columns()
        }
        changed |= {name: tuple(column[index] for index in index_S.tolist()) for name, column in self.rows()}
        return evolve(self, **changed)

    def columns(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yields (name, "N" or "S", column) of each column that is filled in."""
        for attribute in fields(type(self)):
            column, axis = getattr(self, attribute.name), attribute.name.rpartition("_")[2][0]
            if isinstance(column, Tensor):
                yield attribute.name, axis, column

    def rows(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yields (name, column) of each column that has one Python object a sequence and is filled in."""
        for attribute in fields(type(self)):
            column = getattr(self, attribute.name)
            if isinstance(column, tuple) and column and attribute.name.endswith("_S"):
                yield attribute.name, column

    def sequences_of(self, units: Sequence[int]) -> Tensor:
        """Returns the indices of all sequences of some units (by place, see `units_S`), ascending."""
        return torch.isin(self.units_S, torch.as_tensor(units)).nonzero()[:, 0]

    def token_index(self, indices: Sequence[int] | Tensor) -> Tensor:
        """Returns the positions in this batch of all tokens of the sequences at `indices`, in that order."""
        runs = self.runs(torch.as_tensor(indices, dtype=torch.int64))
        if len(runs) == 1:
            return torch.arange(*runs[0])
        return torch.cat([torch.arange(start, stop) for start, stop in runs] or [torch.arange(0)])

    def runs(self, index_S: Tensor) -> list[tuple[int, int]]:
        """Returns the runs of tokens, each from its first to before its last, that the sequences at `index_S` are."""
        begins = torch.ones(len(index_S), dtype=torch.bool)
        begins[1:] = index_S.diff() != 1
        ends = begins.roll(-1)
        starts_S = self.starts_S
        stops_S = starts_S + self.lengths_S
        return [*zip(starts_S[index_S[begins]].tolist(), stops_S[index_S[ends]].tolist(), strict=True)]


@frozen(kw_only=True, eq=False)
class RolloutBatch(PackedBatch):
    """Trajectories with the columns of reinforcement learning. A unit is an episode with its branches. What each of its
    roles sampled is a rollout of its own, in a group (`group_ids_S`) of the same role alone.

    Columns that may be None are filled in on the way, where the run needs them.
    """

    units_divisible = True

    turn_ids_N: Tensor
    """Turn of each action token within its rollout, over all branches in the order of sampling; -1 elsewhere."""
    rewards_N: Tensor
    """Float32: each turn's reward, on the last token of its action segment."""
    rollout_logprobs_N: Tensor
    """Float32: log-probs under the sampling distribution."""
    versions_N: Tensor
    """Int32: version of the policy that sampled each action token."""
    sample_ids_S: Tensor
    """Sample of each sequence; the branches of one rollout share it."""
    scores_S: Tensor
    """Float32: outcome of each sequence's episode, for filtering and evaluation."""
    truncated_S: Tensor
    """Bool: whether the episode was cut off."""
    roles_S: tuple[str, ...] = ()
    """Role that sampled each sequence; empty where no sequence has one."""
    old_logprobs_N: Tensor | None = None
    """Log-probs of the policy before the update; None where they equal the current ones, so that the ratio is 1."""
    ref_logprobs_N: Tensor | None = None
    """Log-probs of the reference."""
    values_N: Tensor | None = None
    """Values that the critic predicts."""
    advantages_N: Tensor | None = None
    returns_N: Tensor | None = None
    value_weights_N: Tensor | None = None
    """`loss_weights_N` of the critic."""
    positive_weights_N: Tensor | None = None
    """`loss_weights_N` of the likelihood of replies that passed."""
    selected_N: Tensor | None = None
    """Bool: tokens that a loss treats apart, chosen from the whole step."""
    kept_N: Tensor | None = None
    """Bool: tokens that an off-policy correction keeps, chosen from the whole step."""
    learned_N: Tensor | None = None
    """Bool: tokens at which the policy loss counts, chosen from the whole step; None for all."""
    places_S: Tensor | None = None
    """Index of each sequence's first token in the batch of the whole update."""
    entropies_N: Tensor | None = None
    """Float32 (nats): entropy of the policy before the update, where the loss chooses tokens by it; afterwards that
    which the update computed."""
    clipped_N: Tensor | None = None
    """Bool: tokens whose ratio the update clipped."""
    baselines_S: Tensor | None = None
    """Reward of the prompt's greedy rollout."""
    taught_S: Tensor | None = None
    """Bool: sequences that are taught by a reference which is told more than the policy; None for all."""
    reward_parts_SK: Tensor | None = None
    """Float32: named rewards of each sequence, in the order of `part_names`; None if rewards have no parts."""
    part_names: tuple[str, ...] = ()

    @property
    def rollout_ids_S(self) -> Tensor:
        """Rollout of each sequence, from 0 to R - 1, as `rollout_ids` numbers them."""
        return rollout_ids(self.group_ids_S, self.sample_ids_S)

    @property
    def rollouts(self) -> int:
        """Number of rollouts (R)."""
        return int(self.rollout_ids_S.max()) + 1

    @property
    def start_logprobs_N(self) -> Tensor:
        """Log-probs before the update: `old_logprobs_N` if the trainer computed them, else those of the rollout."""
        return self.rollout_logprobs_N if self.old_logprobs_N is None else self.old_logprobs_N


def pack(trajectories: Sequence[Trajectory]) -> RolloutBatch:
    """Lays trajectories end to end.

    Raises:
        ValueError: `trajectories` is empty.
        TrajectoryError: some rewards have other named parts than others.
    """
    if not trajectories:
        raise ValueError("Nothing to pack: a batch holds at least one trajectory.")
    lengths_S = torch.tensor([len(t) for t in trajectories], dtype=torch.int64)
    action_mask_N, turn_ids_N, rewards_N = _action_columns(trajectories)
    part_names = _part_names(trajectories)
    sampler_ids_NK, sampler_logprobs_NK = _top_logprobs(trajectories, action_mask_N)
    group_ids_S = torch.tensor(_groups(trajectories))
    sample_ids_S = torch.tensor([t.sample_id for t in trajectories])
    return RolloutBatch(
        tokens_N=torch.cat([t.token_ids_T for t in trajectories]),
        action_mask_N=action_mask_N,
        turn_ids_N=turn_ids_N,
        rewards_N=rewards_N,
        rollout_logprobs_N=torch.cat([t.logprobs_T for t in trajectories]),
        versions_N=torch.cat([t.versions_T for t in trajectories]),
        lengths_S=lengths_S,
        prompt_lengths_S=torch.tensor([t.prompt_length for t in trajectories]),
        group_ids_S=group_ids_S,
        unit_ids_S=rollout_ids(torch.tensor([t.group_id for t in trajectories]), sample_ids_S),
        sample_ids_S=sample_ids_S,
        images_S=tuple(t.images for t in trajectories) if any(t.images for t in trajectories) else (),
        prescribed_S=tuple(t.prescribed for t in trajectories) if any(t.prescribed for t in trajectories) else (),
        experts_NLK=laid_end_to_end([t.experts_TLK for t in trajectories], lengths_S.tolist()),
        sampler_ids_NK=sampler_ids_NK,
        sampler_logprobs_NK=sampler_logprobs_NK,
        scores_S=torch.tensor([t.score for t in trajectories], dtype=torch.float32),
        truncated_S=torch.tensor([t.stop_reason.truncated for t in trajectories]),
        roles_S=tuple(t.role for t in trajectories) if any(t.role for t in trajectories) else (),
        part_names=part_names,
        reward_parts_SK=torch.tensor([[t.reward_parts.get(name, 0.0) for name in part_names] for t in trajectories])
        if part_names
        else None,
    )


def _action_columns(trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns where the action tokens are, the turn of each, and the reward of each turn at its last token."""
    total = sum(map(len, trajectories))
    action_mask_N = torch.zeros(total, dtype=torch.bool)
    turn_ids_N = torch.full((total,), -1, dtype=torch.int64)
    rewards_N = torch.zeros(total)
    # There is a slice for each turn, and one of a numpy array takes a tenth of the time of one of a tensor.
    actions, numbers, rewards = action_mask_N.numpy(), turn_ids_N.numpy(), rewards_N.numpy()
    turns: dict[tuple[int, int], int] = {}  # each rollout's number of turns so far
    start = 0
    for trajectory in trajectories:
        rollout = trajectory.group_id, trajectory.sample_id
        for segment in trajectory.segments:
            if segment.kind is not SegmentKind.ACTION:
                continue
            following = turns.get(rollout, 0)
            turn = following if segment.turn is None else segment.turn
            turns[rollout] = max(following, turn + 1)
            actions[start + segment.start : start + segment.stop] = True
            numbers[start + segment.start : start + segment.stop] = turn
            rewards[start + segment.stop - 1] = segment.reward
        start += len(trajectory)
    return action_mask_N, turn_ids_N, rewards_N


def _groups(trajectories: Sequence[Trajectory]) -> list[int]:
    """Returns the group of each trajectory: its prompt's id, or a number below 0 for a role's share of it."""
    shares: dict[tuple[int, str], int] = {}
    return [shares.setdefault((t.group_id, t.role), -1 - len(shares)) if t.role else t.group_id for t in trajectories]


def _top_logprobs(trajectories: Sequence[Trajectory], action_mask_N: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns the most likely tokens at the place of each token, 0 outside actions, and their log-probs; None and None
    where no engine was asked."""
    if all(trajectory.top_logprobs is None for trajectory in trajectories):
        return None, None
    told = end_to_end([unsaid(t.action_length) if t.top_logprobs is None else t.top_logprobs for t in trajectories])
    shape = len(action_mask_N), told.ids_RK.shape[1]
    ids_NK, logprobs_NK = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape)
    ids_NK[action_mask_N], logprobs_NK[action_mask_N] = told.ids_RK, told.logprobs_RK
    return ids_NK, logprobs_NK


def _part_names(trajectories: Sequence[Trajectory]) -> tuple[str, ...]:
    """Returns the sorted names of the rewards' parts. A branch has none if its rollout's reward is on another
    branch."""
    named = {tuple(sorted(t.reward_parts)) for t in trajectories if t.reward_parts}
    if len(named) > 1:
        raise TrajectoryError(
            f"Some rewards have the parts {', '.join(sorted(named)[0])}, others {', '.join(sorted(named)[1])}: every "
            "reply must be given the same named rewards."
        )
    return named.pop() if named else ()
