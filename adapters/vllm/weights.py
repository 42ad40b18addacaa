"""The trainer's weights into vLLM's processes, through shared memory and vLLM's own weight transfer calls.

Every push moves the whole model, bucket by bucket (`buckets.py`): the trainer writes one while the workers read the
other. Afterwards the engine and the trainer score the same tokens; what they may differ by is rounding.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from rollgrad.adapters.vllm.buckets import Piece, SharedMemory, fill
from rollgrad.adapters.vllm.engine import VLLMEngine
from rollgrad.domain.batch import PackedBatch, pack
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.models import PolicyModel
from rollgrad.domain.ports.weight_channel import WeightChannel
from rollgrad.domain.sampling import Generation, StopReason
from rollgrad.domain.trajectory import TrajectoryBuilder

PROBE_TOKENS = 9
"""The first is the prompt, eight are scored."""

PROBE_STRIDE = 7919
"""A prime: probe tokens are spread over the vocabulary."""

PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
"""Largest mean difference of a log-prob between engine and trainer, nats, by the coarser of their number formats.
Probe tokens are improbable, so their logits are large and rounded the most."""


class SharedMemoryWeights(WeightChannel):
    """See `WeightChannel`. Trainer and engine share one machine.

    Args:
        engine: where the weights go.
        temperature: of the policy's `score`: engine and trainer are compared at it.
    """

    def __init__(self, engine: VLLMEngine, *, temperature: float = 1.0) -> None:
        self._engine = engine
        self._temperature = temperature
        self._memory: SharedMemory | None = None

    async def push(self, policy: PolicyModel, version: int) -> dict[str, float]:
        """See `WeightChannel.push`. `seconds` are those of the transfer, without the comparison that follows; requests
        that a pause froze put the comparison off until `resume`.

        Raises:
            EngineError: requests are in flight and generation is not paused; vLLM did not take the weights, or computes
                something else with them. In the last two cases the engine refuses
                requests until a push succeeds.
            ConfigurationError: /dev/shm is too small.
        """
        engine = self._engine
        async with engine.changing_weights():
            memory = await self._connected()
            started = time.perf_counter()
            outgoing = _Outgoing(policy)
            try:
                await self._send(outgoing, memory)
            except BaseException:
                engine.broken = "A transfer of weights to vLLM broke off and left it with half a model: push again."
                with suppress(EngineError):
                    await engine.call(engine.llm.finish_weight_update())  # vLLM refuses the next one otherwise
                raise
            engine.broken = None
            engine.set_version(version)
            seconds = time.perf_counter() - started
            tolerance = max(PROBE_TOLERANCE[dtype] for dtype in (outgoing.dtype, engine.dtype))
            tokens = [PROBE_STRIDE * index % engine.vocabulary for index in range(1, PROBE_TOKENS + 1)]
            expected = await asyncio.to_thread(lambda: policy.score(_batch(tokens)).logprobs_N[1:].tolist())
            await engine.prove(lambda: self._compare(tokens, expected, tolerance))
        return {"seconds": seconds, "bytes": float(outgoing.bytes)}

    async def _connected(self) -> SharedMemory:
        if self._memory is None:
            from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

            memory = SharedMemory()
            try:
                info = {"path": memory.path, "bucket_bytes": memory.bucket_bytes}
                await self._engine.call(self._engine.llm.init_weight_transfer_engine(WeightTransferInitRequest(info)))
            finally:
                memory.unlink()
            self._memory = memory
        return self._memory

    async def _send(self, outgoing: "_Outgoing", memory: SharedMemory) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self._engine
        await engine.call(engine.llm.start_weight_update())
        buckets = fill(iter(outgoing), memory)
        reading: asyncio.Task[None] | None = None
        try:
            while True:
                full: tuple[int, list[Piece]] | None = await asyncio.to_thread(next, buckets, None)
                if reading is not None:
                    await reading
                index, pieces = full or (0, [])
                update = {"bucket": index, "pieces": pieces, "last": full is None}
                request = WeightTransferUpdateRequest(update)
                reading = asyncio.create_task(engine.call(engine.llm.update_weights(request)))
                if full is None:
                    await reading
                    break
        finally:
            if reading is not None:
                reading.cancel()
        await engine.call(engine.llm.finish_weight_update())
        await engine.forget()

    async def _compare(self, tokens: list[int], expected: list[float], tolerance: float) -> None:
        actual = await self._engine.next_logprobs(tokens, self._temperature)
        difference = sum(abs(a - b) for a, b in zip(actual, expected, strict=True)) / len(expected)
        if not difference <= tolerance:
            reason = (
                f"After a transfer of weights, vLLM's log-probs of {len(expected)} tokens differ from the trainer's by "
                f"{difference:.2g} nats on average, more than the {tolerance:g} that rounding explains: vLLM computes "
                "this model differently, or did not take all of its weights."
            )
            self._engine.broken = reason
            raise EngineError(reason)


class _Outgoing:
    """A policy's weights on their way, counted."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self.bytes = 0
        self.dtype = torch.float32
        """The coarsest format met."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._policy.weights():
            self.bytes += tensor.nbytes
            if PROBE_TOLERANCE[tensor.dtype] > PROBE_TOLERANCE[self.dtype]:
                self.dtype = tensor.dtype
            yield name, tensor


def _batch(tokens: list[int]) -> PackedBatch:
    """A sequence whose tokens are all scored but the first."""
    builder = TrajectoryBuilder(tokens[:1], group_id=0, sample_id=0)
    nothing = [0] * (len(tokens) - 1)
    builder.add_action(
        Generation(token_ids=tokens[1:], logprobs=nothing, versions=nothing, stop_reason=StopReason.LENGTH)
    )
    return pack([builder.build(stop_reason=StopReason.LENGTH)])
