"""Dropout of LoRA's adapters (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; peft's
`lora_dropout`). While a model is trained, an adapter computes B A d(x), where d sets a share p of the numbers of x to 0
and multiplies the others by 1 / (1 - p).

Invariants: which numbers of a token are left out depends only on the tokens up to it, the optimizer step and the layer.
So a step has one gradient however it is divided, activations that are computed again are the same, and a run that
continues leaves out what it would have. Nothing is left out in sampling or scoring.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.layers.layout import build_layout
from rollgrad.adapters.models.torch.layers.padded import is_padded, padded_layout
from rollgrad.adapters.models.torch.layers.sequence_parallel import SequenceGroup
from rollgrad.adapters.models.torch.loading.lora import ADAPTER
from rollgrad.adapters.models.torch.step_tokens import StepTokens
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.errors import ConfigurationError

BASE = 6364136223846793005
"""Odd base of the polynomial, modulo 2^64, whose value at a token stands for all tokens up to it (Knuth's MMIX)."""

MIX = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))
"""Shifts and factors of a mixing function of 32 bits (Wellons 2018, "Prospecting for Hash Functions", lowbias32)."""

SIGN = 2**31

NUMBERS_AT_ONCE = 2**22
"""Numbers whose fate is decided together: few enough for a processor's cache."""


class AdapterDropout:
    """Dropout of the adapters of `model`, if they were made with one (`add_lora`); else every method does nothing.

    Args:
        model: a causal language model, with its adapters, before it is divided over processes.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._tokens = StepTokens()
        self._group = SequenceGroup()
        self._keys_T: Tensor | None = None
        """A number for each token of the pass that is computed; None where nothing is left out."""
        self._there = False
        share = model.peft_config[ADAPTER].lora_dropout if hasattr(model, "peft_config") else 0.0
        for name, part in model.named_modules() if share else ():
            if name.endswith(".lora_dropout"):
                part[ADAPTER] = nn.Identity()
            elif name.endswith(f".lora_A.{ADAPTER}"):
                self._there = True
                part.forward = _DroppedLinear(self, part, name, share)

    def of(self, module: nn.Module, group: SequenceGroup) -> None:
        """Follows the batches of `module`, which computes the model; its first argument is the batch, whose tokens the
        processes of `group` share."""
        if self._there:
            self._group = group
            self._tokens.follow(module)
            self._model.get_input_embeddings().register_forward_hook(self._begin)

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Leaves out what is left out in this optimizer step inside the block."""
        with self._tokens.during(step):
            try:
                yield
            finally:
                self._keys_T = None

    def keys(self, rows: int) -> Tensor | None:
        """Returns the number of each of `rows` tokens of the pass that is computed; None where nothing is left out."""
        if self._keys_T is None:
            return None
        if len(self._keys_T) != rows:
            raise ConfigurationError(
                f"actor.lora.dropout (or the critic's) is set, but a linear layer with adapters computes {rows} of the "
                f"{len(self._keys_T)} tokens of a pass: leave it out of --actor.lora.target_modules "
                "(--critic.lora.target_modules), or leave --actor.lora.dropout (--critic.lora.dropout) out."
            )
        return self._keys_T

    def _begin(self, module: nn.Module, inputs: tuple[Any, ...], embeddings: Tensor) -> None:
        """Finds the numbers of the tokens of a pass, whose embeddings have been computed."""
        keys_T = self._tokens.following(embeddings[..., 0].numel(), self._keys)
        if keys_T is not None:
            self._keys_T = to_device(keys_T, embeddings.device)

    def _keys(self, batch: PackedBatch, step: int) -> Tensor:
        """Returns the numbers of the tokens that this process computes, pass by pass."""
        layout = padded_layout(self._model, batch) if is_padded(self._model) else build_layout(batch)
        share = self._group.share(layout)
        keys_M = torch.zeros(len(share.layout.tokens_M), dtype=torch.int32)
        keys_M[share.layout.index_N] = token_keys(batch, step)
        return share.of(keys_M)

    def again(self) -> AbstractContextManager[None]:
        """Returns the context in which a layer of the pass that is computed now is computed again later."""
        return self._again(self._keys_T)

    @contextmanager
    def _again(self, keys_T: Tensor | None) -> Iterator[None]:
        before, self._keys_T = self._keys_T, keys_T
        try:
            yield
        finally:
            self._keys_T = before


