"""The forward passes of generation, over one `KVCache`: prefill of prompts, continuing stored ones, and one decoding
step."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rollgrad.adapters.engines.embedded.kv_cache import BLOCK, KVCache, Place, blocks_of, table
from rollgrad.adapters.engines.embedded.plans import Decode, DecodeInputs, Extend, Prefill
from rollgrad.adapters.engines.embedded.recomputing import RecomputingDecoder
from rollgrad.adapters.engines.embedded.states import PrefillRecurrence, RowRecurrence
from rollgrad.adapters.engines.embedded.step_graphs import step_graphs
from rollgrad.adapters.models.torch.experts.router_replay import RouterReplay
from rollgrad.adapters.models.torch.heads.logits import logit_form
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.layers.image_attention import make_plan
from rollgrad.adapters.models.torch.layers.images import has_own_positions, own_positions, run_body
from rollgrad.adapters.models.torch.layers.layout import Node, prefill_layout
from rollgrad.adapters.models.torch.layers.padded import is_padded
from rollgrad.adapters.models.torch.layers.recurrence import ForestRecurrence, Recurrence
from rollgrad.adapters.models.torch.layers.recurrent_layers import recurrent_types
from rollgrad.adapters.models.torch.loading.compatibility import (
    allowed_gap,
    foreign_code,
    joint_logits,
    logit_gap,
    lowered_limits,
    probe_tokens,
)
from rollgrad.adapters.models.torch.planning.shape import cache_numbers
from rollgrad.adapters.system.memory import available_memory
from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)

FEW_ROWS = 48
"""Rows up to which `_WeightsFirst` pays: measured on AVX-512, 2.2 times faster at 32 rows, no difference at 64."""


def check_decoding(model: Any, flag: str, *, other_engine: str = "") -> None:
    """Checks that the embedded engine samples from a model exactly: compares the logits of prefill, single steps and
    extension with those of one forward pass over whole sequences of a few tokens (see `compatibility.py`).

    Args:
        model: causal language model that `loading.py` has loaded.
        flag: command-line flag that names it.
        other_engine: flag and value that choose another engine, where there is one.

    Raises:
        ConfigurationError: they differ by more than rounding, or the model's code fails.
    """
    sequences = probe_tokens(model)
    try:
        with torch.no_grad(), foreign_code(), lowered_limits(model):
            expected = joint_logits(model, sequences)
            for kind, passes in _decoded_passes(model, sequences).items():
                rows = [
                    (found_V, expected_TV[end - 1])
                    for found_AV, ends in passes
                    for found_V, expected_TV, end in zip(found_AV, expected, ends, strict=True)
                ]
                gap = logit_gap(*map(torch.stack, zip(*rows, strict=True)))
                allowed = allowed_gap(model, sequences, gap)
                if not gap <= allowed:
                    raise ConfigurationError(
                        f"logits of {kind} differ by {gap:.2g} of their spread, more than rounding's {allowed:.2g}"
                    )
    except ConfigurationError as error:
        other = f", or set {other_engine}" if other_engine else ""
        raise ConfigurationError(
            f"{flag} names a {type(model).__name__}, from which the embedded engine cannot sample exactly "
            f"({str(error).rstrip('.')}): choose another {flag}{other}."
        ) from error
    if is_padded(model):
        remedy = f": {other_engine} is faster" if other_engine else ""
        log.warning(f"The embedded engine computes whole sequences of a {type(model).__name__} for each token{remedy}.")


def _decoded_passes(model: Any, sequences: Sequence[Sequence[int]]) -> dict[str, list[tuple[Tensor, list[int]]]]:
    """Returns the next-token logits [sequences, V] of passes of each kind, and how many tokens of each sequence they
    follow: a prefill of the first half, three single steps, and an extension by the rest."""
    decoder = decoder_of(model)
    decoder.cache.capacity = sum(blocks_of(len(tokens)) for tokens in sequences)
    places = [Place() for _ in sequences]
    for place, tokens in zip(places, sequences, strict=True):
        decoder.cache.reserve(place, len(tokens))
    lengths = [len(tokens) // 2 - 1 for tokens in sequences]
    prompts = [tuple(tokens[:length]) for tokens, length in zip(sequences, lengths, strict=True)]
    prefill = [(decoder.prefill(prompts, [[place] for place in places]), lengths)]
    steps = []
    for _ in range(3):
        following = [tokens[length] for tokens, length in zip(sequences, lengths, strict=True)]
        logits_AV = decoder.step(following, places, lengths)
        lengths = [length + 1 for length in lengths]
        steps.append((logits_AV, lengths))
    suffixes = [tokens[length:] for tokens, length in zip(sequences, lengths, strict=True)]
    extension = [(decoder.extend(suffixes, places, lengths), [*map(len, sequences)])]
    return {"prefill": prefill, "decoding": steps, "extension": extension}


def decoder_of(model: Any, replay: RouterReplay | None = None) -> "Decoder | RecomputingDecoder":
    """Returns what runs a causal language model that `loading.py` has loaded; `replay` records its experts.

    Raises:
        ConfigurationError: experts are to be recorded of a model that is computed padded.
    """
    if not is_padded(model):
        return Decoder(model, replay)
    if replay is not None:
        raise ConfigurationError(
            f"actor.router_replay is engine, but the embedded engine computes a {type(model).__name__} padded, and "
            "does not record its experts: set --actor.router_replay trainer."
        )
    return RecomputingDecoder(model)


class Decoder:
    """Runs a causal language model with packed attention installed; `replay` records its experts."""

    def __init__(self, model: Any, replay: RouterReplay | None = None) -> None:
        parameter = next(model.parameters())
        self._replay = replay
        self.routed: list[Tensor] = []
        """Experts [R, L, K] of each prompt, or of what the last pass added to each sequence, if they are recorded."""
        self._experts_M = torch.empty(0)
        self._model, self._form = model, logit_form(model)
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self.cache = KVCache()
        self._recurrent = bool(recurrent_types(model))
        self._graphs = step_graphs(model, self.device) if replay is None and not self._recurrent else None
        self.token_bytes = cache_numbers(model.config) * self.dtype.itemsize
        """Bytes that a token has in the cache."""

    @cached_property
    def sequence_bytes(self) -> int:
        """Bytes that a sequence has in the cache beside those of its tokens, found by a pass over one token."""
        if not self._recurrent:
            return 0
        kept, self.cache, place = self.cache, KVCache(), Place()
        self.cache.capacity = 1
        self.cache.reserve(place, 1)
        try:
            self.prefill([(0,)], [[place]])
            return self.cache.states.nbytes
        finally:
            self.cache = kept

    def free_memory(self) -> int:
        """Returns the bytes of the device's memory that are free, what torch keeps of it given back."""
        if self.device.type != "cuda":
            return available_memory()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def prefill(
        self,
        prompts: Sequence[tuple[int, ...]],
        places: Sequence[Sequence[Place]],
        images: Sequence[PlacedImages] = (),
    ) -> Tensor:
        """Runs each prompt once and stores its keys for each of its sequences; their common beginning is run once.

        Args:
            prompts: distinct prompts.
            places: room for the sequences of each prompt.
            images: images of each prompt, or none at all.

        Returns:
            Float32 next-token logits [prompts, V].
        """
        layout, leaves = prefill_layout(prompts, images)
        positions = layout.positions_M[None]
        if any(images) and has_own_positions(self._model):
            positions = self._own_positions(prompts, images, leaves, len(layout.tokens_M))
        recurrence: Recurrence | None = None
        if self._recurrent:
            states = self.cache.states.begin([place for members in places for place in members])
            forest = ForestRecurrence(layout.nodes, device=self.device)
            recurrence = PrefillRecurrence(forest, leaves, [len(members) for members in places], states)
        plan = Prefill(self.cache, make_plan(self._model, layout), self._stored_at(leaves, places), recurrence)
        hidden_MH = self._hidden(layout.tokens_M[None], positions, plan, layout.images)
        self.routed = [self._experts_M[leaf.path()] for leaf in leaves] if self._replay is not None else []
        last = torch.tensor([leaf.start + leaf.length - 1 for leaf in leaves])
        return self._logits(hidden_MH[0].index_select(0, to_device(last, self.device)))

    def _stored_at(self, leaves: Sequence[Node], places: Sequence[Sequence[Place]]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the block and the offset in it at which each sequence of each prompt stores each of its keys, and the
        token of the pass that has the key."""
        block, offset, token = [], [], []
        for leaf, members in zip(leaves, places, strict=True):
            path, position = leaf.path(), torch.arange(leaf.keys)
            for numbers_K in table(members):
                block.append(numbers_K[position // BLOCK])
                offset.append(position % BLOCK)
                token.append(path)
        to_block, to_offset, of_token = (to_device(torch.cat(part), self.device) for part in (block, offset, token))
        return to_block, to_offset, of_token

    def _own_positions(
        self, prompts: Sequence[tuple[int, ...]], images: Sequence[PlacedImages], leaves: Sequence[Node], count: int
    ) -> Tensor:
        """Returns the model's position ids [K, 1, M] of prompts with images."""
        parts = []
        for prompt, own, leaf in zip(prompts, images, leaves, strict=True):
            positions_KT = own_positions(self._model, torch.tensor(prompt), own)
            parts.append((leaf, positions_KT))
        positions_KM = torch.zeros(len(parts[0][1]), count, dtype=torch.int64)
        for leaf, positions_KT in parts:
            positions_KM[:, : leaf.prefix_length] = positions_KT[:, : leaf.prefix_length]
            positions_KM[:, leaf.start : leaf.start + leaf.length] = positions_KT[:, leaf.prefix_length :]
        return positions_KM[:, None]

    def shift(self, prompt: tuple[int, ...], images: PlacedImages) -> int:
        """Returns the difference between the position of the token that follows a prompt and the prompt's length, which
        images may take fewer positions than."""
        if not images or not has_own_positions(self._model):
            return 0
        return int(own_positions(self._model, torch.tensor(prompt), images).max()) + 1 - len(prompt)

    def extend(self, suffixes: Sequence[Sequence[int]], places: Sequence[Place], lengths: Sequence[int]) -> Tensor:
        """Appends several tokens each to sequences; returns next-token logits [sequences, V], float32.

        Args:
            suffixes: the tokens to append, at least one a sequence.
            places: where the sequences are stored, with room for them.
            lengths: tokens stored of each so far.
        """
        added = torch.tensor([len(suffix) for suffix in suffixes])
        width = int(added.max())
        tokens_AT = torch.tensor([[*suffix, *[0] * (width - len(suffix))] for suffix in suffixes])
        lengths_A, added_A = torch.tensor(lengths), to_device(added, self.device)
        recurrence = RowRecurrence(self.cache.states.of(places), added_A) if self._recurrent else None
        plan = Extend(self.cache, places, lengths_A, added, self.device, self.dtype, recurrence)
        hidden_ATH = self._hidden(tokens_AT, lengths_A[:, None] + torch.arange(width), plan)
        if self._replay is not None:
            begins = range(0, len(self._experts_M), width)
            self.routed = [self._experts_M[b : b + len(own)] for b, own in zip(begins, suffixes, strict=True)]
        return self._logits(hidden_ATH[torch.arange(len(suffixes), device=self.device), added_A - 1])

    def step(
        self,
        tokens: Sequence[int],
        places: Sequence[Place],
        lengths: Sequence[int],
        shifts: Sequence[int] = (),
    ) -> Tensor:
        """Appends one token to each of A sequences; returns next-token logits [A, V], float32.

        Args:
            tokens: the token to append to each.
            places: where the sequences are stored, with room for it.
            lengths: tokens stored of each so far.
            shifts: number to add to the length of each for the token's position (`shift`); none adds nothing.
        """
        inputs = DecodeInputs.of(self.cache, tokens, places, lengths, torch.tensor(shifts or [0] * len(lengths)))
        if self._graphs is not None:
            hidden_A1H = self._graphs.run(inputs.padded(self.cache.capacity), self._decoded)
            return self._logits(hidden_A1H[: len(tokens), 0])
        on_cpu = self.device.type == "cpu"
        # A CPU leaves out what no row has stored where each has one block; a GPU's kernel takes masks of whole blocks.
        width = max(lengths) + 1 if on_cpu and inputs.table_AK.shape[1] == 1 else BLOCK
        few_on_cpu = on_cpu and self.dtype == torch.float32 and len(tokens) <= FEW_ROWS
        with _WeightsFirst() if few_on_cpu else nullcontext():
            recurrence = RowRecurrence(self.cache.states.of(places)) if self._recurrent else None
            hidden_A1H = self._decoded(inputs.to(self.device), width, recurrence)
            self.routed = [*self._experts_M[:, None]] if self._replay is not None else []
            return self._logits(hidden_A1H[:, 0])

    def _decoded(self, inputs: DecodeInputs, width: int = BLOCK, recurrence: Recurrence | None = None) -> Tensor:
        """Returns the last hidden states [A, 1, H] of a step."""
        return self._hidden(inputs.token_A1, inputs.position_A1, Decode(self.cache, inputs, width, recurrence))

    def release(self) -> None:
        """Ends all sequences and frees the memory of what is stored and captured."""
        self.cache.release()
        if self._graphs is not None:
            self._graphs.clear()

    def _hidden(self, tokens: Tensor, positions: Tensor, plan: Any, images: PlacedImages = ()) -> Tensor:
        if self._replay is None:
            hidden: Tensor = run_body(self._model, tokens, positions, plan, images).last_hidden_state
            return hidden
        with self._replay.recording() as passes:
            hidden = run_body(self._model, tokens, positions, plan, images).last_hidden_state
        self._experts_M = self._replay.recorded(passes)
        return hidden

    def _logits(self, hidden_AH: Tensor) -> Tensor:
        head = self._model.get_output_embeddings()
        return self._form.logits(hidden_AH, head.weight, head.bias)


class _WeightsFirst(TorchFunctionMode):
    """Computes x W^T as (W x^T)^T: with few rows MKL's float32 product is about twice as fast in this order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.linear:
            return func(*args, **(kwargs or {}))
        x, weight, *rest = args
        bias = rest[0] if rest else (kwargs or {}).get("bias")
        # Contiguous, as models expect it of a linear layer.
        out = torch.mm(weight, x.reshape(-1, x.shape[-1]).t()).t().contiguous().view(*x.shape[:-1], weight.shape[0])
        return out if bias is None else out + bias
