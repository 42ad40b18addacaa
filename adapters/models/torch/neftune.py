"""Noise on the embeddings of a model that is trained (Jain et al. 2023, "NEFTune", arXiv:2310.05914).

Invariant: the noise of a sequence depends on its tokens and the optimizer step alone, so that a step has one gradient
however it is divided, and a run that continues has the noise that it would have had. The exception are branches of one
conversation that together are longer than a pass: where they are divided, each has noise of its own on their prompt.
"""

import math
from contextlib import AbstractContextManager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.layers.layout import Layout, build_layout
from rollgrad.adapters.models.torch.layers.padded import is_padded, padded_layout
from rollgrad.adapters.models.torch.step_tokens import StepTokens
from rollgrad.domain.batches.packed import PackedBatch

STEP_BITS = 24
"""Bits of a seed that are the optimizer step's; the others are the tokens'."""


class EmbeddingNoise:
    """Adds noise to what the input embeddings of `model` return, inside `during`.

    Args:
        module: computes `model` over packed batches; its first argument is the batch.
        model: a causal language model.
        alpha: the noise of a sequence of L embeddings of size H is uniform in +-alpha / sqrt(L H).
    """

    def __init__(self, module: nn.Module, model: Any, alpha: float) -> None:
        self._alpha = alpha
        self._model = model
        self._tokens = StepTokens()
        self._tokens.follow(module)
        model.get_input_embeddings().register_forward_hook(self._add)

    def during(self, step: int) -> AbstractContextManager[None]:
        """Adds the noise of this optimizer step inside the block."""
        return self._tokens.during(step)

    def _add(self, module: nn.Module, inputs: tuple[Any, ...], embeddings_RTH: Tensor) -> Tensor:
        def find(batch: PackedBatch, step: int) -> Tensor:
            layout = padded_layout(self._model, batch) if is_padded(self._model) else build_layout(batch)
            return sequence_noise(batch, layout, step, self._alpha, embeddings_RTH.shape[-1])

        noise = self._tokens.following(embeddings_RTH[..., 0].numel(), find)
        if noise is None:
            return embeddings_RTH
        moved = to_device(noise.to(embeddings_RTH.dtype), embeddings_RTH.device)
        return embeddings_RTH + moved.view_as(embeddings_RTH)


def sequence_noise(batch: PackedBatch, layout: Layout, step: int, alpha: float, size: int) -> Tensor:
    """Returns the noise of the tokens of a batch's layout, [M, size], 0 at padding. A prompt that sequences share has
    that of the first."""
    index_N, tokens_N = layout.index_N, batch.tokens_N.cpu()
    noise_MH = torch.zeros(len(layout.tokens_M), size)
    generator = torch.Generator()
    for start, length in zip(reversed(batch.starts_S.tolist()), reversed(batch.lengths_S.tolist()), strict=True):
        own = slice(start, start + length)
        generator.manual_seed((crc32(tokens_N[own].numpy().tobytes()) << STEP_BITS) + step)
        noise_TH = torch.rand(length, size, generator=generator).mul_(2).sub_(1)
        noise_MH[index_N[own]] = noise_TH.mul_(alpha / math.sqrt(length * size))
    return noise_MH
