"""Modules that compute a whole packed batch in one call.

One forward pass takes a micro-batch as a single row of distinct tokens (`layout.py`) and attends through a plan
(`attention.py`); where the model cannot be packed, it has a row for each sequence (`padded.py`). It evaluates the
vocabulary at action positions only (`chunked_logprobs.py`). Tokens may be divided over several processes
(`sequence_parallel.py`), each of which then gets the results of all.
Does not own: losses, batching, nor gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from rollgrad.adapters.models.torch.experts.expert_balance import chosen_experts, routed, token_counts
from rollgrad.adapters.models.torch.experts.router_replay import router_replay
from rollgrad.adapters.models.torch.heads.allowed_tokens import allowed_tokens
from rollgrad.adapters.models.torch.heads.distillation import KeptTeacher, Logits, Targets, Teacher
from rollgrad.adapters.models.torch.heads.logits import logit_form
from rollgrad.adapters.models.torch.heads.scorers import OutcomeScorer, Scorer
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.layers.attention import backbone
from rollgrad.adapters.models.torch.layers.images import batch_positions, run_body
from rollgrad.adapters.models.torch.layers.layout import build_layout
from rollgrad.adapters.models.torch.layers.padded import is_padded, padded_layout, padded_outputs
from rollgrad.adapters.models.torch.layers.sequence_parallel import SequenceGroup, SequenceShare, sequence_group
from rollgrad.adapters.models.torch.loading.compatibility import check_positions
from rollgrad.domain.algorithms.losses.centering import SamplerHead, ScoreCentering
from rollgrad.domain.batches.packed import PackedBatch, RolloutBatch
from rollgrad.domain.batches.teaching import as_taught
from rollgrad.domain.ports.models import Predictions


@frozen(kw_only=True, eq=False)
class ActionRows:
    """The action tokens that this process computes, on the model's device."""

    hidden_BH: Tensor
    """Hidden states that are read for them."""
    targets_B: Tensor
    """Tokens that are predicted there: the action tokens themselves, unless the batch asks for others."""
    actions_B: Tensor
    """Their indices among all `count` action tokens."""
    places_B: Tensor
    """Their indices in the batch, on the batch's device, where its other columns are chosen by them: to ask a GPU for
    them would be to wait for its whole pass."""
    count: int
    """Number of all action tokens."""
    routing: tuple[Tensor, ...] = ()
    """Result of `expert_balance.routed` over all tokens, if requested."""


def action_hidden(
    model: Any, batch: PackedBatch, group: SequenceGroup, *, routing: bool = False, back: int = 1
) -> ActionRows:
    """Returns the model's last hidden states of `batch`, which every process of `group` has.

    Args:
        model: a language model with packed attention installed, or one that is computed padded.
        batch: the tokens.
        group: the processes that share them.
        routing: whether the routers' choices are returned too; needs a group of one.
        back: how many tokens before an action token its hidden state is read: 1 is the state that predicts it, 0 the
            state after it.
    """
    check_positions(model, int(batch.lengths_S.max()))
    padded = is_padded(model)
    share = group.share(padded_layout(model, batch) if padded else build_layout(batch))
    layout = share.layout
    recorded: AbstractContextManager[list[Tensor]] = chosen_experts(model) if routing else nullcontext([])
    replay = router_replay(model)
    replayed = nullcontext() if replay is None else replay.replaying(replay.column(batch, share))
    settings = {"output_router_logits": True} if routing else {}
    with recorded as chosen, replayed:
        outputs = (
            [*padded_outputs(model, layout, **settings)] if padded else [_packed_output(model, batch, share, settings)]
        )
    hidden_CH = torch.cat([output.last_hidden_state.flatten(0, 1) for output in outputs])
    action_A = batch.action_mask_N.nonzero()[:, 0]
    actions_B, rows_B = share.actions(layout.index_N.index_select(0, action_A - back))
    places_B = action_A.index_select(0, actions_B)
    targets_B = batch.predicted_N.index_select(0, places_B)
    device = hidden_CH.device
    return ActionRows(
        hidden_BH=hidden_CH.index_select(0, to_device(rows_B, device)),
        targets_B=to_device(targets_B, device),
        actions_B=to_device(actions_B, device),
        places_B=places_B,
        count=len(action_A),
        routing=_routing(outputs, chosen, token_counts(layout, batch)) if routing else (),
    )


def _routing(outputs: Sequence[Any], chosen: Sequence[Tensor], counts_M: Tensor) -> tuple[Tensor, ...]:
    """Returns the result of `expert_balance.routed` for all passes of a batch together."""
    layers = len(outputs[0].router_logits)
    logits = [torch.cat([output.router_logits[layer].flatten(0, -2) for output in outputs]) for layer in range(layers)]
    return routed(logits, [torch.cat([*chosen[layer::layers]]) for layer in range(layers)], counts_M)


