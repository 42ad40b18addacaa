"""Attention plans of generation's passes, over one `KVCache`: each stores the keys and values of its tokens on the way.

Does not own: where a sequence's blocks lie (`kv_cache.py`), nor the passes themselves (`decoding.py`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rollgrad.adapters.engines.embedded.kv_cache import BLOCK, KVCache, Place, table
from rollgrad.adapters.models.torch.kernels.attention import dense, dense_with_logsumexp
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
from rollgrad.adapters.models.torch.kernels.sinks import with_sinks
from rollgrad.adapters.models.torch.layers.attention import AttentionPlan
from rollgrad.adapters.models.torch.layers.recurrence import Recurrence

NEVER = 2**62
"""Position after every token."""


class Cached:
    """A plan of one pass that stores keys and values on the way."""

    compiles = False

    def __init__(self, cache: KVCache, recurrence: Recurrence | None) -> None:
        self._cache, self.recurrence = cache, recurrence
        self._calls = 0

    def _stored(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of this call. Calls are counted, not layers: some layers attend or run several
        times."""
        self._calls += 1
        return self._cache.pair(self._calls - 1, key, value)


class Prefill(Cached):
    """Attends within prompts; `index` has block, token of the block, and token of the pass of each key to store."""

    def __init__(
        self,
        cache: KVCache,
        plan: AttentionPlan,
        index: tuple[Tensor, Tensor, Tensor],
        recurrence: Recurrence | None = None,
    ) -> None:
        super().__init__(cache, recurrence)
        self._plan = plan
        self._block, self._offset, self._token = index

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: ScoreForm) -> Tensor:
        """Implements `AttentionPlan.attend`."""
        keys, values = self._stored(key, value)
        keys[self._block, :, self._offset] = key[0].transpose(0, 1)[self._token]
        values[self._block, :, self._offset] = value[0].transpose(0, 1)[self._token]
        return self._plan.attend(layer, query, key, value, form)


