"""The forward passes of generation, over one `KVCache`: prefill of prompts, continuing stored ones, and one decoding
step."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rollgrad.adapters.engines.embedded.kv_cache import KVCache
from rollgrad.adapters.models.torch.attention import ForestAttention, backbone
from rollgrad.adapters.models.torch.compatibility import (
    allowed_gap,
    foreign_code,
    logit_form,
    logit_gap,
    lowered_limits,
    packed_logits,
    probe_tokens,
)
from rollgrad.adapters.models.torch.kernels import dense
from rollgrad.adapters.models.torch.layout import prefill_layout
from rollgrad.domain.errors import ConfigurationError

FEW_ROWS = 48
"""Rows up to which `_WeightsFirst` pays: measured on AVX-512, 2.2 times faster at 32 rows, no difference at 64."""


def check_decoding(model: Any, flag: str, *, other_engine: str = "") -> None:
    """Compares prefill, single steps and extension with one forward pass over whole sequences, in six passes of a few
    tokens (see `compatibility.py`).

    Args:
        model: causal language model with packed attention installed.
        flag: command-line flag that names it.
        other_engine: flag and value that choose another engine, where there is one.

    Raises:
        ConfigurationError: they differ by more than rounding, or the model's code fails.
    """
    sequences = probe_tokens(model)
    begun = [len(tokens) // 2 - 1 for tokens in sequences]
    try:
        with torch.no_grad(), foreign_code(), lowered_limits(model):
            expected = packed_logits(model, sequences)
            decoder = Decoder(model)
            decoder.cache.reserve(len(sequences), max(map(len, sequences)))
            prompts = [tokens[:n] for tokens, n in zip(sequences, begun, strict=True)]
            found = [("prefill", decoder.prefill(prompts, [[0], [1]]), begun)]
            lengths = begun
            for _ in range(3):
                logits_AV = decoder.step([t[n] for t, n in zip(sequences, lengths, strict=True)], lengths)
                lengths = [n + 1 for n in lengths]
                found.append(("decoding", logits_AV, lengths))
            suffixes = [tokens[n:] for tokens, n in zip(sequences, lengths, strict=True)]
            found.append(("extension", decoder.extend(suffixes, 0, lengths), [*map(len, sequences)]))
            for kind in ("prefill", "decoding", "extension"):
                rows = [
                    (mine_V, theirs_TV[end - 1])
                    for name, mine_AV, ends in found
                    if name == kind
                    for mine_V, theirs_TV, end in zip(mine_AV, expected, ends, strict=True)
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


class Decoder:
    """Runs a causal language model with packed attention installed."""

    def __init__(self, model: Any) -> None:
        parameter = next(model.parameters())
        self._model, self._body, self._form = model, backbone(model), logit_form(model)
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self.cache = KVCache()

    def prefill(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Sequence[int]]) -> Tensor:
        """Runs each prompt once and stores its keys in each of its rows; their common beginning is run once.

        Args:
            prompts: distinct prompts.
            rows: cache rows of each prompt's sequences.

        Returns:
            Float32 next-token logits [prompts, V].
        """
        layout, leaves = prefill_layout(prompts)
        row, position, token = [], [], []
        for leaf, members in zip(leaves, rows, strict=True):
            path = torch.cat([torch.arange(leaf.prefix_length), torch.arange(leaf.start, leaf.start + leaf.length)])
            for member in members:
                row.append(torch.full((leaf.keys,), member))
                position.append(torch.arange(leaf.keys))
                token.append(path)
        forest = ForestAttention(layout.nodes, device=self.device, dtype=self.dtype)
        index = tuple(torch.cat(part).to(self.device) for part in (row, position, token))
        hidden_MH = self._hidden(layout.tokens_M[None], layout.positions_M[None], _Prefill(self.cache, forest, index))
        last = torch.tensor([leaf.start + leaf.length - 1 for leaf in leaves], device=self.device)
        return self._logits(hidden_MH[0].index_select(0, last))

    def extend(self, suffixes: Sequence[Sequence[int]], first_row: int, lengths: Sequence[int]) -> Tensor:
        """Appends several tokens each to the rows from `first_row` on; returns next-token logits [rows, V], float32.

        Args:
            suffixes: the tokens to append, at least one a row.
            first_row: row of the first suffix; the others follow.
            lengths: tokens stored in each of these rows so far.
        """
        added = torch.tensor([len(suffix) for suffix in suffixes], device=self.device)
        width = int(added.max())
        tokens_AT = torch.tensor([[*suffix, *[0] * (width - len(suffix))] for suffix in suffixes])
        lengths_A = torch.tensor(lengths, device=self.device)
        plan = _Extend(self.cache, first_row, lengths_A, added, self.dtype)
        hidden_ATH = self._hidden(tokens_AT, lengths_A[:, None] + torch.arange(width, device=self.device), plan)
        return self._logits(hidden_ATH[torch.arange(len(suffixes), device=self.device), added - 1])

    def step(self, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Appends one token to each of the first A rows; returns next-token logits [A, V], float32.

        Args:
            tokens: the token to append to each row.
            lengths: tokens stored in each row so far.
        """
        lengths_A = torch.tensor(lengths, device=self.device)
        plan = _Decode(self.cache, lengths_A, max(lengths) + 1, self.dtype)
        few_on_cpu = self.device.type == "cpu" and self.dtype == torch.float32 and len(tokens) <= FEW_ROWS
        with _WeightsFirst() if few_on_cpu else nullcontext():
            hidden_A1H = self._hidden(torch.tensor(tokens)[:, None], lengths_A[:, None], plan)
            return self._logits(hidden_A1H[:, 0])

    def _hidden(self, tokens: Tensor, positions: Tensor, plan: Any) -> Tensor:
        hidden: Tensor = self._body(
            input_ids=tokens.to(self.device),
            position_ids=positions.to(self.device),
            use_cache=False,
            attention_plan=plan,
        ).last_hidden_state
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


