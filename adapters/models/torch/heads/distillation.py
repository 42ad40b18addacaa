"""Divergence of a model's next-token distributions from a teacher's, a chunk of rows at a time: never a full [N, V]
matrix of either.

A teacher is a frozen model in the same process (`Teacher`), or what it predicted before, in the columns of a batch
(`KeptTeacher`). The backward pass recomputes each chunk's logits. On a GPU what is computed of a chunk is fused
(`fusing.py`).
Does not own: the formula of the divergence (`domain/algorithms/losses/distillation`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.adapters.models.torch.heads import chunked_logprobs
from rollgrad.adapters.models.torch.heads.chunked_logprobs import NO_CHANCE, of_product, pulled_back
from rollgrad.adapters.models.torch.heads.logits import WHOLE_VOCABULARY, LogitForm, VocabularyShare, logit_form
from rollgrad.adapters.models.torch.kernels import fusing
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.application.settings.memory_plan_passes import DISTILLED_SLICES
from rollgrad.domain.algorithms.losses.distillation import divergence, with_rest
from rollgrad.domain.batches.packed import PackedBatch


@frozen(kw_only=True)
class DistillationSettings:
    """Settings of the divergence from a teacher.

    Attributes:
        beta: weight between the two directions of the KL (`divergence`).
        temperature: temperature of both distributions.
        top_k: the teacher's most likely tokens that are compared, with all others as one more outcome; None compares
            the whole vocabulary.
    """

    beta: float = 0.0
    temperature: float = 1.0
    top_k: int | None = None


class Target(NamedTuple):
    """A teacher's log-probs at some places: `logprobs_AB` float32 of all tokens of the vocabulary or, with `ids_AK`, of
    those K and, in the last place, of all others. It is a tuple, which torch can compile the making of."""

    logprobs_AB: Tensor
    ids_AK: Tensor | None = None


@frozen(kw_only=True, eq=False)
class Logits:
    """A teacher's logits at some places, as `form` makes them of a product with its output embedding."""

    product_AV: Tensor
    form: LogitForm

    def target(self, settings: DistillationSettings) -> Target:
        """Returns what a student is compared with."""
        return teacher_target(self.form.formed(self.product_AV), settings)


Targets = Callable[[slice], Target | Logits]
"""Gives what the teacher says at a run of the places of a batch."""


class Teacher:
    """A frozen causal language model with packed attention installed, in the process of the model that learns from it.
    It is no module, so that no optimizer takes its weights for the student's."""

    def __init__(self, model: Any, settings: DistillationSettings) -> None:
        self.model = model.requires_grad_(False).eval()
        self.settings = settings
        self._form = logit_form(model)

    def logits(self, hidden_AH: Tensor, size: int) -> Callable[[slice], Logits]:
        """Returns the logits at places where the teacher's own hidden states are these, of the first `size` tokens:
        models of one tokenizer pad their vocabularies to different sizes."""
        head = self.model.get_output_embeddings()

        @torch.no_grad()
        def of(part: slice) -> Logits:
            product = self._form.product(hidden_AH[part], head.weight, head.bias)
            return Logits(product_AV=product[:, :size], form=self._form)

        return of


@frozen
class KeptTeacher:
    """Predictions of a teacher in the columns of batches, and the settings of the divergence from them."""

    settings: DistillationSettings

    def targets(self, batch: PackedBatch, places_B: Tensor, device: torch.device) -> Targets:
        """Returns the targets at the `places_B` of a batch, on a device.

        Raises:
            ValueError: it has no predictions.
        """
        ids_BK, logprobs_BK = (
            to_device(batch.filled(name).index_select(0, places_B), device)
            for name in ("teacher_ids_NK", "teacher_logprobs_NK")
        )
        # Rounding to float16 left them without a sum of 1.
        ids_BK, logprobs_BK = ids_BK.long(), logprobs_BK.float().log_softmax(1)
        return lambda part: Target(logprobs_AB=logprobs_BK[part], ids_AK=ids_BK[part])


