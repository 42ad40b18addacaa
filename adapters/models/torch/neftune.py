"""Noise on the embeddings of a model that is trained (Jain et al. 2023, "NEFTune", arXiv:2310.05914).

Invariant: the noise of a sequence depends on its tokens and the optimizer step alone, so that a step has one gradient
however it is divided, and a run that continues has the noise that it would have had. The exception are branches of one
conversation that together are longer than a pass: where they are divided, each has noise of its own on their prompt.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from rollgrad.adapters.models.torch.layout import build_layout
from rollgrad.domain.batches.packed import PackedBatch

STEP_BITS = 24
"""Bits of a seed that are the optimizer step's; the others are the tokens'."""


class EmbeddingNoise:
    """Adds noise to what the input embeddings of `model` return, inside `during`, where gradients are taken.

    Args:
        module: computes `model` over packed batches; its first argument is the batch.
        model: a causal language model.
        alpha: the noise of a sequence of L embeddings of size H is uniform in +-alpha / sqrt(L H).
    """

    def __init__(self, module: nn.Module, model: Any, alpha: float) -> None:
        self._alpha = alpha
        self._step: int | None = None
        self._batch: PackedBatch | None = None
        module.register_forward_pre_hook(self._remember)
        model.get_input_embeddings().register_forward_hook(self._add)

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Adds the noise of this optimizer step inside the block."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def _remember(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._batch = inputs[0]

    def _add(self, module: nn.Module, inputs: tuple[Any, ...], embeddings_1MH: Tensor) -> Tensor:
        if self._step is None or self._batch is None or not torch.is_grad_enabled():
            return embeddings_1MH
        return embeddings_1MH + sequence_noise(self._batch, self._step, self._alpha, embeddings_1MH)


def sequence_noise(batch: PackedBatch, step: int, alpha: float, embeddings_1MH: Tensor) -> Tensor:
    """Returns the noise of the distinct tokens of `batch`, like `embeddings_1MH`. A prompt that sequences share has
    that of the first."""
    _, count, size = embeddings_1MH.shape
    index_N, tokens_N = build_layout(batch).index_N, batch.tokens_N.cpu()
    noise_MH = torch.zeros(count, size)
    generator = torch.Generator()
    for start, length in zip(reversed(batch.starts_S.tolist()), reversed(batch.lengths_S.tolist()), strict=True):
        own = slice(start, start + length)
        generator.manual_seed((crc32(tokens_N[own].numpy().tobytes()) << STEP_BITS) + step)
        noise_TH = torch.rand(length, size, generator=generator).mul_(2).sub_(1)
        noise_MH[index_N[own]] = noise_TH.mul_(alpha / math.sqrt(length * size))
    return noise_MH[None].to(embeddings_1MH)
