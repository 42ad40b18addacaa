"""The embedded rollout engine: continuous batching over a transformers model in this process.

Requests wait in order; those with equal prompts are prefilled once, and one that continues a kept sequence computes its
new tokens only; a finished row leaves the batch at once and a
waiting request takes its place. The model may be the trainer's own module: weights are then shared, and a new
version is a number (`set_version`). All torch work happens in one worker thread, so the event loop stays free.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from attrs import define, field

from rollgrad.adapters.engines.embedded.decoding import Decoder
from rollgrad.adapters.engines.embedded.kv_cache import KeptSequences, StoredKeys
from rollgrad.adapters.engines.embedded.sampler import sample
from rollgrad.adapters.models.torch.compatibility import usable_positions
from rollgrad.application.foreign import foreign_code, harmless, told
from rollgrad.domain.control.request_flow import SAMPLING, ArrivedRequest, RequestFlow
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.errors import ConfigurationError, EngineError, RollgradError
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine

PREFILL_TOKENS = 8192
"""Prompt tokens prefilled in one pass, at most (a longer prompt goes alone): bounds the memory of activations."""

KEPT_BYTES = 2 * 2**30
"""Memory for keys and values of turns that a later turn may continue; 90 episodes of 500 tokens on SmolLM2-135M in
float32."""

STOP_STRING_WINDOW = 64
"""Latest tokens decoded when looking for a stop string; a stop string must fit in them."""


@define(eq=False)
class _Row:
    """A sequence in flight."""

    request: GenerationRequest
    future: "asyncio.Future[Generation]"
    on_token: Callable[[int], None] | None = None
    arrived: ArrivedRequest = field(init=False)
    heard: int = 0
    """Number of tokens for which `on_token` has been called."""
    tokens: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    versions: list[int] = field(factory=list)
    stop_reason: StopReason | None = None
    uniforms: torch.Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        begun, rest = self.request.begun, self.request.params.max_new_tokens
        generator = torch.Generator().manual_seed(self.request.params.seed)
        self.uniforms = torch.rand(begun + rest, dtype=torch.float64, generator=generator)[begun:]

    @property
    def length(self) -> int:
        """Tokens whose keys are stored before the next step: all but the latest sampled one."""
        return len(self.request.prompt_token_ids) + len(self.tokens) - 1

    @property
    def stored_tokens(self) -> tuple[int, ...]:
        """The tokens whose keys are stored."""
        return (*self.request.prompt_token_ids, *self.tokens[:-1])

    def tell(self) -> None:
        """Calls `on_token` for new tokens."""
        if self.on_token is None or self.future.done():
            return
        try:
            while self.heard < len(self.tokens):
                self.heard += 1
                self.on_token(self.tokens[self.heard - 1])
        except BaseException as error:  # an error of one caller's `on_token` must not stop other replies
            self.on_token = None
            self.future.set_exception(harmless(error))

    def generation(self) -> Generation:
        """Returns the generation for the caller."""
        reason = self.stop_reason or StopReason.ABORTED
        return Generation(token_ids=self.tokens, logprobs=self.logprobs, versions=self.versions, stop_reason=reason)


class EmbeddedEngine(RolloutEngine):
    """A `RolloutEngine` in this process.

    Args:
        model: causal language model with packed attention installed, which `check_decoding` accepts.
        eos_token_ids: tokens that end every reply.
        max_batch_size: sequences decoded together.
        decode: token ids to text; needed for stop strings only.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_token_ids: Sequence[int],
        max_batch_size: int = 128,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._decoder = Decoder(model)
        self._parameters = dict(model.named_parameters())
        self._eos = frozenset(eos_token_ids)
        self._max_batch_size = max_batch_size
        self._decode = decode
        self.max_tokens: int | None = usable_positions(model.config)
        """Tokens of a prompt and its reply at most; None if the model does not say."""
        self._unanswered: set[_Row] = set()
        """Rows whose callers wait, in whatever state; a failure is reported to all of them."""
        self._waiting: deque[_Row] = deque()
        self._active: list[_Row] = []
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
        """Copies parameters, by name, into the model, which must not be the one that they come from; tokens sampled
        from then on carry `version`. Returns the bytes copied.

        Raises:
            EngineError: requests are in flight and generation is not paused; or a name or shape is none of the model's.
        """
        self._require_change_of_weights()
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._load, weights, version)

    @torch.no_grad()
    def _load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        copied = 0
        for name, tensor in weights:
            target = self._parameters.get(name)
            if target is None or target.shape != tensor.shape:
                found = "no such parameter" if target is None else f"the shape {tuple(target.shape)}"
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
        self._check(request)
        row = _Row(request, asyncio.get_running_loop().create_future(), on_token)
        row.arrived = self._flow.arrive()
        try:
            self._unanswered.add(row)
            self._waiting.append(row)
            self._start()
            return await row.future
        finally:
            self._unanswered.discard(row)
            self._flow.end(row.arrived)

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
        self._decoder.cache.release()
        self._kept.clear()

    async def wake(self) -> None:
        """Implements `RolloutEngine.wake`; the cache grows back with the next request."""
        self._flow.wake()
        self._start()

    def _check(self, request: GenerationRequest) -> None:
        total = len(request.prompt_token_ids) + request.params.max_new_tokens
        if not request.prompt_token_ids:
            raise EngineError("The request has no prompt tokens: generation starts from at least one.")
        if self.max_tokens is not None and total > self.max_tokens:
            raise ConfigurationError(
                f"A prompt of {len(request.prompt_token_ids)} tokens plus {request.params.max_new_tokens} new ones is "
                f"{total} tokens, but the model has {self.max_tokens} positions: shorten the prompt, or lower "
                "--rollout.max_new_tokens."
            )
        if request.params.stop_strings and self._decode is None:
            raise EngineError("Stop strings need a tokenizer: build the engine with `decode`.")

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

    def _resolve(self, rows: Sequence[_Row]) -> None:
        for row in rows:
            self._flow.end(row.arrived)
            if not row.future.done():
                row.future.set_result(row.generation())

    def _fail(self, error: BaseException) -> None:
        """Fails every request in flight; the engine is empty afterwards."""
        self._active.clear()
        self._waiting.clear()
        self._kept.clear()  # the step may have failed in the middle of a copy
        for row in self._unanswered:
            if not row.future.done():
                failure = EngineError(f"Generation failed: {told(error)}")
                failure.__cause__ = error
                row.future.set_exception(error if isinstance(error, RollgradError) else failure)

    def _safe_step(self) -> list[_Row]:
        """Runs `_step`; a StopIteration, which a future does not accept, becomes another error."""
        with foreign_code(lambda words: EngineError(f"Generation failed: {words}")):
            return self._step()

    @torch.inference_mode()
    def _step(self) -> list[_Row]:
        """Admits waiting requests that fit, then appends one token to every active row; returns the finished rows."""
        self._drop_cancelled()
        finished = self._admit()
        if self._active:
            self._decoder.cache.reserve(len(self._active), max(row.length for row in self._active) + 1)
            logits = self._decoder.step([row.tokens[-1] for row in self._active], [r.length for r in self._active])
            finished += self._append(self._active, logits)
        return finished

    def _drop_cancelled(self) -> None:
        for row in self._active:
            if row.future.cancelled():
                row.stop_reason = StopReason.ABORTED
        self._remove_finished()

    def _admit(self) -> list[_Row]:
        """Computes the prompts of waiting requests into free rows and samples their first token."""
        prompts: dict[tuple[int, ...], list[_Row]] = {}
        continued: list[tuple[_Row, StoredKeys]] = []
        tokens = taken = 0
        while self._waiting and self._flow.may_begin and len(self._active) + taken < self._max_batch_size:
            row = self._waiting[0]
            if row.future.cancelled():
                self._waiting.popleft()
                continue
            ids = row.request.prompt_token_ids
            stored = self._kept.take(ids) if ids not in prompts else None
            new = 0 if ids in prompts else len(ids) - (0 if stored is None else stored.length)
            if taken and tokens + new > PREFILL_TOKENS:
                if stored is not None:
                    self._kept.keep(ids[: stored.length], stored)
                break
            self._waiting.popleft()
            self._flow.begin(row.arrived)
            tokens, taken = tokens + new, taken + 1
            if stored is None:
                prompts.setdefault(ids, []).append(row)
            else:
                continued.append((row, stored))
        finished = self._prefill(prompts) if prompts else []
        return finished + (self._continue(continued) if continued else [])

    def _prefill(self, prompts: dict[tuple[int, ...], list[_Row]]) -> list[_Row]:
        members = [row for rows in prompts.values() for row in rows]
        first = len(self._active)
        slots = {id(row): first + offset for offset, row in enumerate(members)}
        self._decoder.cache.reserve(first + len(members), max(len(ids) for ids in prompts) + 1)
        logits = self._decoder.prefill(list(prompts), [[slots[id(r)] for r in rows] for rows in prompts.values()])
        repeats = torch.tensor([len(rows) for rows in prompts.values()], device=logits.device)
        self._active.extend(members)
        return self._append(members, logits.repeat_interleave(repeats, dim=0))

    def _continue(self, continued: Sequence[tuple[_Row, StoredKeys]]) -> list[_Row]:
        """Continues sequences whose beginning is stored."""
        first, rows = len(self._active), [row for row, _ in continued]
        prompts = [row.request.prompt_token_ids for row in rows]
        lengths = [stored.length for _, stored in continued]
        self._decoder.cache.reserve(first + len(rows), max(len(ids) for ids in prompts) + 1)
        for offset, (_, stored) in enumerate(continued):
            self._decoder.cache.copy_in(first + offset, stored)
        suffixes = [ids[length:] for ids, length in zip(prompts, lengths, strict=True)]
        logits = self._decoder.extend(suffixes, first, lengths)
        self._active.extend(rows)
        return self._append(rows, logits)

    def _append(self, rows: Sequence[_Row], logits_AV: torch.Tensor) -> list[_Row]:
        """Samples a token for each of `rows`; removes and returns those that are done."""
        for index, row in enumerate(rows):
            if len(row.tokens) < row.request.params.min_new_tokens:
                logits_AV[index, sorted(self._eos.union(row.request.params.stop_token_ids))] = float("-inf")
        params: list[SamplingParams] = [row.request.params for row in rows]
        uniforms = torch.stack([row.uniforms[len(row.tokens)] for row in rows])
        tokens, logprobs = sample(logits_AV, params, uniforms)
        finished = []
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self._version)
            row.stop_reason = self._stop_reason(row)
            if row.stop_reason is not None:
                finished.append(row)
        if finished:
            self._remove_finished()
        return finished

    def _stop_reason(self, row: _Row) -> StopReason | None:
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
        """Fills the places of finished rows with the last active ones, so that active rows stay contiguous.

        For example, of rows [a, b, c, d] a and c finish: 2 rows stay, b at its place, and d is copied to row 0.
        """
        sources, targets = [], []
        remaining = len(self._active)
        for index, row in enumerate(self._active):
            if row.stop_reason is not None and row.request.keep and not row.future.cancelled():
                self._kept.keep(row.stored_tokens, self._decoder.cache.copy_out(index, row.length))
        for index in range(len(self._active)):
            if index >= remaining:
                break
            if self._active[index].stop_reason is None:
                continue
            while remaining - 1 > index and self._active[remaining - 1].stop_reason is not None:
                remaining -= 1
            remaining -= 1
            if remaining > index:
                self._active[index] = self._active[remaining]
                sources.append(remaining)
                targets.append(index)
        del self._active[remaining:]
        self._decoder.cache.move(sources, targets)
