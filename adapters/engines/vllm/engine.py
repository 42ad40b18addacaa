"""vLLM as a rollout engine: tokens in, tokens out, wherever vLLM runs (`Core`).

Requests made while generation is paused wait here, not in vLLM: they can then be told from those that a pause froze.
Versions are labels that vLLM's core puts on the steps it takes; a new one is announced before anything runs under it.
"""

import asyncio
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from rollgrad.adapters.engines.vllm.async_llm import LocalCore
from rollgrad.adapters.engines.vllm.comparison import difference
from rollgrad.adapters.engines.vllm.core import LIVENESS_SECONDS, Core
from rollgrad.adapters.engines.vllm.launch import shut_down, start
from rollgrad.adapters.engines.vllm.lora import AdapterCore, lora_settings
from rollgrad.adapters.engines.vllm.profile import BEGIN, END
from rollgrad.adapters.models.torch.loading.loading import default_device, resolve_dtype
from rollgrad.adapters.weights.receiver_port import EngineModel, Probe, WeightReceiver, WeightsDifferError
from rollgrad.application.engines.changes import Changes
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.application.settings.sections.vllm import SyncBackend
from rollgrad.domain.control.request_flow import ArrivedRequest, RequestFlow
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, StopReason
from rollgrad.domain.errors import ConfigurationError, DataError, EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine


