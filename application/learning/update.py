"""Update: epochs over the units of a batch, minibatches (one optimizer step each), micro-batches within a budget."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from attrs import evolve, frozen
from torch import Tensor

from rollgrad.application.interruption import close_to_stops
from rollgrad.application.learning.microbatch import split
from rollgrad.domain.algorithms.losses.aggregation import loss_weights
from rollgrad.domain.algorithms.losses.objectives import REFERENCE_KL
from rollgrad.domain.algorithms.repetition import repeats
from rollgrad.domain.algorithms.settings import Aggregation
from rollgrad.domain.batches.by_sequence import counts, spread
from rollgrad.domain.batches.metrics import Common, Count, Metric, Total, over_steps
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.batches.partition import minibatches
from rollgrad.domain.ports.checkpoint_store import CheckpointStore
from rollgrad.domain.ports.models import (
    LossOutput,
    PolicyModel,
    PolicyObjective,
    TokenScores,
    ValueModel,
    ValueObjective,
)

TURNS_SHOWN = 8
"""Number of first turns whose share of the gradient is logged."""

Stretches: TypeAlias = list[tuple[slice, slice]]
"""Tokens of a batch, and their places in the batch of the whole update."""

KINDS: dict[str, type[Metric]] = {
    **dict.fromkeys(("loss", "policy_loss", "positive_nll", "aux_loss", "router_z_loss"), Total),
    **dict.fromkeys(("grad_norm", "lr", "loss_scale"), Common),
    "skipped_steps": Count,
}
"""Kinds of the metrics of `PolicyModel.update` that are no means over tokens."""


@frozen(kw_only=True)
class UpdateReport:
    """Result of an update.

    What is known of single tokens is None if the policy was not trained, and NaN where no step passed a token through
    the model.
    """

    metrics: dict[str, float]
    """Metrics of its optimizer steps under `policy/` and `critic/`, combined as each says
    (`domain.batches.metrics`)."""
    reference_kl: float | None
    """KL term of the policy's loss in nats per token; None without one."""
    loss_weights_N: Tensor | None
    """Weight of each token of the batch in the loss of its optimizer step, in the last epoch."""
    logprobs_N: Tensor | None
    """Log-probs of action tokens that the policy's only optimizer step computed before it changed the weights; None,
    too, if there were several steps."""
    entropies_N: Tensor | None
    """Entropy of the policy's distribution at each token (nats), in the last epoch."""
    clipped_N: Tensor | None
    """Whether each token's ratio was clipped, in the last epoch."""