class _DroppedLinear:
    """Forward pass of the matrix A of an adapter, a linear layer without bias, over inputs without what is left out."""

    def __init__(self, dropout: AdapterDropout, linear: nn.Linear, name: str, share: float) -> None:
        self._dropout = dropout
        self._linear = linear
        self._name = name
        self._share = share
        self._features_F: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Returns A d(x)."""
        keys_T = self._dropout.keys(x[..., 0].numel())
        if keys_T is None:
            return functional.linear(x, self._linear.weight)
        if self._features_F is None or self._features_F.device != x.device:
            self._features_F = to_device(feature_keys(self._name, x.shape[-1]), x.device)
        product: Tensor = _Product.apply(x, self._linear.weight, keys_T, self._features_F, self._share)  # type: ignore[no-untyped-call]
        return product


class _Product(torch.autograd.Function):
    """The product A d(x). The backward pass computes d(x) again, so that no more is kept than without dropout: x, which
    adapters of the same input share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, keys_T: Tensor, features_F: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(x, weight, keys_T, features_F)
        ctx.share = share
        return functional.linear(dropped(x, keys_T, features_F, share), weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, keys_T, features_F = ctx.saved_tensors
        of_weight = gradient.flatten(0, -2).T @ dropped(x, keys_T, features_F, ctx.share).flatten(0, -2)
        return dropped(gradient @ weight, keys_T, features_F, ctx.share), of_weight, None, None, None


def token_keys(batch: PackedBatch, step: int) -> Tensor:
    """Returns a number for each token [N], int32, which is that of all tokens up to it in its sequence and the step."""
    powers_T = torch.full((int(batch.lengths_S.max()),), BASE).cumprod(0)  # all of this modulo 2^64
    terms_N = (batch.tokens_N.cpu() + 1) * powers_T[batch.positions_N.cpu()]
    sums_N = terms_N.cumsum(0)
    starts_S = batch.starts_S.cpu()
    before_S = sums_N[starts_S] - terms_N[starts_S]
    keys_N = sums_N - before_S.repeat_interleave(batch.lengths_S.cpu()) + (step + 1) * 0x9E3779B97F4A7C15 % 2**63
    keys_N = (keys_N ^ (keys_N >> 29)) * BASE
    return (keys_N >> 32).int()


def feature_keys(layer: str, size: int) -> Tensor:
    """Returns a number for each feature of a layer's input [size], int32."""
    generator = torch.Generator().manual_seed(crc32(layer.encode()))
    return torch.randint(-SIGN, SIGN, (size,), generator=generator).int()


@torch.no_grad()
def dropped(x: Tensor, keys_T: Tensor, features_F: Tensor, share: float) -> Tensor:
    """Returns x [..., F], whose leading dimensions are T, without the numbers that are left out, the others divided by
    1 - share."""
    x_TF = x.reshape(len(keys_T), -1)
    result_TF = torch.empty_like(x_TF)
    rows = max(1, NUMBERS_AT_ONCE // len(features_F))
    for start in range(0, len(keys_T), rows):
        own = slice(start, start + rows)
        chance = keys_T[own, None] ^ features_F
        for shift, factor in MIX:
            chance ^= (chance >> shift) & (2 ** (32 - shift) - 1)  # shifts as if numbers had no sign
            chance *= factor
        chance ^= (chance >> 16) & 0xFFFF
        left_out = (chance & (SIGN - 1)) < int(share * SIGN)
        torch.div(x_TF[own], 1 - share, out=result_TF[own])
        result_TF[own].masked_fill_(left_out, 0.0)
    return result_TF.view(x.shape)