class CoreEngine(RolloutEngine, WeightReceiver):
    """A `RolloutEngine` and `WeightReceiver` over vLLM, for one event loop.

    Requests that a pause froze go on after a change of weights with the keys and values that they have, unless vLLM has
    to preempt them for lack of memory: it then computes them again. Later requests share none with them. A reply that
    another request began goes on with random numbers of its own, not with those of an uninterrupted request; a stop
    string must not begin in the part that is the prompt.

    Args:
        core: vLLM.
        eos_token_ids: tokens that end every reply.
    """

    def __init__(self, core: Core, *, eos_token_ids: Sequence[int]) -> None:
        self._core = core
        self._eos = frozenset(eos_token_ids)
        self.max_tokens: int | None = core.max_tokens
        """Tokens of a prompt and its reply at most; None if vLLM does not say."""
        self._ids = itertools.count()
        self._version = 0
        self._announced: int | None = None
        self._flow = RequestFlow()
        self._changes = Changes()
        self._without_cache = False
        """Whether the memory of keys and values is still asleep while the weights are awake."""
        self._changing = asyncio.Lock()
        self._taking = False
        """Whether a transfer of weights has begun; it holds `_changing`."""
        self._unproved = False
        """Whether it lacks nothing but the comparison."""
        self._broken: str | None = None
        """Reason why every request fails: the weights are those of no policy. None if they are whole."""
        self._probe: Probe | None = None
        """Comparison that is still to be made when frozen requests go on."""

    @property
    def core(self) -> Core:
        """The vLLM that samples."""
        return self._core

    @property
    def version(self) -> int:
        """Policy version of the tokens sampled from now on."""
        return self._version

    def set_version(self, version: int) -> None:
        """Records that the weights have changed.

        Raises:
            EngineError: requests are in flight and generation is not paused.
        """
        self._flow.require_change_of_weights()
        self._version = version

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        """Implements `RolloutEngine.generate`."""
        self._check(request)
        flow = self._flow
        arrived = flow.arrive(self._name())
        try:
            await self._changes.until(lambda: flow.aborted(arrived) or (flow.may_begin and not self._changing.locked()))
            if flow.aborted(arrived):
                return Generation(token_ids=[], logprobs=[], versions=[], stop_reason=StopReason.ABORTED)
            flow.begin(arrived)
            await self._wake_cache()
            await self._announce()
            if self._broken is not None:
                raise EngineError(self._broken)
            return await self._core.sample(arrived.name, request, self._eos, on_token)
        finally:
            flow.end(arrived)
            self._changes.tell()

    async def pause(self, mode: PauseMode) -> None:
        """Implements `RolloutEngine.pause`."""
        flow = self._flow
        frozen = flow.paused
        flow.pause(mode)
        self._changes.tell()
        if mode is PauseMode.ABORT:
            await self._end(flow.begun)
        elif flow.draining:
            if frozen:
                await self._continue_frozen()
            await self._changes.until(lambda: not (flow.draining and flow.has_begun))  # each fails if vLLM dies
            flow.drained()
        if flow.paused and not flow.asleep:
            await self._core.freeze()

    async def resume(self) -> None:
        """Implements `RolloutEngine.resume`."""
        self._flow.resume()
        if not self._flow.asleep:
            await self._continue_frozen()

    async def sleep(self) -> None:
        """Implements `RolloutEngine.sleep`."""
        self._flow.require_no_requests()  # before it waits for a transfer of weights
        async with self._changing:
            asleep = self._flow.asleep
            self._flow.sleep()
            if not asleep:
                await self._wake_cache()
                await self._core.sleep()

    async def wake(self) -> None:
        """Implements `RolloutEngine.wake`. Keys and values get their memory back when the engine has taken weights or
        gets a request; until then a transfer may use it."""
        if not self._flow.asleep:
            return
        await self._core.wake("weights")
        if not self._core.keeps_weights:
            self._broken = "vLLM gave its weights up when it went to sleep: push them again."
        self._flow.wake()
        self._without_cache = True
        self._changes.tell()

    async def _wake_cache(self) -> None:
        """Allocates the memory of keys and values, after which vLLM schedules again by itself."""
        if self._without_cache:
            self._without_cache = False
            await self._core.wake("kv_cache")
            if self._flow.paused:
                await self._core.freeze()

    async def ping(self) -> None:
        """Returns normally if vLLM answers.

        Raises:
            EngineError: it does not.
        """
        await self._core.ping()

    @property
    def broken(self) -> str | None:
        """Reason why every request fails until a transfer of weights succeeds; None if the weights are whole."""
        return self._broken

    async def check(self) -> None:
        """Returns normally if requests can be served.

        Raises:
            EngineError: vLLM does not answer, or its weights are those of no policy.
        """
        if self._broken is not None:
            raise EngineError(self._broken)
        await self.ping()

    async def begin_weights(self, info: Mapping[str, Any] | None) -> EngineModel:
        """Implements `WeightReceiver.begin_weights`."""
        if self._unproved:  # whoever sent the last weights has ended before it asked for the comparison
            self._end_transfer()
        await self._changing.acquire()
        self._taking = True
        try:
            self.set_version(self._version)
        except EngineError:
            self._end_transfer()
            raise
        self._probe = None
        try:
            await self._core.begin_update(info)
        except BaseException:
            self._broken = "A transfer of weights to vLLM did not begin: push again."
            self._end_transfer()
            raise
        return self._core.model

    async def take_weights(self, update: Mapping[str, Any]) -> None:
        """Implements `WeightReceiver.take_weights`."""
        await self._core.take_update(update)

    async def finish_weights(self, version: int) -> None:
        """Implements `WeightReceiver.finish_weights`."""
        await self._core.finish_update()
        await self._wake_cache()
        if self._flow.has_begun:  # frozen by a pause that keeps their keys and values
            self._core.set_apart()
        else:
            await self._core.forget()
        self._broken, self._unproved = None, True
        self.set_version(version)

    async def prove_weights(self, probe: Probe) -> None:
        """Implements `WeightReceiver.prove_weights`."""
        self._unproved = False
        try:
            if self._flow.has_begun:
                self._probe = probe
                return
            await self._announce()
            if self._flow.paused:
                await self._core.thaw()
            await self._compare(probe)
            if self._flow.paused:
                await self._core.freeze()
        finally:
            self._end_transfer()

    async def abandon_weights(self, reason: str) -> None:
        """Implements `WeightReceiver.abandon_weights`."""
        if not self._taking:
            return
        self._broken = reason
        try:
            with suppress(EngineError):
                await self._core.finish_update()  # vLLM refuses the next one otherwise
        finally:
            self._end_transfer()

    def _forget_state(self) -> None:
        """Resets the state after a restart of vLLM, when nothing is in flight."""
        self._flow.restarted()
        self._without_cache = False
        self._announced = self._probe = None
        self._changes.tell()

    def _end_transfer(self) -> None:
        self._unproved = False
        if self._taking:
            self._taking = False
            self._changing.release()
            self._changes.tell()

    async def _compare(self, probe: Probe) -> None:
        if self._broken is not None:
            raise EngineError(self._broken)
        self._broken = await difference(self._core, probe, self._name)
        if self._broken is not None:
            raise WeightsDifferError(self._broken)

    def _name(self) -> str:
        """Returns the name of a new request."""
        return f"rollgrad-{next(self._ids)}"

    def _check(self, request: GenerationRequest) -> None:
        total = len(request.prompt_token_ids) + request.params.max_new_tokens
        if not request.prompt_token_ids:
            raise EngineError("The request has no prompt tokens: generation starts from at least one.")
        if self.max_tokens is not None and total > self.max_tokens:
            raise ConfigurationError(
                f"A prompt of {len(request.prompt_token_ids)} tokens plus {request.params.max_new_tokens} new ones is "
                f"{total} tokens, but the engine holds {self.max_tokens}: shorten the prompt, lower "
                "--rollout.max_new_tokens, or let vLLM hold more (--vllm.max_model_len)."
            )
        largest, last = max(request.params.stop_token_ids, default=0), self._core.model.vocabulary - 1
        if largest > last:  # vLLM would end, with all requests
            raise DataError(f"The request has the token id {largest}, but those of the model end at {last}.")

    async def _announce(self) -> None:
        if self._announced != self._version:
            version = self._version
            await self._core.announce(version)
            self._announced = version

    async def _end(self, requests: Sequence[ArrivedRequest]) -> None:
        """Ends requests that have begun, as they are."""
        loop = asyncio.get_running_loop()
        while left := [request.name for request in requests if self._flow.holds(request)]:
            await self._core.abort(left)  # one that is only now on its way to vLLM is caught by the next round
            await self._changes.until(
                lambda: not any(map(self._flow.holds, requests)), at=loop.time() + LIVENESS_SECONDS
            )

    async def _continue_frozen(self) -> None:
        async with self._changing:
            if self._broken is not None:
                await self._end(
                    self._flow.begun
                )  # what a pause froze ends as it was: it must not go on with half a model
            await self._wake_cache()
            await self._announce()
            await self._core.thaw()
        self._changes.tell()
        probe, self._probe = self._probe, None
        if probe is not None:
            await self._compare(probe)