def teacher_target(logits_AV: Tensor, settings: DistillationSettings) -> Target:
    """Returns what a student is compared with where a teacher has these logits."""
    logprobs_AV = _log_softmax(logits_AV, settings.temperature)
    if settings.top_k is None:
        return Target(logprobs_AB=logprobs_AV)
    top = logprobs_AV.topk(min(settings.top_k, logprobs_AV.shape[1]), dim=1)
    return Target(logprobs_AB=with_rest(top.values), ids_AK=top.indices)


@torch.no_grad()
def likely_tokens(
    hidden_AH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    settings: DistillationSettings,
    form: LogitForm,
    vocabulary: VocabularyShare,
    size: int | None,
) -> tuple[Tensor, Tensor]:
    """Returns a teacher's predictions at these hidden states: ids_AK int32 of the likeliest tokens (`top_k` of
    `settings`) among the first `size` of the vocabulary (None: of all), and logprobs_AB float32 (nats) of those and, in
    the last place, of all others together. Other arguments as in `distilled_logprobs`."""
    assert settings.top_k is not None
    whole = vocabulary.size(weight_VH)
    size = whole if size is None else min(size, whole)
    count = min(settings.top_k, size)
    ids_AK = torch.empty(len(hidden_AH), count, dtype=torch.int32, device=hidden_AH.device)
    logprobs_AB = torch.empty(len(hidden_AH), count + 1, dtype=torch.float32, device=hidden_AH.device)
    rows = max(1, chunked_logprobs.chunk_bytes(hidden_AH.device) // (4 * DISTILLED_SLICES * whole))
    for start in range(0, len(hidden_AH), rows):
        part = slice(start, start + rows)
        logits_AV = form.formed(vocabulary.joined(form.product(hidden_AH[part], weight_VH, bias_V), whole))
        target = teacher_target(logits_AV[:, :size], settings)
        assert target.ids_AK is not None
        ids_AK[part], logprobs_AB[part] = target.ids_AK, target.logprobs_AB
    return ids_AK, logprobs_AB


def distilled_logprobs(
    hidden_AH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_A: Tensor,
    teacher: Targets,
    settings: DistillationSettings,
    form: LogitForm,
    temperature: float = 1.0,
    vocabulary: VocabularyShare = WHOLE_VOCABULARY,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (logprobs_A, entropy_A, correct_A, divergence_A), float32: the first three as `token_logprobs` does, and
    the divergence from the teacher in nats. All but correct_A are differentiable in hidden, weight and bias.

    Args:
        hidden_AH: hidden states.
        weight_VH: output embedding.
        bias_V: output bias or None.
        targets_A: int64 token ids.
        teacher: gives the teacher's log-probs, of no more tokens than the student has; those are compared.
        settings: settings of the divergence.
        form: formula of the student's logits.
        temperature: temperature of the log-probs and the entropy; `settings` has that of the divergence.
        vocabulary: the rows of the vocabulary in `weight_VH` and `bias_V`. A chunk of logits is put together in each
            process, because a divergence reads whole distributions.
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _ChunkedDivergence.apply(  # type: ignore[no-untyped-call]
        hidden_AH.to(weight_VH.dtype), weight_VH, bias_V, targets_A, teacher, settings, form, temperature, vocabulary
    )
    return result


class _ChunkedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        teacher: Targets,
        settings: DistillationSettings,
        form: LogitForm,
        temperature: float,
        vocabulary: VocabularyShare,
    ) -> tuple[Tensor, ...]:
        size = vocabulary.size(weight)
        rows = max(1, chunked_logprobs.chunk_bytes(hidden.device) // (4 * DISTILLED_SLICES * size))
        columns = torch.empty(4, len(hidden), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            of = (teacher, part, settings, temperature, targets[part])
            columns[:, part] = _of_logits(_all_columns, hidden[part], weight, bias, form, vocabulary, size, *of)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.rows, ctx.teacher, ctx.settings, ctx.form, ctx.temperature = rows, teacher, settings, form, temperature
        ctx.vocabulary, ctx.size = vocabulary, size
        found = columns.unbind(0)
        ctx.mark_non_differentiable(found[2])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, bias, targets = ctx.saved_tensors
        pulls = torch.stack([grads[0], grads[1], grads[3]])
        own = slice(ctx.vocabulary.first, ctx.vocabulary.first + len(weight))
        whole = (weight, bias, ctx.form, ctx.vocabulary, ctx.size, ctx.teacher)

        def gradient(part: slice) -> Tensor:
            of = (part, ctx.settings, ctx.temperature, targets[part], pulls[:, part], weight.dtype)
            return _of_logits(_logit_gradient, hidden[part], *whole, *of)[:, own]

        return *pulled_back(ctx, gradient, hidden, weight, bias), *[None] * 6


def _of_logits(
    function: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: LogitForm,
    vocabulary: VocabularyShare,
    size: int,
    teacher: Targets,
    part: slice,
    settings: DistillationSettings,
    *others: Any,
) -> Tensor:
    """Returns what a function computes of the logits that hidden states have with all rows of the vocabulary, and of
    what the teacher says there; fused where that is worth while."""
    if fusing.is_fused(hidden.device):
        product = vocabulary.joined(form.product(hidden, weight, bias), size)
        return fusing.fused(of_product)(product, function, form, teacher(part), settings, *others)
    target = teacher(part)
    if isinstance(target, Logits):
        target = target.target(settings)
    logits = form.formed(vocabulary.joined(form.product(hidden, weight, bias), size))
    return function(logits, form, None, target, settings, *others)


def _all_columns(
    logits: Tensor,
    form: LogitForm,
    _: None,
    teacher: Target | Logits,
    settings: DistillationSettings,
    temperature: float,
    targets: Tensor,
) -> Tensor:
    """Returns (logprobs, entropy, correct, divergence) of a chunk, [4, A]."""
    correct = (logits.gather(1, targets[:, None])[:, 0] >= logits.amax(1)).float()
    logprobs, entropy, divergences = _columns(logits, teacher, settings, temperature, targets)
    return torch.stack([logprobs, entropy, correct, divergences])


def _logit_gradient(
    logits: Tensor,
    form: LogitForm,
    _: None,
    teacher: Target | Logits,
    settings: DistillationSettings,
    temperature: float,
    targets: Tensor,
    pulls_3A: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the gradient at hidden @ weight.T + bias, in the format `dtype`, from those at the three `_columns`."""

    def columns_3A(logits: Tensor) -> Tensor:
        return torch.stack(_columns(logits, teacher, settings, temperature, targets))

    if torch.compiler.is_compiling():  # which makes one graph of this, and computes again what else would be kept
        (grad,) = torch.func.vjp(columns_3A, logits)[1](pulls_3A)
    else:
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            found = columns_3A(leaf)
        (grad,) = torch.autograd.grad(found, leaf, pulls_3A)
        del found, leaf
    gradient: Tensor = grad.mul(form.slope(logits)).to(dtype)
    return gradient


def _columns(
    logits: Tensor, teacher: Target | Logits, settings: DistillationSettings, temperature: float, targets: Tensor
) -> tuple[Tensor, ...]:
    """Returns (logprobs_A, entropy_A, divergence_A) of a chunk."""
    own = _log_softmax(logits, temperature)
    logprobs, entropy = _of_targets(own, targets), -(own.exp() * own).sum(1)
    target = teacher.target(settings) if isinstance(teacher, Logits) else teacher
    theirs = target.logprobs_AB
    if target.ids_AK is not None:
        scaled = own if settings.temperature == temperature else _log_softmax(logits, settings.temperature)
        return logprobs, entropy, divergence(theirs, with_rest(scaled.gather(1, target.ids_AK)), beta=settings.beta)
    if settings.temperature != temperature or theirs.shape[1] < logits.shape[1]:
        own = _log_softmax(logits[:, : theirs.shape[1]], settings.temperature)
    return logprobs, entropy, divergence(theirs, own, beta=settings.beta)


def _of_targets(logprobs: Tensor, targets: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return logprobs.gather(1, targets[:, None])[:, 0]
    # The gradient of gathering would need a matrix in memory.
    is_target = torch.arange(logprobs.shape[1], device=logprobs.device) == targets[:, None]
    return torch.where(is_target, logprobs, 0.0).sum(1)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-softmax, with masked tokens held above -inf, which would give NaN times their probability of 0."""
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(1).clamp(min=NO_CHANCE)