class DecodeInputs(NamedTuple):
    """All that a decoding step depends on, beside weights and what is stored: A sequences with K blocks at most, and
    the first B blocks of the cache."""

    token_A1: Tensor
    """The token to append to each sequence."""
    position_A1: Tensor
    """Its position for the model."""
    last_A: Tensor
    """Its index in the sequence."""
    block_A: Tensor
    """The block in which its keys are stored."""
    offset_A: Tensor
    """Their place in the block."""
    table_AK: Tensor
    """The blocks of each sequence."""
    absent_AK: Tensor
    """Whether the sequence has fewer blocks."""
    row_B: Tensor
    """The sequence of each block."""
    begin_B: Tensor
    """The index in it of the block's first token."""

    @classmethod
    def of(
        cls, cache: KVCache, tokens: Sequence[int], places: Sequence[Place], lengths: Sequence[int], shifts: Tensor
    ) -> "DecodeInputs":
        """Returns the inputs of a step, on the CPU; arguments as of `Decoder.step`."""
        lengths_A, table_AK = torch.tensor(lengths), table(places)
        blocks_A = lengths_A // BLOCK + 1
        absent_AK = torch.arange(table_AK.shape[1]) >= blocks_A[:, None]
        row_R, index_R = (~absent_AK).nonzero(as_tuple=True)
        number_R = table_AK[row_R, index_R]
        return cls(
            token_A1=torch.tensor(tokens)[:, None],
            position_A1=(lengths_A + shifts)[:, None],
            last_A=lengths_A,
            block_A=table_AK[torch.arange(len(lengths)), lengths_A // BLOCK],
            offset_A=lengths_A % BLOCK,
            table_AK=table_AK,
            absent_AK=absent_AK,
            row_B=torch.zeros(cache.used, dtype=torch.int64).index_put_((number_R,), row_R),
            begin_B=torch.zeros(cache.used, dtype=torch.int64).index_put_((number_R,), index_R * BLOCK),
        )

    def padded(self, capacity: int) -> "DecodeInputs":
        """Returns inputs whose A, B and K are powers of two, B at most `capacity`. Sequences that are added repeat the
        first one, and store the same where it does; nobody looks at blocks that are added."""
        (count, most), blocks = self.table_AK.shape, len(self.row_B)
        row_A = torch.arange(_power_of_two(count))
        row_A[count:] = 0
        wider, more = _power_of_two(most) - most, min(_power_of_two(blocks), capacity) - blocks
        repeated = DecodeInputs._make([*(part[row_A] for part in self[:7]), self.row_B, self.begin_B])
        return repeated._replace(
            table_AK=functional.pad(repeated.table_AK, (0, wider)),
            absent_AK=functional.pad(repeated.absent_AK, (0, wider), value=True),
            row_B=functional.pad(self.row_B, (0, more)),
            begin_B=functional.pad(self.begin_B, (0, more), value=NEVER),
        )

    def to(self, device: torch.device) -> "DecodeInputs":
        """Returns the inputs on a device, to which they move in one copy."""
        if device == self.last_A.device:
            return self
        return self.parts(to_device(self.joined(), device))

    def joined(self) -> Tensor:
        """Returns all numbers end to end, int64; of what is absent each is a byte."""
        absent = self.absent_AK.flatten()
        eights = functional.pad(absent, (0, -len(absent) % torch.int64.itemsize)).view(torch.int64)
        return torch.cat([eights, *(part.flatten() for part in self if part is not self.absent_AK)])

    def parts(self, joined: Tensor) -> "DecodeInputs":
        """Returns inputs of the same shapes whose numbers are those of `joined`, which they share memory with."""
        eights = -(-self.absent_AK.numel() // torch.int64.itemsize)
        absent = joined[:eights].view(torch.bool)[: self.absent_AK.numel()].view(self.absent_AK.shape)
        others = [part for part in self if part is not self.absent_AK]
        found = torch.split(joined[eights:], [part.numel() for part in others])
        views = iter([part.view(of.shape) for part, of in zip(found, others, strict=True)])
        return DecodeInputs._make(absent if part is self.absent_AK else next(views) for part in self)


def _power_of_two(count: int) -> int:
    """Returns the least power of two that is not less."""
    return 1 << (count - 1).bit_length()


class Decode(Cached):
    """One query a row against everything the row has stored.

    Every block is attended to on its own, where it lies, and a row's blocks are then combined: keys and values are read
    once and never copied (Dao et al. 2023, Flash-Decoding). `width`: tokens of a block that are read.
    """

    def __init__(
        self, cache: KVCache, inputs: DecodeInputs, width: int = BLOCK, recurrence: Recurrence | None = None
    ) -> None:
        super().__init__(cache, recurrence)
        self._inputs = inputs
        self._blocks = (slice(len(inputs.row_B)), slice(None), slice(width))
        self._position_BW = inputs.begin_B[:, None] + torch.arange(width, device=inputs.begin_B.device)
        self._last_B1 = inputs.last_A[inputs.row_B][:, None]
        self._masks: dict[tuple[int | None, int | None, torch.dtype], tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: ScoreForm) -> Tensor:
        """Implements `AttentionPlan.attend`."""
        keys, values = self._stored(key, value)
        block_A, offset_A = self._inputs.block_A, self._inputs.offset_A
        keys[block_A, :, offset_A] = key[:, :, 0]
        values[block_A, :, offset_A] = value[:, :, 0]
        count, heads, _, dim = query.shape
        # Query heads that share a key head become its queries: keys are read once.
        grouped = query.reshape(count, keys.shape[1], heads // keys.shape[1], dim)
        mask, unseen_AK = self._mask(form.window, form.chunk, query.dtype)
        out_B, logsumexp_B = dense_with_logsumexp(
            grouped[self._inputs.row_B],
            keys[self._blocks],
            values[self._blocks],
            mask=mask,
            scaling=form.scaling,
            cap=form.cap,
        )
        if self._inputs.table_AK.shape[1] == 1:
            out, sums = (part[self._inputs.table_AK[:, 0]] for part in (out_B, logsumexp_B))
        else:
            unseen = unseen_AK[:, :, None, None]
            sums_AK = logsumexp_B[self._inputs.table_AK].masked_fill(unseen, float("-inf"))
            parts_AK = out_B[self._inputs.table_AK].masked_fill(unseen[..., None], 0.0)
            out, sums = (parts_AK * sums_AK.softmax(1)[..., None]).sum(1), sums_AK.logsumexp(1)
        if form.sinks_H is not None:
            out, _ = with_sinks(out, sums, form.sinks_H.view(grouped.shape[1:3]))
        return out.to(query.dtype).reshape(count, 1, heads, values.shape[3])

    def _mask(self, window: int | None, chunk: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the additive mask [blocks, 1, 1, W], and which of its blocks a row sees nothing of, [A, K]."""
        if (window, chunk, dtype) not in self._masks:
            hidden_BW = _hidden(self._position_BW, self._last_B1, window, chunk)
            mask = torch.zeros(hidden_BW.shape, dtype=dtype, device=hidden_BW.device)
            unseen_AK = hidden_BW.all(1)[self._inputs.table_AK] | self._inputs.absent_AK
            masked = mask.masked_fill_(hidden_BW, float("-inf"))[:, None, None]
            self._masks[window, chunk, dtype] = masked, unseen_AK
        return self._masks[window, chunk, dtype]


class Extend(Cached):
    """Several queries a row against what the row has stored and the queries' own tokens. `lengths_A` and `added_A`,
    tokens of each row before and in the pass, are on the CPU."""

    def __init__(
        self,
        cache: KVCache,
        places: Sequence[Place],
        lengths_A: Tensor,
        added_A: Tensor,
        device: torch.device,
        dtype: torch.dtype,
        recurrence: Recurrence | None = None,
    ) -> None:
        super().__init__(cache, recurrence)
        self._dtype = dtype
        table_AK, steps = table(places), torch.arange(int(added_A.max()))
        position_AT = lengths_A[:, None] + steps
        self._time = int((lengths_A + added_A).max())
        row, step = (steps < added_A[:, None]).nonzero(as_tuple=True)
        position = position_AT[row, step]
        self._table_AK, self._position_AT = to_device(table_AK, device), to_device(position_AT, device)
        places_4R = torch.stack([row, step, table_AK[row, position // BLOCK], position % BLOCK])
        self._row, self._step, self._block, self._offset = to_device(places_4R, device)
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: ScoreForm) -> Tensor:
        """Implements `AttentionPlan.attend`."""
        keys, values = self._stored(key, value)
        keys[self._block, :, self._offset] = key[self._row, :, self._step]
        values[self._block, :, self._offset] = value[self._row, :, self._step]
        joined = (part[self._table_AK].transpose(1, 2).flatten(2, 3)[:, :, : self._time] for part in (keys, values))
        sinks = None if form.sinks_H is None else form.sinks_H[:, None].expand(-1, query.shape[2])
        mask = self._mask(form.window, form.chunk)
        out = dense(query, *joined, mask=mask, scaling=form.scaling, sinks=sinks, cap=form.cap)
        return out.transpose(1, 2)

    def _mask(self, window: int | None, chunk: int | None) -> Tensor:
        """Returns the additive mask [A, 1, T, time]."""
        if (window, chunk) not in self._masks:
            k = torch.arange(self._time, device=self._position_AT.device)
            hidden = _hidden(k, self._position_AT[:, :, None], window, chunk)
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
            self._masks[window, chunk] = mask.masked_fill_(hidden, float("-inf"))[:, None]
        return self._masks[window, chunk]


def _hidden(keys: Tensor, queries: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """Returns whether a query does not see a key, by their places in a sequence, which broadcast: it comes later, or is
    not among the last `window`, or not in the query's chunk."""
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    if chunk is not None:
        hidden |= keys < queries // chunk * chunk
    return hidden