class VLLMEngine(CoreEngine):
    """A `CoreEngine` over vLLM in processes of its own on this machine. Starting takes half a minute, and blocks.

    vLLM spawns processes that import the main module again: a script needs `if __name__ == "__main__":`.

    Args:
        model: hub name or directory of the checkpoint that generation starts from.
        eos_token_ids: tokens that end every reply.
        dtype: number format of the weights in vLLM: float32, bfloat16, float16, or auto, what the hardware
            multiplies.
        max_tokens: tokens of a prompt and its reply at most; None, like more than the model has positions for, is as
            many as it has.
        max_batch_size: sequences decoded together; None is what vLLM finds best for a GPU, and 128 on a CPU.
        tensor_parallel_size: devices that share each layer of the model.
        pipeline_parallel_size: parts that its layers are divided into, each on as many devices.
        threads: of torch on a CPU, for all processes that share the model; None is what OMP_NUM_THREADS says for each,
            or one a core.
        memory_fraction: share of a GPU's memory that vLLM may take; a CPU gets 2 GiB of keys and values at most.
        sync_backend: how it takes weights; shared_memory and disk are one to it.
        lora: settings of the adapter, where transfers bring that and no weights.
        sleep_level: vLLM's, of `sleep`: 0 frees no memory, 1 moves the weights to the CPU's, 2 gives them up, so that
            after `wake` a transfer of all weights comes before anything else; with an adapter at most 1.
        records_experts: whether generations say to which experts of a mixture their tokens went; vLLM does so on GPUs.
        top_logprobs: as in `start`.
        extra: further engine arguments of vLLM, by its own names.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigurationError: vLLM computes no adapters in that number format here, or has no such argument.
        EngineError: vLLM does not start.
    """

    def __init__(
        self,
        model: str,
        *,
        eos_token_ids: Sequence[int],
        dtype: str = "auto",
        max_tokens: int | None = None,
        max_batch_size: int | None = 256,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        threads: int | None = None,
        memory_fraction: float = 0.9,
        sync_backend: SyncBackend = SyncBackend.SHARED_MEMORY,
        lora: LoraConfig | None = None,
        sleep_level: int = 1,
        records_experts: bool = False,
        top_logprobs: int = 0,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        device = default_device()
        number_format = resolve_dtype(dtype, device)
        self.llm = start(
            sync_backend,
            threads=threads,
            model=model,
            dtype=str(number_format).removeprefix("torch."),
            longest=max_tokens,
            max_num_seqs=max_batch_size,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            gpu_memory_utilization=memory_fraction,
            sleeps=sleep_level > 0,
            records_experts=records_experts,
            top_logprobs=top_logprobs,
            extra=extra,
            **({} if lora is None else lora_settings(lora, number_format, device)),
        )
        self._shut_down = weakref.finalize(self, shut_down, self.llm)
        core = LocalCore(self.llm, sleep_level=sleep_level) if lora is None else AdapterCore(self.llm, lora)
        self._in_workers = core.in_workers
        super().__init__(core, eos_token_ids=eos_token_ids)

    async def begin_profile(self) -> None:
        """Implements `Profiled.begin_profile`; vLLM does so between two steps."""
        await self._in_workers(BEGIN)

    async def end_profile(self) -> Mapping[str, bytes]:
        """Implements `Profiled.end_profile`; the processes are `vllm-RANK`."""
        traces = await self._in_workers(END)
        return {f"vllm-{rank}": trace for rank, trace in enumerate(traces)}

    def close(self) -> None:
        """Ends vLLM's processes; may be called again, and happens by itself when Python ends."""
        self._shut_down()
