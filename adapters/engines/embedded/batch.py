"""The rows that the embedded engine samples together: which of those that wait fit, their prompts, their next tokens.

A row begins as soon as the cache has room for the longest reply that it may get, so that no batch runs out of memory,
and leaves as soon as it is done. Rows with equal prompts are prefilled once, and one that continues a kept sequence
computes its new tokens only.
Does not own: when there is a step, and who waits for replies (`engine.py`).
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from attrs import define, field

from rollgrad.adapters.engines.embedded.decoding import Decoder
from rollgrad.adapters.engines.embedded.kept import KEPT_BYTES, KeptSequences
from rollgrad.adapters.engines.embedded.kv_cache import BLOCK, StoredKeys, blocks_of
from rollgrad.adapters.engines.embedded.recomputing import RecomputingDecoder
from rollgrad.adapters.engines.embedded.rows import PromptKey, Row
from rollgrad.adapters.engines.embedded.sampler import forbid, read, sample, top_logprobs
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.application.settings.memory_plan_passes import PREFILL_TOKENS
from rollgrad.domain.control.request_flow import RequestFlow
from rollgrad.domain.episodes.generation import SamplingParams, StopReason

STOP_STRING_WINDOW = 64
"""Latest tokens decoded when looking for a stop string; a stop string must fit in them."""


@define
class _PromptPass:
    """The prompts that are computed together. They have at most `PREFILL_TOKENS` tokens, unless there is one row."""

    fresh: dict[PromptKey, list[Row]] = field(factory=dict)
    """Rows of which nothing is stored, by their prompt: an equal prompt is computed once."""
    continued: list[tuple[Row, StoredKeys]] = field(factory=list)
    """Rows whose prompt begins with stored tokens."""
    count: int = 0
    """Number of rows."""
    fresh_tokens: int = 0
    """Tokens of the fresh prompts."""
    widest: int = 0
    """Most new tokens of a continued row; the others are padded to as many."""

    def add(self, row: Row, stored: StoredKeys | None) -> bool:
        """Adds a row if there is room for it, and returns whether there was."""
        fresh_tokens, widest, continued = self.fresh_tokens, self.widest, len(self.continued)
        length = len(row.request.prompt_token_ids)
        if stored is not None:
            widest, continued = max(widest, length - stored.length), continued + 1
        elif row.prompt not in self.fresh:
            fresh_tokens += length
        if self.count and fresh_tokens + widest * continued > PREFILL_TOKENS:
            return False
        self.fresh_tokens, self.widest, self.count = fresh_tokens, widest, self.count + 1
        if stored is None:
            self.fresh.setdefault(row.prompt, []).append(row)
        else:
            self.continued.append((row, stored))
        return True


class Batch:
    """Rows that are sampled together, and the rows that wait to be; one thread at a time calls it.

    Args:
        decoder: runs the model.
        flow: says whether waiting rows may begin.
        eos: tokens that end every reply.
        max_rows: rows sampled together at most.
        max_tokens: tokens of a prompt and its reply at most; None for no limit.
        decode: token ids to text; needed for stop strings only.
        memory_share: share of the device's free memory that keys and values may take, from the first row after the
            batch was made, or released, until it is released.
    """

    def __init__(
        self,
        decoder: Decoder | RecomputingDecoder,
        flow: RequestFlow,
        *,
        eos: frozenset[int],
        max_rows: int,
        max_tokens: int | None,
        decode: Callable[[Sequence[int]], str] | None,
        memory_share: float,
    ) -> None:
        self.waiting: deque[Row] = deque()
        self.rows: list[Row] = []
        """Rows that have begun and are not done."""
        self.version = 0
        """Policy version of the tokens sampled from now on."""
        self.decoder = decoder
        self._kept = KeptSequences(KEPT_BYTES)
        self._flow = flow
        self._eos = eos
        self._max_rows = self._most_rows = max_rows
        self._max_tokens = max_tokens
        self._decode = decode
        self._memory_share = memory_share
        self.block_bytes = BLOCK * decoder.token_bytes

    def new_weights(self, version: int) -> None:
        """Sets the version; what was computed with other weights is forgotten."""
        self.version = version
        self._kept.clear()

    def abort(self) -> list[Row]:
        """Ends the rows that the flow has aborted, waiting ones too, and returns them."""
        ended = [row for row in (*self.rows, *self.waiting) if self._flow.aborted(row.arrived)]
        self.rows.clear()  # nothing begins between an abort and `resume`
        self.decoder.cache.clear()
        self.waiting = deque(row for row in self.waiting if not self._flow.aborted(row.arrived))
        return ended

    def release(self) -> None:
        """Gives all memory back, and with it the rows that have begun."""
        self.rows.clear()
        self.waiting = deque(row for row in self.waiting if not row.future.done())
        self.decoder.release()
        self._kept.clear()

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Admits waiting requests that fit, then appends one token to every active row; returns the finished rows."""
        self._drop_unheard()
        finished = self._admit()
        if self.rows:
            for row in self.rows:
                self.decoder.cache.reserve(row.place, row.length + 1)
            tokens, lengths = [row.tokens[-1] for row in self.rows], [row.length for row in self.rows]
            shifts = [row.shift for row in self.rows]
            logits = self.decoder.step(tokens, [row.place for row in self.rows], lengths, shifts)
            self._note_experts([[row] for row in self.rows])
            finished += self._append(self.rows, logits)
        return finished

    def _drop_unheard(self) -> None:
        """Ends rows that nobody waits for, because the request was cancelled or its `on_token` failed."""
        for row in self.rows:
            if row.future.done():
                row.stop_reason = StopReason.ABORTED
        self._remove_finished()

    def _set_capacity(self) -> None:
        """Sets how many blocks the cache may have, by the memory that is free now; while it holds blocks, nothing
        changes."""
        cache = self.decoder.cache
        if cache.nbytes:
            return
        room, state_bytes = int(self._memory_share * self.decoder.free_memory()), self.decoder.sequence_bytes
        # At most half of the room is for the states of sequences; keys and values have the rest.
        self._most_rows = max(1, min(self._max_rows, room // (2 * state_bytes))) if state_bytes else self._max_rows
        cache.capacity = max(0, room - self._most_rows * state_bytes) // max(1, self.block_bytes)
        if self._max_tokens is not None:
            cache.capacity = min(cache.capacity, self._max_rows * blocks_of(self._max_tokens))

    def _admit(self) -> list[Row]:
        """Begins the waiting requests that fit: computes their prompts and samples their first tokens. Returns the rows
        that are done, those among them that are too long for the cache."""
        refused: list[Row] = []
        begun = _PromptPass()
        if self.waiting:
            self._set_capacity()
        capacity = self.decoder.cache.capacity
        blocks = sum(row.blocks for row in self.rows)
        while self.waiting and self._flow.may_begin and len(self.rows) + begun.count < self._most_rows:
            row = self.waiting[0]
            if row.future.cancelled():
                self.waiting.popleft()
            elif row.blocks > capacity:
                row.refusal = row.too_long(capacity, self.block_bytes)
                refused.append(self.waiting.popleft())
            elif blocks + row.blocks <= capacity and self._added(row, begun):
                self.waiting.popleft()
                self._flow.begin(row.arrived)
                blocks += row.blocks
            else:
                break
        finished = self._prefill(begun.fresh) if begun.fresh else []
        return refused + finished + (self._continue(begun.continued) if begun.continued else [])

    def _added(self, row: Row, begun: _PromptPass) -> bool:
        """Adds a row to a pass over prompts, with what is stored of its tokens; returns whether it had room."""
        known = row.prompt in begun.fresh
        ids = row.request.prompt_token_ids
        stored = None if known or row.request.images else self._kept.take(ids)  # tokens do not tell images apart
        if begun.add(row, stored):
            return True
        if stored is not None:
            self._kept.keep(ids[: stored.length], stored)
        return False

    def _prefill(self, prompts: dict[PromptKey, list[Row]]) -> list[Row]:
        members = [row for rows in prompts.values() for row in rows]
        for prompt, rows in prompts.items():
            shift = self.decoder.shift(*prompt)
            for row in rows:
                self.decoder.cache.reserve(row.place, len(row.request.prompt_token_ids))
                row.shift = shift
        ids, images = zip(*prompts, strict=True)
        logits = self.decoder.prefill(ids, [[row.place for row in rows] for rows in prompts.values()], images)
        self._note_experts([*prompts.values()])
        prompt_A = [index for index, rows in enumerate(prompts.values()) for _ in rows]
        self.rows.extend(members)
        return self._append(members, logits.index_select(0, to_device(torch.tensor(prompt_A), logits.device)))

    def _continue(self, continued: Sequence[tuple[Row, StoredKeys]]) -> list[Row]:
        """Continues sequences whose beginning is stored."""
        rows, lengths = [row for row, _ in continued], [stored.length for _, stored in continued]
        for row, stored in continued:
            row.kept = stored.length
            self.decoder.cache.reserve(row.place, len(row.request.prompt_token_ids))
            self.decoder.cache.copy_in(row.place, stored)
        suffixes = [row.request.prompt_token_ids[stored.length :] for row, stored in continued]
        logits = self.decoder.extend(suffixes, [row.place for row in rows], lengths)
        self._note_experts([[row] for row in rows])
        self.rows.extend(rows)
        return self._append(rows, logits)

    def _note_experts(self, sequences: Sequence[Sequence[Row]]) -> None:
        """Gives the rows of each sequence of the last pass the experts of its tokens, where they are recorded."""
        for rows, experts_RLK in zip(sequences, self.decoder.routed, strict=False):
            for row in rows:
                row.experts.append(experts_RLK)

    def _append(self, rows: Sequence[Row], logits_AV: torch.Tensor) -> list[Row]:
        """Samples a token for each of `rows`; removes and returns those that are done."""
        forbid(logits_AV, [row.too_early(self._eos) for row in rows])
        for index, row in enumerate(rows):
            row.restrict(logits_AV[index])
        params: list[SamplingParams] = [row.request.params for row in rows]
        uniforms = torch.stack([row.uniforms[len(row.tokens)] for row in rows])
        tokens, logprobs = read(*sample(logits_AV, params, uniforms))
        for index, best in top_logprobs(logits_AV, [p.top_logprobs for p in params]).items():
            rows[index].top_logprobs.append(best)
        finished = []
        for row, token, logprob in zip(rows, map(int, tokens), logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self.version)
            if row.matcher is not None:
                row.matcher.advance(token)
            row.stop_reason = StopReason.ABORTED if row.refusal is not None else self._stop_reason(row)
            if row.stop_reason is not None:
                finished.append(row)
        self._remove_finished()
        return finished

    def _stop_reason(self, row: Row) -> StopReason | None:
        params = row.request.params
        if row.tokens[-1] in self._eos or row.tokens[-1] in params.stop_token_ids:
            return StopReason.STOP
        if params.stop_strings and self._decode is not None:
            begun = row.request.prompt_token_ids[-row.request.begun :] if row.request.begun else ()
            text = self._decode([*begun, *row.tokens][-STOP_STRING_WINDOW:])
            if any(stop in text for stop in params.stop_strings):
                return StopReason.STOP
        return StopReason.LENGTH if len(row.tokens) >= params.max_new_tokens else None

    def _remove_finished(self) -> None:
        """Gives back the room of finished rows; keys and values that a later request may continue are kept."""
        finished = [row for row in self.rows if row.stop_reason is not None]
        if not finished:
            return
        cache = self.decoder.cache
        for row in finished:
            if row.request.keep and not row.request.images and not row.future.done():
                self._kept.keep(row.stored_tokens, cache.copy_out(row.place, row.length))
        cache.free([row.place for row in finished])
        self.rows = [row for row in self.rows if row.stop_reason is None]
