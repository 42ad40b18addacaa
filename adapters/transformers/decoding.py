"""The forward passes of generation, over one `KVCache`: prefill of prompts, continuing stored ones, and one decoding
step."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rollgrad.adapters.torch.attention import ForestAttention
from rollgrad.adapters.torch.layout import prefill_layout
from rollgrad.adapters.transformers.kv_cache import KVCache

FEW_ROWS = 48
"""Rows up to which `_WeightsFirst` pays: measured on AVX-512, 2.2 times faster at 32 rows, no difference at 64."""


class Decoder:
    """Runs a causal language model with packed attention installed."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        parameter = next(model.parameters())
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._model = model
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self.cache = KVCache(
            layers=config.num_hidden_layers, heads=heads, dim=dim, dtype=parameter.dtype, device=parameter.device
        )

    def prefill(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Sequence[int]]) -> Tensor:
        """Runs each prompt once and stores its keys in each of its rows; what all prompts begin with is run once.

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
        hidden: Tensor = self._model.base_model(
            input_ids=tokens.to(self.device),
            position_ids=positions.to(self.device),
            use_cache=False,
            attention_plan=plan,
        ).last_hidden_state
        return hidden

    def _logits(self, hidden_AH: Tensor) -> Tensor:
        logits: Tensor = self._model.get_output_embeddings()(hidden_AH).float()
        return logits


class _WeightsFirst(TorchFunctionMode):
    """Computes x W^T as (W x^T)^T: with few rows MKL's float32 product is about twice as fast in this order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.linear:
            return func(*args, **(kwargs or {}))
        x, weight, *rest = args
        bias = rest[0] if rest else (kwargs or {}).get("bias")
        out = torch.mm(weight, x.reshape(-1, x.shape[-1]).t()).t().reshape(*x.shape[:-1], weight.shape[0])
        return out if bias is None else out + bias


class _Prefill:
    """Attends within prompts and stores keys and values on the way."""

    def __init__(self, cache: KVCache, forest: ForestAttention, index: tuple[Tensor, ...]) -> None:
        self._cache, self._forest = cache, forest
        self._row, self._position, self._token = index

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        keys, values = self._cache.layer(layer)
        keys[self._row, :, self._position] = key[0].transpose(0, 1)[self._token]
        values[self._row, :, self._position] = value[0].transpose(0, 1)[self._token]
        return self._forest.attend(layer, query, key, value, scaling, window)


class _Decode:
    """One query a row against everything the row has stored."""

    def __init__(self, cache: KVCache, lengths_A: Tensor, time: int, dtype: torch.dtype) -> None:
        self._cache, self._lengths_A, self._time = cache, lengths_A, time
        self._rows_A = torch.arange(len(lengths_A), device=lengths_A.device)
        self._dtype = dtype
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        keys, values = self._cache.layer(layer)
        keys[self._rows_A, :, self._lengths_A] = key[:, :, 0]
        values[self._rows_A, :, self._lengths_A] = value[:, :, 0]
        count, heads, _, dim = query.shape
        # Query heads that share a key head become its queries: keys are read once.
        grouped = query.reshape(count, keys.shape[1], heads // keys.shape[1], dim)
        out = functional.scaled_dot_product_attention(
            grouped,
            keys[:count, :, : self._time],
            values[:count, :, : self._time],
            attn_mask=self._mask(window),
            scale=scaling,
        )
        return out.reshape(count, 1, heads, dim)

    def _mask(self, window: int | None) -> Tensor:
        """Additive mask [A, 1, 1, time]."""
        if window not in self._masks:
            k = torch.arange(self._time, device=self._lengths_A.device)[None]
            hidden = k > self._lengths_A[:, None]
            if window is not None:
                hidden |= k <= self._lengths_A[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
            self._masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[window]


class _Extend:
    """Several queries a row against what the row has stored and the queries' own tokens."""

    def __init__(self, cache: KVCache, first_row: int, lengths_A: Tensor, added_A: Tensor, dtype: torch.dtype) -> None:
        self._cache, self._dtype = cache, dtype
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
        keys, values = (stored[self._rows] for stored in self._cache.layer(layer))
        keys[self._row, :, self._place] = key[self._row, :, self._step]
        values[self._row, :, self._place] = value[self._row, :, self._step]
        out = functional.scaled_dot_product_attention(
            query,
            keys[:, :, : self._time],
            values[:, :, : self._time],
            attn_mask=self._mask(window),
            scale=scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        return out.transpose(1, 2)

    def _mask(self, window: int | None) -> Tensor:
        """Additive mask [A, 1, T, time]."""
        if window not in self._masks:
            k = torch.arange(self._time, device=self._position_AT.device)
            hidden = k > self._position_AT[:, :, None]
            if window is not None:
                hidden |= k <= self._position_AT[:, :, None] - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
            self._masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None]
        return self._masks[window]