class Listening:
    """A policy's objective that keeps what it is told of tokens. Where other processes call it, they call `objective`,
    and what they were told comes here by `hear`."""

    def __init__(self, objective: PolicyObjective[RolloutBatch]) -> None:
        self.objective = objective
        self._heard: list[tuple[Stretches, TokenScores, Tensor | None]] = []

    def __call__(self, scores: TokenScores, batch: RolloutBatch) -> LossOutput:
        """Returns the objective's share of the loss."""
        output = self.objective(scores, batch)
        self.hear(batch, scores, output.clipped_N)
        return output

    def hear(self, batch: RolloutBatch, scores: TokenScores, clipped_N: Tensor | None) -> None:
        """Keeps the scores of a batch that was passed through the model, and which of its tokens were clipped."""
        if batch.places_S is not None:
            kept = TokenScores(logprobs_N=scores.logprobs_N.detach(), entropy_N=scores.entropy_N.detach())
            self._heard.append((_stretches(batch), kept, clipped_N))

    def columns(self, tokens: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns log-probs and entropies of a batch of `tokens` tokens, NaN where none were heard, and which tokens
        were clipped, as they were heard last; None if nothing was heard at all."""
        if not self._heard:
            return None, None, None
        stretches, scores, heard_N = self._heard[-1]
        if stretches == [(slice(0, tokens), slice(0, tokens))]:  # nothing is left of what was heard before
            clipped_N = torch.zeros(tokens, dtype=torch.bool) if heard_N is None else heard_N.cpu()
            return scores.logprobs_N.float().cpu(), scores.entropy_N.float().cpu(), clipped_N
        logprobs_N, entropies_N = torch.full((2, tokens), math.nan)
        clipped_N = torch.zeros(tokens, dtype=torch.bool)
        for stretches, scores, heard_N in self._heard:
            _put(logprobs_N, stretches, scores.logprobs_N.float().cpu())
            _put(entropies_N, stretches, scores.entropy_N.float().cpu())
            if heard_N is not None:
                _put(clipped_N, stretches, heard_N.cpu())
        return logprobs_N, entropies_N, clipped_N


class UpdateService:
    """Takes optimizer steps on a batch.

    Metrics of a step are means over the tokens that were passed through the model, weighted as in the loss.

    Args:
        policy: the trained policy.
        critic: the trained critic, or None.
        aggregation: way to sum token losses; weights are fixed for an optimizer step before it is split.
        max_length: constant length of `Aggregation.CONSTANT_LENGTH`, in tokens.
        batch_size: units (rollouts with all their branches) per optimizer step; None takes all.
        planned: units of an update as the learning-rate schedule counts them. If failures leave fewer, steps
            become smaller, not fewer, so that the schedule ends with the run; None: the units of the batch.
        epochs: passes over the units.
        max_tokens: token budget of one micro-batch.
        shares: number of equal shares of it, as in `split`.
        seed: shuffles samples into minibatches.
        skip_idle: leave samples whose advantages are all 0 out of the policy's passes. Their gradient is exactly 0
            when the loss has no other term (KL, entropy), and the others' weights are fixed before: same gradient,
            less work. GRPO's groups without spread are such samples.
        select: chooses tokens of a whole optimizer step that the loss treats differently, or None.
        keep: chooses those that the off-policy correction keeps, or None.
        learn: chooses those at which the policy loss counts, or None for all.
        mask_truncated: leave rollouts that were cut off out of the steps of policy and critic. An update whose rollouts
            were all cut off takes no step.
        mask_repetition: number of sampled tokens in a row of which the policy was certain (`repeats`) that leave a
            rollout out as well; None leaves none out.
        pass_threshold: score from which a reply's likelihood is raised, for losses with such a term.
    """

    def __init__(
        self,
        policy: PolicyModel,
        critic: ValueModel | None,
        *,
        aggregation: Aggregation,
        max_length: int,
        batch_size: int | None,
        planned: int | None = None,
        epochs: int,
        max_tokens: int,
        seed: int,
        shares: int = 1,
        skip_idle: bool = False,
        select: Callable[[RolloutBatch], Tensor] | None = None,
        keep: Callable[[RolloutBatch], Tensor] | None = None,
        learn: Callable[[RolloutBatch], Tensor] | None = None,
        mask_truncated: bool = False,
        mask_repetition: int | None = None,
        pass_threshold: float = 1.0,
    ) -> None:
        self._policy = policy
        self._critic = critic
        self._aggregation = aggregation
        self._max_length = max_length
        self._batch_size = batch_size
        self._planned = planned
        self._epochs = epochs
        self._max_tokens = max_tokens
        self._shares = shares
        self._generator = torch.Generator().manual_seed(seed)
        self._skip_idle = skip_idle
        self._select = select
        self._keep = keep
        self._learn = learn
        self._mask_truncated = mask_truncated
        self._mask_repetition = mask_repetition
        self._pass_threshold = pass_threshold
        self.under_way = False
        """Whether a `run` has taken some of its optimizer steps, but not all; after an error it stays so."""

    def run(
        self,
        batch: RolloutBatch,
        objective: PolicyObjective[RolloutBatch],
        value_objective: ValueObjective[RolloutBatch] | None = None,
        *,
        train_policy: bool = True,
    ) -> UpdateReport:
        """Trains on `batch`; reports its optimizer steps.

        Without `train_policy` the critic alone learns. An error before the first optimizer step changes nothing.
        """
        shuffle = self._generator.get_state()
        try:
            return self._take_steps(batch, objective, value_objective, train_policy=train_policy)
        except BaseException:
            if not self.under_way:
                self._generator.set_state(shuffle)
            raise

    def _take_steps(
        self,
        batch: RolloutBatch,
        objective: PolicyObjective[RolloutBatch],
        value_objective: ValueObjective[RolloutBatch] | None,
        *,
        train_policy: bool,
    ) -> UpdateReport:
        steps: list[dict[str, float]] = []
        listening = Listening(objective)
        loss_weights_N = torch.zeros(batch.token_count)
        repeated_S = self._repeated(batch)
        learned = self._learned(batch, repeated_S)
        for step_batch in self._steps(batch, learned):
            _put(loss_weights_N, _stretches(step_batch), step_batch.filled("loss_weights_N"))
            metrics: dict[str, float] = {}
            if train_policy:
                metrics |= self._update_policy(step_batch, listening, len(learned) / batch.unit_count)
                self._begun()
            if self._critic is not None and value_objective is not None:
                parts = split(
                    step_batch.for_other_models(), self._max_tokens, self._shares, padded=self._critic.padded()
                )
                metrics |= {f"critic/{k}": v for k, v in self._critic.update(parts, value_objective).items()}
                self._begun()
            steps.append(metrics)
        self.under_way = False
        combined = over_steps(steps)
        if self._mask_repetition is not None:
            combined["policy/repetition_share"] = float(repeated_S.float().mean())
        logprobs_N, entropies_N, clipped_N = listening.columns(batch.token_count)
        return UpdateReport(
            metrics=combined,
            reference_kl=combined.get(f"policy/{REFERENCE_KL}"),
            loss_weights_N=loss_weights_N,
            logprobs_N=logprobs_N if len(steps) == 1 else None,
            entropies_N=entropies_N,
            clipped_N=clipped_N,
        )

    def _begun(self) -> None:
        """Notes that a model has changed: the update is finished from now on, also when the run is interrupted."""
        self.under_way = True
        close_to_stops()

    def save(self, checkpoints: CheckpointStore, name: str) -> None:
        """Writes the models under `name`."""
        checkpoints.save_model(self._policy, name, self._critic)

    def state_dict(self) -> dict[str, Any]:
        """Returns the models under training and the order of their samples."""
        critic = {} if self._critic is None else {"critic": self._critic.state_dict()}
        return {"policy": self._policy.state_dict(), "shuffle": self._generator.get_state(), **critic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        self._policy.load_state_dict(state["policy"])
        self._generator.set_state(state["shuffle"])
        if self._critic is not None:
            self._critic.load_state_dict(state["critic"])

    def _update_policy(
        self, step_batch: RolloutBatch, objective: PolicyObjective[RolloutBatch], learned: float
    ) -> dict[str, float]:
        """Takes one optimizer step; means are over the tokens that were passed through the model. `learned` is the
        share of the update's units that its steps have."""
        trained = _with_gradient(step_batch) if self._skip_idle else step_batch
        passes = split(trained, self._max_tokens, self._shares, padded=self._policy.padded())
        result = self._policy.update(passes, objective)
        weight = _weight(trained)
        result = {name: _with_kind(name, value) for name, value in result.items()}
        scaled = {name: value if isinstance(value, Metric) else value / weight for name, value in result.items()}
        squared = scaled.pop("mismatch_weight_squared", 0.0)
        if squared > 0:
            scaled["mismatch_effective_sample_share"] = scaled.pop("mismatch_weight") ** 2 / squared
        metrics = {f"policy/{name}": value for name, value in scaled.items()}
        share = learned * trained.rollouts / step_batch.rollouts
        return metrics | {"policy/trained_share": share} | gradient_share_by_turn(step_batch)

    def _repeated(self, batch: RolloutBatch) -> Tensor:
        """Returns the sequences that are left out for a repetition."""
        if self._mask_repetition is None:
            return torch.zeros(len(batch), dtype=torch.bool)
        return repeats(batch.rollout_logprobs_N, batch.action_mask_N, batch.lengths_S, self._mask_repetition)

    def _learned(self, batch: RolloutBatch, repeated_S: Tensor) -> Tensor:
        """Returns the units that are learned from, by place."""
        left_out_S = batch.truncated_S | repeated_S if self._mask_truncated else repeated_S
        return (torch.bincount(batch.units_S, left_out_S.double()) == 0).nonzero()[:, 0]

    def _steps(self, batch: RolloutBatch, learned_U: Tensor) -> Iterator[RolloutBatch]:
        """Yields the batch of each optimizer step, with its loss weights and its places in the whole batch."""
        units = len(learned_U)
        if not units:
            return
        planned = max(units, self._planned or 0)
        parts = min(units, math.ceil(planned / (self._batch_size or planned)))
        for _ in range(self._epochs):
            for chosen in minibatches(units, parts, self._generator):
                # Order within a step does not change its gradient; neighbours of one prompt share its forward pass.
                sequences = batch.sequences_of(learned_U[chosen].tolist())
                part = batch.select(sequences)
                yield evolve(
                    part,
                    places_S=batch.starts_S[sequences],
                    selected_N=None if self._select is None else self._select(part),
                    kept_N=None if self._keep is None else self._keep(part),
                    learned_N=None if self._learn is None else self._learn(part),
                    entropies_N=None,  # they have served
                    positive_weights_N=self._positive_weights(part),
                    loss_weights_N=self._weights(part, self._aggregation),
                    value_weights_N=None if self._critic is None else self._weights(part, Aggregation.TOKEN_MEAN),
                )

    def _positive_weights(self, part: RolloutBatch) -> Tensor:
        """Returns weights of a token mean over the replies that passed."""
        passed_S = part.scores_S >= self._pass_threshold
        tokens = (counts(part.action_mask_N, part.lengths_S) * passed_S).sum()
        return spread(passed_S / tokens.clamp(min=1), part.lengths_S, part.action_mask_N)

    def _weights(self, part: RolloutBatch, mode: Aggregation) -> Tensor:
        return loss_weights(
            mode,
            action_mask_N=part.action_mask_N,
            lengths_S=part.lengths_S,
            group_ids_S=part.group_ids_S,
            rollout_ids_S=part.rollout_ids_S,
            max_length=self._max_length,
        )


def _stretches(batch: RolloutBatch) -> Stretches:
    """Returns the stretches of tokens that follow each other in `batch` and in the batch of the whole update."""
    places_S, lengths_S = batch.filled("places_S").cpu(), batch.lengths_S.cpu()
    starts_S = lengths_S.cumsum(0) - lengths_S
    moved_S = places_S - starts_S  # how far a sequence's tokens lie behind their places in this batch
    first_S = torch.ones(len(batch), dtype=torch.bool)
    first_S[1:] = moved_S.diff() != 0
    starts = [*starts_S[first_S].tolist(), batch.token_count]
    return [
        (slice(start, stop), slice(start + moved, stop + moved))
        for (start, stop), moved in zip(pairwise(starts), moved_S[first_S].tolist(), strict=True)
    ]


def _put(whole_N: Tensor, stretches: Stretches, column_N: Tensor) -> None:
    """Writes a column of a batch to its places in one of the whole update."""
    for here, there in stretches:
        whole_N[there] = column_N[here]


def _with_gradient(batch: RolloutBatch) -> RolloutBatch:
    """Returns the sequences with an advantage other than 0 and a token where the loss counts, which need not be the
    same one: `gmpo` has the sequence's mean advantage at each token. The first one if there is none, so that a step is
    still taken."""
    assert batch.advantages_N is not None
    busy_S = counts(batch.action_mask_N & (batch.advantages_N != 0), batch.lengths_S) > 0
    if batch.learned_N is not None:
        busy_S &= counts(_learned(batch), batch.lengths_S) > 0
    return batch.select(busy_S.nonzero()[:, 0] if bool(busy_S.any()) else [0])


def _learned(batch: RolloutBatch) -> Tensor:
    """Returns a mask of the tokens at which the policy loss counts."""
    return batch.action_mask_N if batch.learned_N is None else batch.action_mask_N & batch.learned_N


def _with_kind(name: str, value: float) -> float:
    """Returns a metric of the port's own names with its kind, if a policy from outside reports it as a plain number."""
    return value if isinstance(value, Metric) or name not in KINDS else KINDS[name](value)


def _weight(batch: RolloutBatch) -> float:
    assert batch.loss_weights_N is not None
    return float(batch.loss_weights_N.sum())


def gradient_share_by_turn(batch: RolloutBatch) -> dict[str, float]:
    """Returns the share of each of the first turns in the sum of |weight x advantage|, which is the gradient's size at
    a ratio of 1; empty for batches of one turn."""
    assert batch.advantages_N is not None
    assert batch.loss_weights_N is not None
    if int(batch.turn_ids_N.max()) <= 0:
        return {}
    turns_A = batch.turn_ids_N[batch.action_mask_N]
    size_N = torch.where(_learned(batch), batch.advantages_N * batch.loss_weights_N, 0.0)
    size_A = size_N[batch.action_mask_N].abs().double()
    if float(size_A.sum()) == 0:
        return {}
    size_U = torch.zeros(int(turns_A.max()) + 1, dtype=torch.float64).index_add_(0, turns_A, size_A)
    return {f"policy/gradient_share_turn_{k}": float(x / size_U.sum()) for k, x in enumerate(size_U[:TURNS_SHOWN])}
