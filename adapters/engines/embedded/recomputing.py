"""The forward passes of generation for models that are computed with padding, whose layers keep other things of the
past than keys and values: each pass computes whole sequences, so a reply costs the square of its length."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.engines.embedded.kv_cache import BLOCK, KVCache, Place
from rollgrad.adapters.models.torch.heads.logits import logit_form
from rollgrad.adapters.models.torch.layers.padded import padded_hidden
from rollgrad.adapters.system.memory import available_memory
from rollgrad.domain.episodes.images import PlacedImages


class RecomputingDecoder:
    """Does what `Decoder` does; its cache holds the sequences' tokens in place of keys."""

    token_bytes = 2 * torch.int64.itemsize
    """Bytes that a token has in the cache."""
    sequence_bytes = 0
    """Bytes that a sequence has in the cache beside those of its tokens."""
    routed: Sequence[Tensor] = ()
    """Experts are not recorded."""

    def __init__(self, model: Any) -> None:
        self._model, self._form = model, logit_form(model)
        self.cache = KVCache()

    def free_memory(self) -> int:
        """Returns the bytes of the machine's memory that are free; tokens are kept there."""
        return available_memory()

    def release(self) -> None:
        """Implements `Decoder.release`."""
        self.cache.release()

    def shift(self, prompt: tuple[int, ...], images: PlacedImages) -> int:
        """Implements `Decoder.shift`: such models see no images."""
        return 0

    def prefill(
        self,
        prompts: Sequence[tuple[int, ...]],
        places: Sequence[Sequence[Place]],
        images: Sequence[PlacedImages] = (),
    ) -> Tensor:
        """Implements `Decoder.prefill`."""
        for prompt, members in zip(prompts, places, strict=True):
            for place in members:
                self._store(place, prompt, 0)
        return self._logits([torch.tensor(prompt) for prompt in prompts])

    def extend(self, suffixes: Sequence[Sequence[int]], places: Sequence[Place], lengths: Sequence[int]) -> Tensor:
        """Implements `Decoder.extend`."""
        for suffix, place, length in zip(suffixes, places, lengths, strict=True):
            self._store(place, suffix, length)
        ends = [length + len(suffix) for suffix, length in zip(suffixes, lengths, strict=True)]
        stored = [self.cache.copy_out(place, end).pairs[0][0] for place, end in zip(places, ends, strict=True)]
        return self._logits([tokens_1T1.flatten() for tokens_1T1 in stored])

    def step(
        self, tokens: Sequence[int], places: Sequence[Place], lengths: Sequence[int], shifts: Sequence[int] = ()
    ) -> Tensor:
        """Implements `Decoder.step`."""
        return self.extend([[token] for token in tokens], places, lengths)

    def _store(self, place: Place, tokens: Sequence[int], begin: int) -> None:
        numbers = torch.tensor(tokens)
        keys, _ = self.cache.pair(0, numbers.view(1, 1, -1, 1), numbers.view(1, 1, -1, 1))
        position = torch.arange(begin, begin + len(tokens))
        keys[torch.tensor(place.blocks)[position // BLOCK], 0, position % BLOCK, 0] = numbers

    def _logits(self, sequences: Sequence[Tensor]) -> Tensor:
        # Copies, so that no pass's hidden states outlive it.
        last = {index: hidden_TH[-1].clone() for index, hidden_TH in padded_hidden(self._model, sequences)}
        head = self._model.get_output_embeddings()
        return self._form.logits(torch.stack([last[index] for index in range(len(last))]), head.weight, head.bias)
