"""The embedded rollout engine: continuous batching over a transformers model in this process.

Requests wait in order; those with equal prompts are prefilled once, and one that continues a kept sequence computes its
new tokens only. A finished row leaves the batch at once, and a waiting request takes its place as soon as the cache has
room for the longest reply that it may get, so that no batch runs out of memory. The model may be the trainer's own
module: weights are then shared, and a new version is a number (`set_version`). All torch work happens in one worker
thread, so the event loop stays free.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rollgrad.adapters.engines.embedded.decoding import decoder_of
from rollgrad.adapters.engines.embedded.grammars import Grammars, Matcher
from rollgrad.adapters.engines.embedded.kept import KEPT_BYTES, KeptSequences
from rollgrad.adapters.engines.embedded.kv_cache import BLOCK, StoredKeys, blocks_of
from rollgrad.adapters.engines.embedded.rows import PromptKey, Row, check_request
from rollgrad.adapters.engines.embedded.sampler import forbid, likeliest, read, sample
from rollgrad.adapters.models.torch.compatibility import usable_positions
from rollgrad.adapters.models.torch.lora import plain_buffers
from rollgrad.adapters.models.torch.moving import to_device
from rollgrad.adapters.models.torch.router_replay import RouterReplay
from rollgrad.adapters.models.torch.sent_names import sent_name
from rollgrad.application.foreign import error_text, foreign_code
from rollgrad.domain.control.request_flow import SAMPLING, RequestFlow
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.errors import EngineError, RollgradError
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine

PREFILL_TOKENS = 8192
"""Prompt tokens, padding included, prefilled in one pass, at most (a longer prompt goes alone): bounds the memory of
activations."""

STOP_STRING_WINDOW = 64
"""Latest tokens decoded when looking for a stop string; a stop string must fit in them."""


class EmbeddedEngine(RolloutEngine):
    """A `RolloutEngine` in this process.

    Args:
        model: causal language model that `loading.py` has loaded, which `check_decoding` accepts.
        eos_token_ids: tokens that end every reply.
        max_batch_size: sequences decoded together at most.
        decode: token ids to text; needed for stop strings only.
        memory_share: share of the device's free memory that keys and values may take, from the first request after
            the engine was made, or was woken, until it is put to sleep.
        grammars: follows the grammars of requests; needed for those only.
        replay: of the model; with it generations say which experts their tokens went to.

    Raises:
        ConfigurationError: experts cannot be recorded of this model.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_token_ids: Sequence[int],
        max_batch_size: int = 128,
        decode: Callable[[Sequence[int]], str] | None = None,
        memory_share: float = 0.5,
        grammars: Grammars | None = None,
        replay: RouterReplay | None = None,
    ) -> None:
        self._decoder = decoder_of(model, replay)
        self._memory_share = memory_share
        self._block_bytes = BLOCK * self._decoder.token_bytes
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        own, sent = {**dict(model.named_parameters()), **plain_buffers(model)}, sent_name(model)
        self._weights = own | {sent(name): tensor for name, tensor in own.items()}
        self._eos = frozenset(eos_token_ids)
        self._max_batch_size = self._most_rows = max_batch_size
        self._decode = decode
        self._grammars = grammars
        self.max_tokens: int | None = usable_positions(model.config)
        """Tokens of a prompt and its reply at most; None if the model does not say."""
        self._unanswered: set[Row] = set()
        """Rows whose callers wait, in whatever state; a failure is reported to all of them."""
        self._waiting: deque[Row] = deque()
        self._active: list[Row] = []
        self._kept = KeptSequences(KEPT_BYTES)
        self._version = 0
        self._flow = RequestFlow()
        self._loop_task: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="embedded-engine")

    @property
    def version(self) -> int:
        """Policy version of the tokens sampled from now on."""
        return self._version

    def set_version(self, version: int) -> None:
        """Records that the shared weights have changed.

        Raises:
            EngineError: requests are in flight and generation is not paused.
        """
        self._require_change_of_weights()
        self._version = version
        self._kept.clear()

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        """Copies weights, by their names in the model or those under which a trainer sends them, into the model,
        which must not be the one that they come from; tokens sampled from then on carry `version`. Returns the bytes
        copied.

        Raises:
            EngineError: requests are in flight and generation is not paused; or a name or shape is none of the model's.
        """
        self._require_change_of_weights()
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._load, weights, version)

    @torch.no_grad()
    def _load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        copied = 0
        for name, tensor in weights:
            target = self._weights.get(name)
            if target is None or target.shape != tensor.shape:
                found = "no such weight" if target is None else f"the shape {tuple(target.shape)}"
                raise EngineError(f"The engine's model has {found}: {name} of shape {tuple(tensor.shape)} was sent.")
            target.copy_(tensor)
            copied += tensor.nbytes
        self._version = version
        self._kept.clear()
        return copied

    def _require_change_of_weights(self) -> None:
        if self._waiting and self._flow.may_begin:  # they may begin at any moment, in the worker thread
            raise EngineError(SAMPLING)
        self._flow.require_change_of_weights()

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        """Implements `RolloutEngine.generate`."""
        check_request(request, self.max_tokens, self._vocabulary)
        if request.params.stop_strings and self._decode is None:
            raise EngineError("Stop strings need a tokenizer: build the engine with `decode`.")
        row = Row(request, asyncio.get_running_loop().create_future(), on_token, await self._matcher(request))
        row.arrived = self._flow.arrive()
        try:
            self._unanswered.add(row)
            self._waiting.append(row)
            self._start()
            return await row.future
        finally:
            self._unanswered.discard(row)
            self._flow.end(row.arrived)

    async def _matcher(self, request: GenerationRequest) -> Matcher | None:
        if request.params.grammar is None:
            return None
        if self._grammars is None:
            raise EngineError("Grammars need a tokenizer: build the engine with `grammars`.")
        begun = request.prompt_token_ids[len(request.prompt_token_ids) - request.begun :]
        # In another thread than the model's: a large grammar takes a second to read.
        return await asyncio.to_thread(self._grammars.begin, request.params.grammar, begun)

    async def pause(self, mode: PauseMode) -> None:
        """Implements `RolloutEngine.pause`."""
        flow = self._flow
        flow.pause(mode)
        if mode is PauseMode.WAIT:
            await self._loop_ended()  # requests that the step under way begins are active only after it
            if flow.paused:
                flow.pause(mode)
        while flow.draining and self._active:
            self._start()  # requests that an earlier pause froze finish too
            await self._loop_ended()
        flow.drained()
        await self._loop_ended()
        if mode is PauseMode.ABORT:
            ended = [row for row in (*self._active, *self._waiting) if flow.aborted(row.arrived)]
            self._active.clear()  # nothing begins between an abort and `resume`
            self._decoder.cache.clear()
            self._waiting = deque(row for row in self._waiting if not flow.aborted(row.arrived))
            self._resolve(ended)

    async def resume(self) -> None:
        """Implements `RolloutEngine.resume`."""
        self._flow.resume()
        self._start()

    async def sleep(self) -> None:
        """Implements `RolloutEngine.sleep`."""
        self._flow.sleep()
        await self._loop_ended()
        self._active.clear()  # cancelled requests that a pause left behind
        self._waiting = deque(row for row in self._waiting if not row.future.done())
        self._decoder.release()
        self._kept.clear()

    async def wake(self) -> None:
        """Implements `RolloutEngine.wake`; the cache grows back with the next request."""
        self._flow.wake()
        self._start()

    @property
    def _busy(self) -> bool:
        """Whether there is a token to sample now."""
        flow = self._flow
        return not (flow.paused or flow.asleep) and bool(self._active or (self._waiting and flow.may_begin))

    def _start(self) -> None:
        if self._busy and (self._loop_task is None or self._loop_task.done()):
            self._loop_task = asyncio.get_running_loop().create_task(self._run())

    async def _loop_ended(self) -> None:
        if self._loop_task is not None:
            await asyncio.wait([self._loop_task])  # unlike awaiting the task, this never cancels it

    async def _run(self) -> None:
        """Steps until nothing is left or someone pauses."""
        loop = asyncio.get_running_loop()
        try:
            while self._busy:
                finished = await loop.run_in_executor(self._worker, self._safe_step)
                for row in (*self._active, *finished):
                    row.tell()
                self._resolve(finished)
        except asyncio.CancelledError as error:
            self._fail(error)
            raise
        except BaseException as error:  # whoever waits for a reply is told, not this task's owner
            self._fail(error)

    def _resolve(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._flow.end(row.arrived)
            row.answer()

    def _fail(self, error: BaseException) -> None:
        """Fails every request in flight; the engine is empty afterwards."""
        self._active.clear()
        self._waiting.clear()
        self._decoder.release()  # it may be what the memory was too little for
        self._kept.clear()  # the step may have failed in the middle of a copy
        for row in self._unanswered:
            if not row.future.done():
                failure = EngineError(f"Generation failed: {error_text(error)}")
                failure.__cause__ = error
                row.future.set_exception(error if isinstance(error, RollgradError) else failure)

    def _safe_step(self) -> list[Row]:
        """Runs `_step`; a StopIteration, which a future does not accept, becomes another error."""
        with foreign_code(lambda words: EngineError(f"Generation failed: {words}")):
            return self._step()

    @torch.inference_mode()
    def _step(self) -> list[Row]:
        """Admits waiting requests that fit, then appends one token to every active row; returns the finished rows."""
        self._drop_unheard()
        finished = self._admit()
        if self._active:
            for row in self._active:
                self._decoder.cache.reserve(row.place, row.length + 1)
            tokens, lengths = [row.tokens[-1] for row in self._active], [row.length for row in self._active]
            shifts = [row.shift for row in self._active]
            logits = self._decoder.step(tokens, [row.place for row in self._active], lengths, shifts)
            self._note_experts([[row] for row in self._active])
            finished += self._append(self._active, logits)
        return finished

    def _drop_unheard(self) -> None:
        """Ends rows that nobody waits for: the request was cancelled, or its `on_token` failed."""
        for row in self._active:
            if row.future.done():
                row.stop_reason = StopReason.ABORTED
        self._remove_finished()

    def _set_capacity(self) -> None:
        """Sets how many blocks the cache may have, where it holds none, by the memory that is free now."""
        cache = self._decoder.cache
        if cache.nbytes:
            return
        room, each = int(self._memory_share * self._decoder.free_memory()), self._decoder.sequence_bytes
        # States of as many sequences as half of the room is enough for; keys and values have the rest.
        self._most_rows = max(1, min(self._max_batch_size, room // (2 * each))) if each else self._max_batch_size
        cache.capacity = max(0, room - self._most_rows * each) // max(1, self._block_bytes)
        if self.max_tokens is not None:
            cache.capacity = min(cache.capacity, self._max_batch_size * blocks_of(self.max_tokens))

    def _admit(self) -> list[Row]:
        """Computes the prompts of waiting requests into the room there is and samples their first token."""
        prompts: dict[PromptKey, list[Row]] = {}
        continued: list[tuple[Row, StoredKeys]] = []
        refused: list[Row] = []
        fresh = widest = taken = 0
        if self._waiting:
            self._set_capacity()
        blocks = sum(row.blocks for row in self._active)
        while self._waiting and self._flow.may_begin and len(self._active) + taken < self._most_rows:
            row = self._waiting[0]
            if row.future.cancelled():
                self._waiting.popleft()
                continue
            if row.blocks > self._decoder.cache.capacity:
                row.refusal = row.too_long(self._decoder.cache.capacity, self._block_bytes)
                refused.append(self._waiting.popleft())
                continue
            if blocks + row.blocks > self._decoder.cache.capacity:
                break
            ids = row.request.prompt_token_ids
            known = row.prompt in prompts
            stored = None if known or row.request.images else self._kept.take(ids)  # tokens do not tell images apart
            new = 0 if known else len(ids) - (0 if stored is None else stored.length)
            # Those that continue are padded to the longest of them.
            width = widest if stored is None else max(widest, new)
            whole = fresh + new if stored is None else fresh
            if taken and whole + width * (len(continued) + (stored is not None)) > PREFILL_TOKENS:
                if stored is not None:
                    self._kept.keep(ids[: stored.length], stored)
                break
            self._waiting.popleft()
            self._flow.begin(row.arrived)
            fresh, widest, taken, blocks = whole, width, taken + 1, blocks + row.blocks
            if stored is None:
                prompts.setdefault(row.prompt, []).append(row)
            else:
                continued.append((row, stored))
        finished = self._prefill(prompts) if prompts else []
        return refused + finished + (self._continue(continued) if continued else [])

    def _prefill(self, prompts: dict[PromptKey, list[Row]]) -> list[Row]:
        members = [row for rows in prompts.values() for row in rows]
        for prompt, rows in prompts.items():
            shift = self._decoder.shift(*prompt)
            for row in rows:
                self._decoder.cache.reserve(row.place, len(row.request.prompt_token_ids))
                row.shift = shift
        ids, images = zip(*prompts, strict=True)
        logits = self._decoder.prefill(ids, [[row.place for row in rows] for rows in prompts.values()], images)
        self._note_experts([*prompts.values()])
        prompt_A = [index for index, rows in enumerate(prompts.values()) for _ in rows]
        self._active.extend(members)
        return self._append(members, logits.index_select(0, to_device(torch.tensor(prompt_A), logits.device)))

    def _continue(self, continued: Sequence[tuple[Row, StoredKeys]]) -> list[Row]:
        """Continues sequences whose beginning is stored."""
        rows, lengths = [row for row, _ in continued], [stored.length for _, stored in continued]
        for row, stored in continued:
            row.kept = stored.length
            self._decoder.cache.reserve(row.place, len(row.request.prompt_token_ids))
            self._decoder.cache.copy_in(row.place, stored)
        suffixes = [row.request.prompt_token_ids[stored.length :] for row, stored in continued]
        logits = self._decoder.extend(suffixes, [row.place for row in rows], lengths)
        self._note_experts([[row] for row in rows])
        self._active.extend(rows)
        return self._append(rows, logits)

    def _note_experts(self, sequences: Sequence[Sequence[Row]]) -> None:
        """Gives the rows of each sequence of the last pass the experts of its tokens, where they are recorded."""
        for rows, experts_RLK in zip(sequences, self._decoder.routed, strict=False):
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
        for index, best in likeliest(logits_AV, [p.top_logprobs for p in params]).items():
            rows[index].top_logprobs.append(best)
        finished = []
        for row, token, logprob in zip(rows, map(int, tokens), logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self._version)
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
        finished = [row for row in self._active if row.stop_reason is not None]
        if not finished:
            return
        cache = self._decoder.cache
        for row in finished:
            if row.request.keep and not row.request.images and not row.future.done():
                self._kept.keep(row.stored_tokens, cache.copy_out(row.place, row.length))
        cache.free([row.place for row in finished])
        self._active = [row for row in self._active if row.stop_reason is None]
