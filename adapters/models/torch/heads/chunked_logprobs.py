"""Log-probs and entropy from hidden states, a chunk of rows at a time: never a full [N, V] matrix.

The backward pass recomputes each chunk's logits, so memory is one chunk of logits whatever N is; the price is one
more product with the output matrix. On a GPU what is computed of a chunk is fused (`fusing.py`). Where processes
divide the vocabulary among them (tensor parallelism), each has some rows of that matrix, and what they exchange is
three numbers a token, and the gradient of the hidden states.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.models.torch.heads.allowed_tokens import AllowedTokens
from rollgrad.adapters.models.torch.heads.logits import PLAIN_LOGITS, WHOLE_VOCABULARY, LogitForm, VocabularyShare
from rollgrad.adapters.models.torch.kernels import fusing

Restrict = Callable[[Tensor], None]
"""Function that sets logits of tokens that are not possible to minus infinity."""

CHUNK_BYTES = 64 * 2**20
"""Float32 logits held at a time, where a GPU does not hold more."""
GPU_SHARE = 64
"""Part of a GPU's memory for the float32 logits that are held at a time (1.2 GB of 80): every chunk reads the whole
output matrix, and in the backward pass adds to a gradient as large, so that a GPU waits for its memory in small
ones."""
NO_CHANCE = -1000.0
"""Lower bound of log-probs that are multiplied by their probability, which in float32 is 0 below -104. The -inf of a
token that is masked out of the vocabulary would give NaN."""
NO_MASS = -1e30
"""Lower bound of the logsumexp of a process's rows, all of which may be masked."""


