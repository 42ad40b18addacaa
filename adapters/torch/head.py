"""Log-probs and entropy from hidden states, a chunk of rows at a time: never a full [N, V] matrix.

The backward pass recomputes each chunk's logits, so memory is one chunk of logits whatever N is; the price is one
more product with the output matrix.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Float32 logits held at a time."""


def token_logprobs(
    hidden_AH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_A: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy (nats) of softmax((hidden @ weight.T + bias) / temperature).

    Args:
        hidden_AH: hidden states, in the compute dtype.
        weight_VH: output embedding, in the same dtype.
        bias_V: output bias or None.
        targets_A: int64 token ids.
        temperature: > 0.

    Returns:
        (logprobs_A, entropy_A), float32, differentiable in hidden, weight and bias.
    """
    result: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(hidden_AH, weight_VH, bias_V, targets_A, temperature)  # type: ignore[no-untyped-call]
    return result


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        rows = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        normaliser = torch.empty_like(logprobs)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = _scaled_logits(hidden[part], weight, bias, temperature)
            lse = torch.logsumexp(logits, dim=-1)
            normaliser[part] = lse
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - lse
            probs = (logits - lse[:, None]).exp_()
            entropy[part] = lse - torch.linalg.vecdot(probs, logits)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            grad = _logit_gradient(
                _scaled_logits(hidden[part], weight, bias, ctx.temperature).sub_(normaliser[part, None]),
                targets[part],
                None if grad_logprobs is None else grad_logprobs[part, None],
                None if grad_entropy is None else grad_entropy[part, None],
                entropy[part, None],
            )
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            grad = grad.to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(grad.t(), hidden[part])
                else:
                    grad_weight += grad.t() @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        cast_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, cast_weight, None if grad_bias is None else grad_bias.to(bias.dtype), None, None


def _logit_gradient(
    log_softmax: Tensor, targets: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """g_l (onehot - p) - g_H p (log p + H), at the scaled logits. Overwrites `log_softmax`; the others are columns."""
    coefficient: Tensor | float = 0.0 if grad_logprobs is None else grad_logprobs
    if grad_entropy is None:
        grad = log_softmax.exp_().mul_(-coefficient)
    else:
        slope = (log_softmax + entropy).mul_(grad_entropy).add_(coefficient)
        grad = log_softmax.exp_().mul_(slope).neg_()
    if grad_logprobs is not None:
        grad.scatter_add_(1, targets[:, None], grad_logprobs)
    return grad
