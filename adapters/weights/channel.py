"""Brings the trainer's weights to vLLM's processes, by vLLM's own weight transfer calls and one of several backends.

Every transfer moves the whole model, or its adapters, bucket by bucket, and every bucket once to all engines
(`transfer.py`).

Afterwards engines and trainer score the same tokens; their results may differ only by rounding.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar, cast

import torch
from attrs import define, field, frozen

from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.adapters.weights.receiver_port import EngineModel, Probe, WeightReceiver, WeightsDifferError, coarser
from rollgrad.adapters.weights.shared_memory import shared_memory
from rollgrad.adapters.weights.transfer import Backend, Life, Update, WeightStream
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.engines.fleet_member import Taker
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.trajectory import TrajectoryBuilder
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.models import PolicyModel
from rollgrad.domain.ports.weight_channel import WeightChannel

T = TypeVar("T")

PROBE_TOKENS = 9
"""Number of probe tokens: the first is the prompt, eight are scored."""

PROBE_STRIDE = 7919
"""Distance between probe tokens, a prime, which spreads them over the vocabulary."""

CALL_SECONDS = 300.0
"""Longest time of an engine for one bucket, or to begin, finish or verify a transfer. Repacking a large model takes
seconds."""

GRACE_SECONDS = 30.0
"""Longest time of engines to end a transfer that has failed."""

BROKE_OFF = "A transfer of weights to vLLM broke off and left it with half a model: push again."


class EngineWeights(WeightChannel):
    """A `WeightChannel` to the only engine of a run in one process.

    Args:
        engine: the engine that takes the weights.
        backend: the way of the weights.
        temperature: temperature of the policy's `score`, at which engine and trainer are compared.
    """

    def __init__(self, engine: WeightReceiver, *, backend: Backend = shared_memory, temperature: float = 1.0) -> None:
        self._engine = engine
        self._backend = backend
        self._temperature = temperature

    async def push(self, policy: PolicyModel, version: int) -> dict[str, float]:
        """Implements `WeightChannel.push`. `seconds` are those of the transfer, without the comparison that follows;
        if a pause froze requests, the comparison waits for `resume`.

        Raises:
            EngineError: requests are in flight and generation is not paused; vLLM did not take the weights, or computes
                something else with them. In the last two cases the engine refuses
                requests until a push succeeds.
            ConfigurationError: the backend has no room.
        """
        transfer = Transfer([self._engine], [(0, 0)], self._backend)
        probe = await transfer.send(policy, version, self._temperature)
        if probe is not None:
            await transfer.prove(probe)
        for error in transfer.failed.values():
            raise error
        return {"seconds": transfer.seconds, "bytes": float(transfer.bytes)}


@frozen(kw_only=True)
class _Pushed:
    """The last push, as a restarted engine needs it; `steps` is the policy's number of optimizer steps at that time."""

    policy: PolicyModel
    version: int
    steps: int
    probe: Probe


