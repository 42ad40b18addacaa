"""Rotary position embeddings of a language model, in three operations on a GPU instead of five.

Transformers writes the formula out (Su et al. 2021, arXiv:2104.09864, equation 34): x * cos + rotate_half(x) * sin,
where rotate_half puts the second half, negated, before the first. Each operation reads and writes all numbers. Here the
halves' products with sin are added in place to x * cos, and are not rounded on their own.
Does not own: other formulas, such as those that turn neighbouring numbers, or compute in float32; nor heads of which a
part is turned. These stay as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.models.torch.layers.recurrent_layers import defining_modules

NAME = "apply_rotary_pos_emb"
"""Name of transformers' function in the modules of models."""

Pair = tuple[Tensor, Tensor]


def install_rotary(model: Any) -> None:
    """Has the rotary embeddings of a transformers model computed so where queries and keys are on a GPU."""
    for module in defining_modules(model):
        own = vars(module).get(NAME)
        if own is not None and not isinstance(own, _OnGPU) and turns_halves(own):
            setattr(module, NAME, _OnGPU(own))


def turns_halves(own: Callable[..., Any]) -> bool:
    """Returns whether a function computes the formula, and rounds as it is written."""
    numbers = torch.arange(1.0, 49.0).sin()
    for dtype in (torch.float32, torch.bfloat16):
        q, k = numbers.view(2, 1, 2, 3, 4).to(dtype)
        cos, sin = numbers[:24].cos().view(2, 1, 3, 4).to(dtype)
        try:
            found = own(q, k, cos, sin)
        except Exception:  # the code of a model, whose function of this name may take anything
            return False
        expected = [x * cos[:, None] + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin[:, None] for x in (q, k)]
        if not (isinstance(found, tuple) and len(found) == 2 and all(map(torch.equal, found, expected))):
            return False
    return True


class _OnGPU:
    """A function of a module of transformers that computes the formula."""

    def __init__(self, own: Callable[..., Pair]) -> None:
        self._own = own

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Pair:
        """Returns queries and keys [B, H, T, D], turned by the angles of [B, T, D]."""
        compiling = torch.compiler.is_compiling()  # which fuses the formula with what is before and after it
        if compiling or not q.is_cuda or others or named or cos.requires_grad or not _alike(q, k, cos, sin):
            return self._own(q, k, cos, sin, *others, **named)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return _turned(q, cos, sin), _turned(k, cos, sin)


def _alike(*tensors: Tensor) -> bool:
    """Returns whether whole heads are turned, in the format of their angles."""
    return len({(x.dtype, x.shape[-1]) for x in tensors}) == 1


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned: Tensor = _Turned.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return turned


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        first, last = sin.chunk(2, -1)
        return _with_halves(x, cos, first, last, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        first, last = sin.chunk(2, -1)
        return _with_halves(gradient, cos, last, first, -1), None, None


def _with_halves(x: Tensor, cos: Tensor, first: Tensor, last: Tensor, sign: int) -> Tensor:
    """Returns x * cos, less the second half of x times `first` in its first half, and with the first half times `last`
    in its second; a `sign` of -1 is the other way about."""
    turned = x * cos
    (x1, x2), (turned1, turned2) = x.chunk(2, -1), turned.chunk(2, -1)
    turned1.addcmul_(x2, first, value=-sign)
    turned2.addcmul_(x1, last, value=sign)
    return turned