def _packed_output(model: Any, batch: PackedBatch, share: SequenceShare, settings: Mapping[str, Any]) -> Any:
    """Returns the output of the model's backbone for this process's tokens of a layout, as one row."""
    layout = share.layout
    positions = batch_positions(model, batch, layout)
    return run_body(
        model,
        layout.tokens_M[None],
        layout.positions_M[None] if positions is None else positions,
        share.plan(model),
        layout.images,
        share,
        **settings,
    )


def scatter(values_A: Tensor, batch: PackedBatch) -> Tensor:
    """Returns the values of the action tokens at their places, 0 elsewhere: float32 on the batch's device."""
    return scattered([values_A], batch)[0]


def scattered(columns_KA: Sequence[Tensor], batch: PackedBatch) -> tuple[Tensor, ...]:
    """Returns what `scatter` does of each of several columns; all move in one copy, as their gradients do."""
    places_A = batch.action_mask_N.nonzero()[:, 0]
    result: tuple[Tensor, ...] = _Scattered.apply(places_A, batch.token_count, *columns_KA)  # type: ignore[no-untyped-call]
    return result


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, places_A: Tensor, count: int, *columns_KA: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(places_A)
        ctx.device = columns_KA[0].device
        ctx.set_materialize_grads(False)  # what depends on no entropy computes no gradient of it
        zeros_N = torch.zeros(count, dtype=torch.float32, device=places_A.device)
        # A CPU takes several threads for `index_put`, also of few values, and waits for them longer than it computes.
        full_KN = [zeros_N.scatter(0, places_A, column_A) for column_A in torch.stack(columns_KA).to(places_A.device)]
        ctx.mark_non_differentiable(*(f for f, c in zip(full_KN, columns_KA, strict=True) if not c.requires_grad))
        return tuple(full_KN)

    @staticmethod
    def backward(ctx: Any, *gradients_KN: Tensor | None) -> Any:
        (places_A,) = ctx.saved_tensors
        given = [gradient_N.gather(0, places_A) for gradient_N in gradients_KN if gradient_N is not None]
        moved = iter(to_device(torch.stack(given), ctx.device)) if given else iter(())
        return None, None, *(None if gradient_N is None else next(moved) for gradient_N in gradients_KN)