class FleetWeights(WeightChannel):
    """A `WeightChannel` to a fleet. One transfer serves all engines; an engine that fails in it is given up, and the
    others go on. A restarted engine gets the weights of the last push, as long as the policy still has them: a trained
    policy counts the optimizer steps that it has begun in its attribute `steps`. Pushes and such refreshes never
    overlap.

    Args:
        fleet: the fleet that takes the weights; its members are `WeightReceiver`s.
        backend: the way of the weights.
        temperature: temperature of the policy's `score`, at which engines and trainer are compared.
    """

    def __init__(self, fleet: EngineFleet, *, backend: Backend = shared_memory, temperature: float = 1.0) -> None:
        self._fleet = fleet
        self._backend = backend
        self._temperature = temperature
        self._lock = asyncio.Lock()
        self._last: _Pushed | None = None
        fleet.refresh = self.refresh

    async def push(self, policy: PolicyModel, version: int) -> dict[str, float]:
        """Implements `WeightChannel.push`; returns the same as `EngineWeights.push`. If all engines die in it, it
        begins again with their replacements.

        Raises:
            EngineError: requests are in flight and generation is not paused; no engine is left; or the results of all
                differ from the trainer's.
            ConfigurationError: the backend has no room.
        """
        async with self._lock:
            self._last = None
            while True:
                self._fleet.new_weights(version)
                takers = await self._fleet.takers()
                transfer = self._transfer_to(takers)
                steps = policy.steps
                probe = await transfer.send(policy, version, self._temperature)
                if probe is not None:
                    await transfer.prove(probe)
                for index, error in transfer.failed.items():
                    self._fleet.lost(takers[index], str(error))
                if probe is not None and transfer.receivers:
                    self._fleet.took([takers[index] for index in transfer.receivers], version)
                    self._last = _Pushed(policy=policy, version=version, steps=steps, probe=probe)
                    return {"seconds": transfer.seconds, "bytes": float(transfer.bytes)}
                for error in transfer.failed.values():
                    if isinstance(error, WeightsDifferError):
                        raise error

    async def refresh(self, taker: Taker) -> None:
        """Brings the weights of the last push to one restarted member, unless it was part of that push. If the policy
        has begun another step meanwhile, the member waits for the next push."""
        async with self._lock:
            last = self._last
            if last is None or self._fleet.health.serves(taker.number) or last.policy.steps != last.steps:
                return
            transfer = self._transfer_to([taker])
            await transfer.send(last.policy, last.version)
            if last.policy.steps != last.steps:
                await transfer.abandon("The policy changed while a restarted engine took its weights: push again.")
                return
            await transfer.prove(last.probe)
            for error in transfer.failed.values():
                self._fleet.lost(taker, str(error))
            if transfer.receivers:
                self._fleet.took([taker], last.version)

    def _transfer_to(self, takers: Sequence[Taker]) -> "Transfer":
        """Returns a transfer to members, which are `WeightReceiver`s, as the class requires."""
        engines = [cast(WeightReceiver, taker.member) for taker in takers]
        return Transfer(engines, [(taker.number, taker.life) for taker in takers], self._backend)