def token_logprobs(
    hidden_AH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_A: Tensor,
    temperature: float,
    vocabulary: VocabularyShare = WHOLE_VOCABULARY,
    form: LogitForm = PLAIN_LOGITS,
    *,
    correct: bool = False,
    mean: bool = True,
    collision: bool = False,
    allowed: AllowedTokens | None = None,
    also_AK: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Returns the log-prob of each target and the entropy (nats) of softmax(logits / temperature).

    Args:
        hidden_AH: hidden states.
        weight_VH: output embedding.
        bias_V: output bias or None.
        targets_A: int64 token ids.
        temperature: > 0.
        vocabulary: the rows of the vocabulary in `weight_VH` and `bias_V`.
        form: formula of the logits.
        correct: also finds where the target is the most likely token, which takes no further pass over the logits.
        mean: with `correct`, also finds the mean log-prob over the vocabulary; one more pass.
        collision: with `correct`, also finds the collision entropy, -log sum_v p_v^2 (nats), without a gradient; one
            more pass.
        allowed: the tokens that are possible in some rows, where all others have the logit minus infinity.
        also_AK: int64 ids of further tokens whose log-probs are found.

    Returns:
        logprobs_A and entropy_A, then what was asked for of these, in this order: with `correct` correct_A, 1 where no
        token is more likely than the target, else 0; with `mean` mean_A; with `collision` collision_A; with `also_AK`
        their log-probs [A, K]. All are float32, and all but correct_A and collision_A are differentiable in hidden,
        weight and bias.
    """
    result: tuple[Tensor, ...] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_AH.to(weight_VH.dtype),
        weight_VH,
        bias_V,
        targets_A,
        temperature,
        vocabulary,
        form,
        correct,
        mean,
        collision,
        allowed,
        also_AK,
    )
    return result


def chunk_bytes(device: torch.device) -> int:
    """Returns the bytes of float32 logits held at a time on a device."""
    if device.type != "cuda":
        return CHUNK_BYTES
    return max(CHUNK_BYTES, torch.cuda.get_device_properties(device).total_memory // GPU_SHARE)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        vocabulary: VocabularyShare,
        form: LogitForm,
        correct: bool,
        mean: bool,
        collision: bool,
        allowed: AllowedTokens | None,
        also: Tensor | None,
    ) -> tuple[Tensor, ...]:
        mean, collision = correct and mean, correct and collision
        names = _column_names(correct, mean, collision)
        rows = max(1, chunk_bytes(hidden.device) // (4 * weight.shape[0]))
        # The targets are the first of the tokens whose logits are asked for.
        asked = targets[:, None] if also is None else torch.cat([targets[:, None], also], 1)
        index, mine = vocabulary.rows(asked, len(weight))
        columns = torch.empty(len(names) + index.shape[1], len(hidden), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            restrict = _restriction(allowed, start, vocabulary.first)
            of = (temperature, index[part], mine[part], (correct, mean, collision))
            columns[:, part] = _of_logits(_columns, hidden[part], weight, bias, form, restrict, *of)
        # What each process P found of its rows of the vocabulary, [P, A] by name, is joined to what holds for all rows.
        gathered = vocabulary.gathered(columns)
        found = dict(zip(names, gathered[:, : len(names)].unbind(1), strict=True))
        logits = gathered[:, len(names) :].sum(0)  # each token is in the rows of one process; the others have 0
        lse = found["lse"]
        normaliser = torch.logsumexp(lse, dim=0)
        log_share = lse - normaliser  # log-probability of all tokens in a process's rows
        logprobs = logits[0] - normaliser
        further = [] if also is None else [(logits[1:] - normaliser).t()]
        # A process has found the entropy of its own softmax, whose tokens have -log_share more nats in that of all.
        entropy = (log_share.exp() * (found["entropy"] + normaliser - lse.clamp(min=NO_MASS))).sum(0)
        ctx.save_for_backward(hidden, weight, bias, index, mine, normaliser, entropy)
        ctx.temperature, ctx.rows, ctx.vocabulary, ctx.form = temperature, rows, vocabulary, form
        ctx.allowed, ctx.mean, ctx.further = allowed, mean, bool(further)
        ctx.set_materialize_grads(False)
        if not correct:
            return logprobs, entropy, *further
        correct_A = (logits[0] >= found["best"].amax(0)).float()
        results, without_gradient = [logprobs, entropy, correct_A], [correct_A]
        if mean:
            ctx.size = found["size"].sum(0)
            # A process's sum is of its own log-softmax, too.
            sums = found["log_softmax_sum"] + found["size"] * log_share.clamp(min=NO_CHANCE)
            results.append(sums.sum(0) / ctx.size)
        if collision:
            collision_A = -((2 * log_share).exp() * found["collision"]).sum(0).log()
            results.append(collision_A)
            without_gradient.append(collision_A)
        ctx.mark_non_differentiable(*without_gradient)
        return *results, *further

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *others: Tensor | None) -> Any:
        hidden, weight, bias, index, mine, normaliser, entropy = ctx.saved_tensors
        # The other results are, in this order, correct_A, the mean, the collision entropy and the further log-probs.
        grad_mean = others[1] if ctx.mean else None
        pulls = grad_logprobs if grad_logprobs is None else grad_logprobs[:, None]
        if ctx.further and others[-1] is not None:
            first = torch.zeros_like(normaliser) if grad_logprobs is None else grad_logprobs
            pulls = torch.cat([first[:, None], others[-1]], 1)
        columns = (normaliser, grad_entropy, entropy, grad_mean, None if grad_mean is None else grad_mean / ctx.size)

        def gradient(part: slice) -> Tensor:
            restrict = _restriction(ctx.allowed, part.start, ctx.vocabulary.first)
            asked = [None] * 3 if pulls is None else [c[part, : pulls.shape[1]] for c in (index, mine, pulls)]
            of = [*asked, *(None if column is None else column[part, None] for column in columns)]
            form, dtype, temperature = ctx.form, weight.dtype, ctx.temperature
            return _of_logits(_logit_gradient, hidden[part], weight, bias, form, restrict, temperature, dtype, *of)

        return *pulled_back(ctx, gradient, hidden, weight, bias), *[None] * 9


def pulled_back(
    ctx: Any, gradient: Callable[[slice], Tensor], hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients at hidden states, weight and bias from those at their product, which `gradient` computes
    for a run of rows, in the weight's format. `ctx` has how many `rows` are computed together, and the `vocabulary`."""
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
    for start in range(0, len(hidden), ctx.rows):
        part = slice(start, start + ctx.rows)
        grad = gradient(part)
        torch.mm(grad, weight, out=grad_hidden[part])
        if grad_weight is not None:
            if weight.dtype == torch.float32:
                grad_weight.addmm_(grad.t(), hidden[part])
            else:
                grad_weight += grad.t() @ hidden[part]
        if grad_bias is not None:
            grad_bias += grad.sum(0)
    ctx.vocabulary.sum(grad_hidden)
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


def _restriction(allowed: AllowedTokens | None, start: int, first: int) -> Restrict | None:
    """Returns what leaves only the `allowed` tokens in logits whose first row is `start`; None where all are."""
    return None if allowed is None else partial(allowed.restrict, start=start, first=first)


def _of_logits(
    function: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: LogitForm,
    restrict: Restrict | None,
    *others: Any,
) -> Tensor:
    """Returns what a function computes of the logits of hidden states, which it may overwrite; fused where that is
    worth while and all tokens are allowed."""
    if restrict is None and fusing.is_fused(hidden.device):
        return fusing.fused(of_product)(form.product(hidden, weight, bias), function, form, *others)
    return function(form.logits(hidden, weight, bias), form, restrict, *others)


def of_product(product: Tensor, function: Callable[..., Tensor], form: LogitForm, *others: Any) -> Tensor:
    """Returns what a function computes of the logits of a product, all of whose tokens are allowed."""
    return function(form.formed(product), form, None, *others)


def _column_names(correct: bool, mean: bool, collision: bool) -> list[str]:
    """Returns the names of the first rows of `_columns`."""
    names = ["lse", "entropy"]
    if correct:
        names.append("best")
    if mean:
        names += ["log_softmax_sum", "size"]
    if collision:
        names.append("collision")
    return names


def _columns(
    logits: Tensor,
    form: LogitForm,
    restrict: Restrict | None,
    temperature: float,
    index_AJ: Tensor,
    mine_AJ: Tensor,
    wanted: tuple[bool, bool, bool],
) -> Tensor:
    """Returns what is to be known of the logits of A positions, [K, A], and overwrites the logits.

    The rows are their logsumexp and the entropy of their softmax. Then come those that are `wanted` (`_column_names`):
    the largest logit; the sum of the log-softmax and the number of logits; the probability that two draws are the same
    token. Last are the logits of the J tokens of `index_AJ`.
    """
    correct, mean, collision = wanted
    if temperature != 1.0:
        logits.div_(temperature)
    if restrict is not None:
        restrict(logits)
    lse, best = _logsumexp(logits)
    asked = torch.where(mine_AJ, logits.gather(1, index_AJ), 0.0)
    found = [best] if correct else []
    log_probs = logits.sub_(lse.clamp(min=NO_MASS)[:, None]).clamp_(min=NO_CHANCE, max=0.0)
    if mean:
        found += [log_probs.sum(-1), torch.full_like(lse, logits.shape[1])]
    probs = log_probs.exp()
    if collision:
        found.append(_dot(probs, probs))
    # Entropy as lse minus the mean logit would cancel badly for logits beyond 100; this form does not.
    return torch.cat([torch.stack([lse, -_dot(probs, log_probs), *found]), asked.t()])


def _dot(one_AV: Tensor, other_AV: Tensor) -> Tensor:
    """Returns the products of rows, which a compiler would compute apart from what makes them."""
    return (one_AV * other_AV).sum(-1) if torch.compiler.is_compiling() else torch.linalg.vecdot(one_AV, other_AV)


def _logsumexp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logsumexp of each row and its largest element, which torch's own function finds and forgets."""
    best = logits.amax(-1)
    shift = best.masked_fill(best.isinf(), 0.0)
    return (logits - shift[:, None]).exp_().sum(-1).log_().add_(shift), best


def _logit_gradient(
    logits: Tensor,
    form: LogitForm,
    restrict: Restrict | None,
    temperature: float,
    dtype: torch.dtype,
    index: Tensor | None,
    mine: Tensor | None,
    pulls: Tensor | None,
    normaliser: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor,
    grad_mean: Tensor | None,
    mean_share: Tensor | None,
) -> Tensor:
    """Returns the gradient at hidden @ weight.T + bias, in the format `dtype`. It is the slope of the logits times the
    gradient at the scaled logits, g_l (onehot - p) - g_H p (log p + H) + g_M (1 / V - p). `mean_share` is g_M / V.
    `pulls` [A, J] are the g_l of the tokens `index` [A, J]. It overwrites the logits; the other tensors are columns [A,
    1]."""
    slope = form.slope(logits)
    if restrict is not None:
        restrict(logits)
    log_softmax = logits.div_(temperature).sub_(normaliser).clamp_(min=NO_CHANCE, max=0.0)
    coefficient: Tensor | float = 0.0 if pulls is None else pulls.sum(1, keepdim=True)
    if grad_mean is not None:
        coefficient = coefficient + grad_mean
    if grad_entropy is None:
        grad = log_softmax.exp_().mul_(-coefficient)
    else:
        factor = (log_softmax + entropy).mul_(grad_entropy).add_(coefficient)
        grad = log_softmax.exp_().mul_(factor).neg_()
        del factor  # which is as large as the logits
    if pulls is not None and index is not None and mine is not None:
        if pulls.shape[1] == 1 and torch.compiler.is_compiling():  # a scatter would need the gradient in memory
            is_target = (torch.arange(grad.shape[1], device=grad.device) == index) & mine
            grad = grad + torch.where(is_target, pulls, 0.0)
        else:
            grad.scatter_add_(1, index, torch.where(mine, pulls, 0.0))
    if mean_share is not None:
        grad.add_(mean_share)
    return grad.mul_(slope / temperature).to(dtype)