class PackedLM(nn.Module):
    """A causal language model over packed batches. `forward(batch)` returns (logprobs_A, entropy_A) of the action
    tokens under softmax(logits / temperature), float32; `forward(batch, True)` also (tokens_E, probabilities_E,
    squares) of its routers, as `expert_balance.routed` computes them. With `correct` there are more columns of action
    tokens: 1 where the token is the most likely one, else 0; with `mean`, too, the mean log-prob over the vocabulary;
    and with `collision` the collision entropy, except in updates on rollouts. With a `teacher` the columns are those of
    `distilled_logprobs`. With `outcomes`, two token ids, they are those of `OutcomeScorer` after each action token. The
    last are, with `centering`, those of `CentredScores`, where they are learned from and the batch has the sampler's
    most likely tokens. `forward(batch, False, k)` returns what `likely_tokens` does, and nothing else.

    `model` is a causal language model with packed attention installed (`loading.py`).
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        correct: bool = False,
        mean: bool = True,
        collision: bool = False,
        teacher: Teacher | KeptTeacher | None = None,
        outcomes: tuple[int, int] | None = None,
        centering: ScoreCentering | None = None,
    ) -> None:
        super().__init__()
        self._back = 1 if outcomes is None else 0
        self.model = model
        self._teacher = teacher
        self.group = sequence_group(model, *([teacher.model] if isinstance(teacher, Teacher) else []))
        head, form = model.get_output_embeddings(), logit_form(model)
        self.scorer = (
            Scorer(head, temperature, form, correct=correct, mean=mean, collision=collision, centering=centering)
            if outcomes is None
            else OutcomeScorer(head, outcomes, form)
        )

    def forward(
        self, batch: PackedBatch, routing: bool = False, top_k: int = 0, size: int | None = None
    ) -> tuple[Tensor, ...]:
        """Returns the log-probs and entropies of the action tokens, with `routing` also the routers' counts; with
        `top_k` the `top_k` likeliest tokens at their places, of the first `size` of the vocabulary."""
        rows = action_hidden(self.model, batch, self.group, routing=routing, back=self._back)
        if top_k:
            return self._likely(rows, top_k, size)
        teacher = self._teacher if self.teaches(batch) else None
        taught = () if teacher is None else (self._targets(batch, rows, teacher), teacher.settings)
        device = rows.hidden_BH.device
        allowed = allowed_tokens(self.model, batch, rows.places_B, device)
        centred = sampler_head(batch, rows.places_B, device) if torch.is_grad_enabled() else None
        read = not (torch.is_grad_enabled() and isinstance(batch, RolloutBatch))  # advantages are known by then
        columns_B = self.scorer(
            rows.hidden_BH, rows.targets_B, *taught, allowed=allowed, sampler=centred, collision=read
        )
        return *self.group.gathered(rows.actions_B, rows.count, *columns_B), *rows.routing

    def teaches(self, batch: PackedBatch) -> bool:
        """Returns whether the columns of a batch are those of a model with a teacher. A policy that is scored before
        its update has those of one without, for nobody reads how far it is from the teacher then."""
        return self._teacher is not None and (torch.is_grad_enabled() or not isinstance(batch, RolloutBatch))

    def _likely(self, rows: ActionRows, top_k: int, size: int | None) -> tuple[Tensor, ...]:
        ids_BK, logprobs_BK = self.scorer.likely(rows.hidden_BH, top_k, size)
        if self.group.size == 1:
            return ids_BK, logprobs_BK
        # Columns are gathered in one format, and ids are exact in float32.
        columns = (*ids_BK.float().unbind(1), *logprobs_BK.unbind(1))
        gathered_AJ = torch.stack(self.group.gathered(rows.actions_B, rows.count, *columns), 1)
        return gathered_AJ[:, : ids_BK.shape[1]].int(), gathered_AJ[:, ids_BK.shape[1] :]

    def _targets(self, batch: PackedBatch, rows: ActionRows, teacher: Teacher | KeptTeacher) -> Targets:
        """Returns what the teacher says at the action tokens that this process computes."""
        if isinstance(teacher, KeptTeacher):
            return teacher.targets(batch, rows.places_B, rows.hidden_BH.device)
        return live_logits(teacher, batch, self.group, self.model.config.get_text_config().vocab_size)


def sampler_head(batch: PackedBatch, places_B: Tensor, device: torch.device) -> SamplerHead | None:
    """Returns the sampler's most likely tokens at the `places_B` of a batch, on a device; None where the batch has
    none."""
    if batch.sampler_ids_NK is None:
        return None
    return SamplerHead(
        ids_AK=to_device(batch.sampler_ids_NK.index_select(0, places_B), device).long(),
        logprobs_AK=to_device(batch.filled("sampler_logprobs_NK").index_select(0, places_B), device),
    )


@torch.no_grad()
def predicted(forward: Callable[..., Any], batch: PackedBatch, top_k: int, size: int | None = None) -> Predictions:
    """Returns the predictions of a `PackedLM`, whose pass is `forward`."""
    ids_AK, logprobs_AB = forward(batch, False, top_k, size)
    return Predictions(ids_AK=ids_AK.cpu(), logprobs_AB=logprobs_AB.cpu())


@torch.no_grad()
def live_logits(teacher: Teacher, batch: PackedBatch, group: SequenceGroup, size: int) -> Callable[[slice], Logits]:
    """Returns the teacher's logits at the action tokens that this process of `group` computes, among the first `size`
    tokens of the vocabulary."""
    return teacher.logits(action_hidden(teacher.model, as_taught(batch), group).hidden_BH, size)


class PackedValue(nn.Module):
    """A language model's body with a scalar head. `forward(batch)` returns values_A of the action tokens, float32: the
    value of a token is read from the hidden state before it.

    Without a `head` (`weight` [1, H] and, if there is one, `bias` [1]) values start at 0, so that an untrained head
    adds no bias.
    """

    back = 1
    """Tokens before an action token at which its value is read."""
    with_bias = True
    """Whether the head adds a number."""

    def __init__(self, model: Any, head: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = backbone(model)
        if hasattr(model, "peft_config"):  # `lora.plain_weights` knows by it that there are adapters
            self.peft_config = model.peft_config
        self.group = sequence_group(model)
        self.value_head = nn.Linear(
            model.config.get_text_config().hidden_size,
            1,
            bias=self.with_bias,
            device=next(model.parameters()).device,
        )
        for parameter in self.value_head.parameters():
            nn.init.zeros_(parameter)
        if head:
            started = {name: parameter.detach() for name, parameter in self.value_head.named_parameters()}
            self.value_head.load_state_dict({**started, **head})

    def forward(self, batch: PackedBatch) -> Tensor:
        """Returns the values of the action tokens."""
        rows = action_hidden(self.model, batch, self.group, back=self.back)
        values_B: Tensor = self.value_head(rows.hidden_BH.to(self.value_head.weight.dtype))[:, 0]
        (values_A,) = self.group.gathered(rows.actions_B, rows.count, values_B.float())
        return values_A


class PackedReward(PackedValue):
    """A reward model: the value of an action token is read from the hidden state at it, where a sequence classifier
    reads its score; the head has no bias."""

    back = 0
    with_bias = False