@define
class Transfer:
    """One transfer to `engines`; an engine that fails drops out."""

    engines: Sequence[WeightReceiver]
    lives: Sequence[Life]
    backend: Backend
    receivers: dict[int, WeightReceiver] = field(init=False)
    """Engines that have not failed, by index."""
    failed: dict[int, EngineError] = field(factory=dict, init=False)
    """Errors of the engines that dropped out, by index."""
    seconds: float = field(default=0.0, init=False)
    """Seconds that `send` took without the probe."""
    bytes: int = field(default=0, init=False)
    dtype: torch.dtype = field(default=torch.float32, init=False)
    """The coarsest format of the trainer's weights."""
    _vocabulary: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.receivers = dict(enumerate(self.engines))

    async def send(self, policy: PolicyModel, version: int, temperature: float | None = None) -> Probe | None:
        """Brings the policy's weights to the engines; returns its `probe` at a `temperature`, None without one, or if
        no engine is left.

        It is computed before engines that have slept take memory for keys and values on GPUs that they share with the
        policy.

        Raises:
            ConfigurationError: the backend has no room. Errors of the policy pass unchanged.
        """
        started = time.perf_counter()
        stream = self.backend(policy, self.lives, version)
        well, probe = False, None
        try:
            await self._updates(stream)
            self.seconds = time.perf_counter() - started
            if self.receivers and temperature is not None:
                probe = await self.probe(policy, temperature)
            started = time.perf_counter()
            await self._each("finish", lambda receiver: receiver.finish_weights(version))
            well = len(self.receivers) == len(self.engines)
        except BaseException:
            await self.abandon(BROKE_OFF)
            raise
        finally:
            with suppress(ValueError):  # after a cancelled push its thread still runs the generator
                await asyncio.to_thread(stream.updates.close)
            stream.close(well)
        self.seconds += time.perf_counter() - started
        return probe if self.receivers else None

    async def probe(self, policy: PolicyModel, temperature: float) -> Probe:
        """Returns the policy's log-probs of tokens that are in the vocabulary of all engines."""
        tokens = [PROBE_STRIDE * index % self._vocabulary for index in range(1, PROBE_TOKENS + 1)]
        expected = await asyncio.to_thread(lambda: policy.score(_batch(tokens)).logprobs_N[1:].tolist())
        return Probe(tokens=tokens, expected=expected, temperature=temperature, dtype=self.dtype)

    async def prove(self, probe: Probe) -> None:
        """Makes the engines compare, which ends the transfer."""
        await self._each("compare its log-probs", lambda receiver: receiver.prove_weights(probe))

    async def abandon(self, reason: str) -> None:
        """Ends an incomplete transfer."""
        await self._each("end a transfer", lambda receiver: receiver.abandon_weights(reason))

    async def _updates(self, stream: WeightStream) -> None:
        """Makes the engines begin and take all updates."""
        asked: asyncio.Task[None] = asyncio.create_task(self._begin(stream))
        begun = False
        try:
            while self.receivers:
                if not stream.ahead and begun:
                    await asked
                update: Update | None = await asyncio.to_thread(next, stream.updates, None)
                await asked
                if not begun:
                    stream.begun()
                    begun = True
                if stream.whole and self.failed:  # the remaining engines try again without the failed ones
                    await self.abandon(BROKE_OFF)
                    self.receivers.clear()
                if update is None or not self.receivers:
                    break
                self._count(update)
                asked = asyncio.create_task(self._take(update))
        except EngineError as error:  # an error of the backend, not of one engine
            asked.cancel()
            for index in [*self.receivers]:
                self.failed[index] = error
            with suppress(TimeoutError):  # they may hang
                async with asyncio.timeout(GRACE_SECONDS):
                    await self.abandon(BROKE_OFF)
            self.receivers.clear()
        except BaseException:
            if not begun:
                await asked  # an engine that is still beginning cannot be told to end
            raise
        finally:
            asked.cancel()

    async def _begin(self, stream: WeightStream) -> None:
        infos = stream.infos

        async def begin(index: int, receiver: WeightReceiver) -> EngineModel:
            return await receiver.begin_weights(infos[index])

        models = await self._each_of("begin", begin)
        self._vocabulary = min((model.vocabulary for model in models), default=0)

    async def _take(self, update: Update) -> None:
        await self._each("take a bucket", lambda receiver: receiver.take_weights(update.info))

    def _count(self, update: Update) -> None:
        self.bytes += update.bytes
        for name in update.dtypes:
            self.dtype = coarser(self.dtype, getattr(torch, name))

    async def _each(self, doing: str, call: Callable[[WeightReceiver], Awaitable[T]]) -> list[T]:
        """Calls the remaining engines; returns their results. An engine that fails or is too slow drops out."""
        return await self._each_of(doing, lambda index, receiver: call(receiver))

    async def _each_of(self, doing: str, call: Callable[[int, WeightReceiver], Awaitable[T]]) -> list[T]:
        """Calls the remaining engines with their indices, like `_each`."""

        async def one(index: int, receiver: WeightReceiver) -> list[T]:
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    return [await call(index, receiver)]
            except TimeoutError:
                error = EngineError(f"vLLM took more than {CALL_SECONDS:g} s to {doing} in a transfer of weights.")
            except EngineError as failure:
                error = failure
            del self.receivers[index]
            self.failed[index] = error
            with suppress(EngineError, TimeoutError):  # one that was silent so long most likely stays so
                async with asyncio.timeout(GRACE_SECONDS):
                    await receiver.abandon_weights(BROKE_OFF)
            return []

        engines = "engine" if len(self.receivers) == 1 else "engines"
        with waiting_for(f"{len(self.receivers)} {engines} to {doing} in a transfer of weights", deadline=CALL_SECONDS):
            answers = await asyncio.gather(*(one(index, receiver) for index, receiver in self.receivers.items()))
        return [answer for answered in answers for answer in answered]


def _batch(tokens: list[int]) -> PackedBatch:
    """Returns a batch of one sequence, all of whose tokens but the first are scored."""
    builder = TrajectoryBuilder(tokens[:1], group_id=0, sample_id=0)
    nothing = [0] * (len(tokens) - 1)
    builder.add_action(
        Generation(token_ids=tokens[1:], logprobs=nothing, versions=nothing, stop_reason=StopReason.LENGTH)
    )
    return pack([builder.build(stop_reason=StopReason.LENGTH)])