class _Cached:
    """A plan of one pass that stores keys and values on the way."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._calls = 0

    def _stored(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of this call. Calls are counted, not layers: some layers attend or run several
        times."""
        self._calls += 1
        return self._cache.pair(self._calls - 1, key, value)


class _Prefill(_Cached):
    """Attends within prompts."""

    def __init__(self, cache: KVCache, forest: ForestAttention, index: tuple[Tensor, ...]) -> None:
        super().__init__(cache)
        self._forest = forest
        self._row, self._position, self._token = index

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        keys, values = self._stored(key, value)
        keys[self._row, :, self._position] = key[0].transpose(0, 1)[self._token]
        values[self._row, :, self._position] = value[0].transpose(0, 1)[self._token]
        return self._forest.attend(layer, query, key, value, scaling, window)


class _Decode(_Cached):
    """One query a row against everything the row has stored."""

    def __init__(self, cache: KVCache, lengths_A: Tensor, time: int, dtype: torch.dtype) -> None:
        super().__init__(cache)
        self._lengths_A, self._time = lengths_A, time
        self._rows_A = torch.arange(len(lengths_A), device=lengths_A.device)
        self._dtype = dtype
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        keys, values = self._stored(key, value)
        keys[self._rows_A, :, self._lengths_A] = key[:, :, 0]
        values[self._rows_A, :, self._lengths_A] = value[:, :, 0]
        count, heads, _, dim = query.shape
        # Query heads that share a key head become its queries: keys are read once.
        grouped = query.reshape(count, keys.shape[1], heads // keys.shape[1], dim)
        stored = (part[:count, :, : self._time] for part in (keys, values))
        out = dense(grouped, *stored, mask=self._mask(window), scaling=scaling)
        return out.reshape(count, 1, heads, values.shape[3])

    def _mask(self, window: int | None) -> Tensor:
        """Returns the additive mask [A, 1, 1, time]."""
        if window not in self._masks:
            k = torch.arange(self._time, device=self._lengths_A.device)[None]
            hidden = k > self._lengths_A[:, None]
            if window is not None:
                hidden |= k <= self._lengths_A[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
            self._masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[window]


class _Extend(_Cached):
    """Several queries a row against what the row has stored and the queries' own tokens."""

    def __init__(self, cache: KVCache, first_row: int, lengths_A: Tensor, added_A: Tensor, dtype: torch.dtype) -> None:
        super().__init__(cache)
        self._dtype = dtype
        self._rows = slice(first_row, first_row + len(lengths_A))
        steps = torch.arange(int(added_A.max()), device=lengths_A.device)
        self._position_AT = lengths_A[:, None] + steps
        self._time = int((lengths_A + added_A).max())
        real_AT = steps < added_A[:, None]
        self._row, self._step = real_AT.nonzero(as_tuple=True)
        self._place = self._position_AT[real_AT]
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        keys, values = (stored[self._rows] for stored in self._stored(key, value))
        keys[self._row, :, self._place] = key[self._row, :, self._step]
        values[self._row, :, self._place] = value[self._row, :, self._step]
        stored = (part[:, :, : self._time] for part in (keys, values))
        return dense(query, *stored, mask=self._mask(window), scaling=scaling).transpose(1, 2)

    def _mask(self, window: int | None) -> Tensor:
        """Returns the additive mask [A, 1, T, time]."""
        if window not in self._masks:
            k = torch.arange(self._time, device=self._position_AT.device)
            hidden = k > self._position_AT[:, :, None]
            if window is not None:
                hidden |= k <= self._position_AT[:, :, None] - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
            self._masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None]
        return self._masks[window]
