"""The embedded rollout engine: continuous batching over a transformers model in this process.

Requests wait in order, and a finished one makes room for the next at once (`batch.py`). The model may be the trainer's
own module: weights are then shared, and a new version is a number (`set_version`). All torch work happens in one worker
thread, so the event loop stays free.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rollgrad.adapters.engines.embedded.batch import Batch
from rollgrad.adapters.engines.embedded.decoding import decoder_of
from rollgrad.adapters.engines.embedded.grammars import Grammars, Matcher
from rollgrad.adapters.engines.embedded.rows import Row, check_request
from rollgrad.adapters.models.torch.experts.router_replay import RouterReplay
from rollgrad.adapters.models.torch.loading.compatibility import usable_positions
from rollgrad.adapters.models.torch.loading.lora import plain_buffers
from rollgrad.adapters.models.torch.sent_names import sent_name
from rollgrad.application.foreign import error_text, foreign_code
from rollgrad.domain.control.request_flow import SAMPLING, RequestFlow
from rollgrad.domain.episodes.generation import Generation, GenerationRequest
from rollgrad.domain.errors import EngineError, RollgradError
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine


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
        replay: router replay of the model; with it generations say which experts their tokens went to.

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
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        own, sent = {**dict(model.named_parameters()), **plain_buffers(model)}, sent_name(model)
        self._weights = own | {sent(name): tensor for name, tensor in own.items()}
        self._has_text = decode is not None
        self._grammars = grammars
        self.max_tokens: int | None = usable_positions(model.config)
        """Tokens of a prompt and its reply at most; None if the model does not say."""
        self._unanswered: set[Row] = set()
        """Rows whose callers wait, in whatever state; a failure is reported to all of them."""
        self._flow = RequestFlow()
        self._batch = Batch(
            decoder_of(model, replay),
            self._flow,
            eos=frozenset(eos_token_ids),
            max_rows=max_batch_size,
            max_tokens=self.max_tokens,
            decode=decode,
            memory_share=memory_share,
        )
        self._loop_task: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="embedded-engine")

    @property
    def version(self) -> int:
        """Policy version of the tokens sampled from now on."""
        return self._batch.version

    def set_version(self, version: int) -> None:
        """Records that the shared weights have changed.

        Raises:
            EngineError: requests are in flight and generation is not paused.
        """
        self._require_change_of_weights()
        self._batch.new_weights(version)

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
        self._batch.new_weights(version)
        return copied

    def _require_change_of_weights(self) -> None:
        if self._batch.waiting and self._flow.may_begin:  # they may begin at any moment, in the worker thread
            raise EngineError(SAMPLING)
        self._flow.require_change_of_weights()

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        """Implements `RolloutEngine.generate`."""
        check_request(request, self.max_tokens, self._vocabulary)
        if request.params.stop_strings and not self._has_text:
            raise EngineError("Stop strings need a tokenizer: build the engine with `decode`.")
        row = Row(request, asyncio.get_running_loop().create_future(), on_token, await self._matcher(request))
        row.arrived = self._flow.arrive()
        try:
            self._unanswered.add(row)
            self._batch.waiting.append(row)
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
        while flow.draining and self._batch.rows:
            self._start()  # requests that an earlier pause froze finish too
            await self._loop_ended()
        flow.drained()
        await self._loop_ended()
        if mode is PauseMode.ABORT:
            self._resolve(self._batch.abort())

    async def resume(self) -> None:
        """Implements `RolloutEngine.resume`."""
        self._flow.resume()
        self._start()

    async def sleep(self) -> None:
        """Implements `RolloutEngine.sleep`."""
        self._flow.sleep()
        await self._loop_ended()
        self._batch.release()  # also of cancelled requests that a pause left behind

    async def wake(self) -> None:
        """Implements `RolloutEngine.wake`; the cache grows back with the next request."""
        self._flow.wake()
        self._start()

    @property
    def _busy(self) -> bool:
        """Whether there is a token to sample now."""
        flow = self._flow
        return not (flow.paused or flow.asleep) and bool(self._batch.rows or (self._batch.waiting and flow.may_begin))

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
                for row in (*self._batch.rows, *finished):
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
        self._batch.waiting.clear()
        self._batch.release()  # it may be what the memory was too little for; the step may have failed in a copy
        for row in self._unanswered:
            if not row.future.done():
                failure = EngineError(f"Generation failed: {error_text(error)}")
                failure.__cause__ = error
                row.future.set_exception(error if isinstance(error, RollgradError) else failure)

    def _safe_step(self) -> list[Row]:
        """Takes a step; a StopIteration, which a future does not accept, becomes another error."""
        with foreign_code(lambda words: EngineError(f"Generation failed: {words}")):
            return self._batch.step()
