"""vLLM engines in Ray actors: each in a process of its own, wherever the cluster has room, replaced when it dies.

The actor does no more than hold a `VLLMEngine` and pass calls on. Weights reach it through shared memory: the trainer's
own on the trainer's machine; elsewhere each bucket crosses the network once, through Ray's object store, into memory of
the actor's.
"""

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from attrs import evolve, frozen

from rollgrad.adapters.engines.token_streams import News, TokenStreams, ToldTokens
from rollgrad.adapters.ray.processes import ActorProcess
from rollgrad.adapters.ray.session import machine, ray_module, show_gpus
from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.adapters.weights.receiver_port import EngineModel, Probe, WeightReceiver
from rollgrad.adapters.weights.shared_buckets import SharedMemory
from rollgrad.application.engines.fleet_member import FleetMember
from rollgrad.domain.episodes.generation import Generation, GenerationRequest
from rollgrad.domain.errors import EngineError, RollgradError
from rollgrad.domain.ports.rollout_engine import PauseMode

CALLS = 100_000
"""Largest number of simultaneous calls of one actor: more than vLLM ever gets, and each is a coroutine."""

CLOSE_SECONDS = 20.0
"""Longest that an actor may take to end vLLM's processes before it is killed, and that killing it may take."""


CANCEL_SECONDS = 5.0
"""Longest that a request which is given up is waited for: a process that stands still does not answer."""


class EngineHost:
    """The object in the actor; its methods are those of `VLLMEngine`."""

    _engine: Any = None
    _memory: SharedMemory

    def __init__(self) -> None:
        self._told = ToldTokens()

    async def process(self) -> ActorProcess:
        """Returns the actor's process."""
        return ActorProcess.own()

    async def start(self, settings: Mapping[str, Any], devices: Sequence[str]) -> int | None:
        """Starts vLLM on the GPUs `devices`, or those that Ray gave the actor, which it blocks; returns its largest
        number of tokens."""
        show_gpus(devices)  # vLLM's worker of rank r takes the r-th
        gc.disable()  # as in `RankWorker`
        try:
            from rollgrad.adapters.engines.vllm.engine import VLLMEngine

            engine = VLLMEngine(**settings)
        finally:
            gc.enable()
        self._engine = engine
        max_tokens: int | None = engine.max_tokens
        return max_tokens

    async def call(self, method: str, *arguments: Any) -> Any:
        """Returns the result of one of the engine's coroutine methods."""
        return await getattr(self._engine, method)(*arguments)

    async def stream(self, number: int, request: GenerationRequest) -> Generation:
        """Samples a reply whose tokens `fetched` tells by `number` while they come."""
        try:
            reply: Generation = await self._engine.generate(request, on_token=self._told.listener(number))
            return reply
        finally:
            self._told.end(number)

    async def fetched(self) -> News:
        """Runs `ToldTokens.fetched`."""
        return await self._told.fetched()

    async def begin_copied(self, bucket_bytes: int) -> EngineModel:
        """Runs `begin_weights` with memory of this machine."""
        self._memory = SharedMemory(bucket_bytes=bucket_bytes)
        try:
            model: EngineModel = await self._engine.begin_weights(
                {"path": self._memory.path, "bucket_bytes": bucket_bytes}
            )
        finally:
            self._memory.unlink()
        return model

    async def take_copied(self, update: Mapping[str, Any], run: Any) -> None:
        """Runs `take_weights` on a bucket that begins with the bytes of `run`, an array."""
        self._memory.bucket(update["bucket"])[: len(run)].numpy()[:] = run
        await self._engine.take_weights(update)

    async def close(self) -> None:
        """Ends vLLM's processes."""
        if self._engine is not None:
            self._engine.close()


@frozen
class _Actor:
    handle: Any
    name: str
    restarts: int

    @property
    def id(self) -> str:
        """Ray's id, which its logs and its dashboard show."""
        return str(self.handle._actor_id.hex())


class RayVLLMEngine(FleetMember, WeightReceiver):
    """A `VLLMEngine` behind a Ray actor, named `rollgrad-engine-K` (its n-th replacement `rollgrad-engine-K.n`).
    `ready` has to be called before anything else.

    Args:
        number: K.
        settings: arguments of `VLLMEngine`.
        options: of the actor, as Ray calls them: `num_cpus` (1 unless said), `num_gpus` (as many as the model is split
            over), `scheduling_strategy`.
        devices: ids of the GPUs that the model is split over, if these are not those that Ray gives the actor.
        seconds: longest that a restart may take, which is only logged: the fleet ends one that takes longer.

    Raises:
        MissingExtraError: Ray is not installed.
    """

    def __init__(
        self,
        number: int,
        settings: Mapping[str, Any],
        *,
        options: Mapping[str, Any] | None = None,
        devices: Sequence[str] = (),
        seconds: float = 600.0,
    ) -> None:
        self._seconds = seconds
        self._name = f"rollgrad-engine-{number}"
        self._settings = dict(settings)
        self._devices = devices
        self._options = {"num_cpus": 1, **(options or {})}
        self.max_tokens: int | None = None
        """Tokens of a prompt and its reply at most, once it is ready."""
        self.not_started: str | None = None
        """Why it did not start at first, while others did (`start_engines`)."""
        self._actor = self._new_actor(0)
        self._streams = TokenStreams(self._fetched)
        self.process: ActorProcess | None = None
        """Process of the actor, once it runs."""
        self._near = True
        self._source: SharedMemory | None = None

    @property
    def actor_id(self) -> str:
        """Ray's id of the actor that now holds the engine."""
        return self._actor.id

    async def ready(self) -> None:
        """Starts vLLM, once; the caller sets the deadline.

        Raises:
            EngineError: it did not start.
        """
        handle = self._actor.handle
        self.process = await self._await("starting", handle.process.remote())
        self._near = self.process.machine == machine()
        self.max_tokens = await self._await("starting", handle.start.remote(self._settings, self._devices))

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        """Implements `RolloutEngine.generate`."""
        request = _with_files_alone(request)
        if on_token is None:
            generation: Generation = await self._generated(self._actor.handle.call.remote("generate", request))
            return generation
        return await self._streams.generate(
            lambda number: self._generated(self._actor.handle.stream.remote(number, request)), on_token
        )

    async def pause(self, mode: PauseMode) -> None:
        """Implements `RolloutEngine.pause`."""
        await self._call("pausing", "pause", mode)

    async def resume(self) -> None:
        """Implements `RolloutEngine.resume`."""
        await self._call("resuming", "resume")

    async def sleep(self) -> None:
        """Implements `RolloutEngine.sleep`."""
        await self._call("going to sleep", "sleep")

    async def wake(self) -> None:
        """Implements `RolloutEngine.wake`."""
        await self._call("waking", "wake")

    async def ping(self) -> None:
        """Implements `FleetMember.ping`."""
        await self._call("answering a ping", "ping")

    async def begin_weights(self, info: Mapping[str, Any] | None) -> EngineModel:
        """Implements `WeightReceiver.begin_weights`."""
        doing = "beginning to take weights"
        if self._near or info is None or "bucket_bytes" not in info:
            self._source = None
            model: EngineModel = await self._call(doing, "begin_weights", info)
        else:
            self._source = SharedMemory(**info)
            model = await self._await(doing, self._actor.handle.begin_copied.remote(info["bucket_bytes"]))
        return model

    async def take_weights(self, update: Mapping[str, Any]) -> None:
        """Implements `WeightReceiver.take_weights`."""
        if self._source is None:
            await self._call("taking weights", "take_weights", update)
            return
        used = max((piece["offset"] + piece["size"] for piece in update["pieces"]), default=0)
        run = ray_module().put(self._source.bucket(update["bucket"])[:used].numpy())
        await self._await("taking weights", self._actor.handle.take_copied.remote(update, run))

    async def finish_weights(self, version: int) -> None:
        """Implements `WeightReceiver.finish_weights`."""
        await self._call("finishing to take weights", "finish_weights", version)

    async def prove_weights(self, probe: Probe) -> None:
        """Implements `WeightReceiver.prove_weights`."""
        await self._call("comparing log-probs", "prove_weights", probe)

    async def abandon_weights(self, reason: str) -> None:
        """Implements `WeightReceiver.abandon_weights`."""
        await self._call("ending a transfer of weights", "abandon_weights", reason)

    async def begin_profile(self) -> None:
        """Implements `Profiled.begin_profile`."""
        await self._call("beginning a profile", "begin_profile")

    async def end_profile(self) -> Mapping[str, bytes]:
        """Implements `Profiled.end_profile`."""
        traces: Mapping[str, bytes] = await self._call("ending a profile", "end_profile")
        return traces

    async def restart(self) -> None:
        """Implements `FleetMember.restart`; the new actor has the same options."""
        restarts = self._actor.restarts + 1
        with waiting_for(f"engine {self._actor_name(restarts)} to start", deadline=self._seconds):
            await self.close()
            self._actor, self.process = self._new_actor(restarts), None
            self._streams = TokenStreams(self._fetched)
            await self.ready()

    async def close(self) -> None:
        """Implements `FleetMember.close`; a process that does not end by itself is killed."""
        import ray

        handle, silent = self._actor.handle, False
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._await("closing", handle.close.remote())
        except EngineError:
            pass  # it has died, or is killed now
        except TimeoutError:
            silent = True
        finally:
            ray.kill(handle, no_restart=True)
        if silent and self.process is not None:
            with suppress(EngineError, TimeoutError):  # its machine is lost, too
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._await("being killed", self.process.kill())

    def _actor_name(self, restarts: int) -> str:
        return f"{self._name}.{restarts}" if restarts else self._name

    def _new_actor(self, restarts: int) -> _Actor:
        name = self._actor_name(restarts)
        actor = (
            ray_module().remote(EngineHost).options(name=name, max_restarts=0, max_concurrency=CALLS, **self._options)
        )
        return _Actor(actor.remote(), name, restarts)

    async def _fetched(self) -> News:
        news: News = await self._await("streaming", self._actor.handle.fetched.remote())
        return news

    async def _generated(self, reference: Any) -> Any:
        """Waits for a generation; one that is cancelled has left the actor's engine before this raises."""
        from ray.exceptions import RayError

        try:
            return await self._await("generating", reference)
        except asyncio.CancelledError:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(CANCEL_SECONDS):
                    await reference
            raise

    async def _call(self, doing: str, method: str, *arguments: Any) -> Any:
        return await self._await(doing, self._actor.handle.call.remote(method, *arguments))

    async def _await(self, doing: str, reference: Any) -> Any:
        """Waits for the actor; returns its result.

        Raises:
            EngineError: it has died, or failed in another way; rollgrad's own errors are raised unchanged.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        actor = self._actor
        try:
            return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)  # frees the request's place in vLLM
            raise
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RollgradError):
                raise cause from None
            raise EngineError(f"{_told(actor)} failed at {doing}: {type(cause).__name__}: {cause}") from error
        except RayError as error:
            raise EngineError(
                f"{_told(actor)} died at {doing}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            ) from error


async def start_engines(
    count: int,
    settings: Mapping[str, Any],
    *,
    options: Sequence[Mapping[str, Any]] = (),
    devices: Sequence[Sequence[str]] = (),
    seconds: float = 600.0,
) -> list[RayVLLMEngine]:
    """Starts engines at the same time, and waits until they are ready; `options` and `devices` have those of each, or
    nothing. Where some fail, those that did say why (`not_started`), and a fleet restarts them.

    Raises:
        EngineError: all of them failed, or one did neither start nor fail within `seconds`; then all are ended.
    """
    engines = [
        RayVLLMEngine(
            number,
            settings,
            options=options[number] if options else None,
            devices=devices[number] if devices else (),
            seconds=seconds,
        )
        for number in range(count)
    ]
    try:
        with waiting_for(f"{count} vLLM {'engine' if count == 1 else 'engines'} to start", deadline=seconds):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*map(_try, engines))
        if all(engine.not_started is not None for engine in engines):
            raise EngineError(engines[0].not_started)
    except BaseException as error:
        await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)
        if isinstance(error, TimeoutError):
            raise EngineError(
                f"The {count} engines were not ready within {seconds:g} s: Ray lacks the CPUs or GPUs that they "
                "reserve (`ray status` says what is free), or their model loads more slowly."
            ) from error
        raise
    return engines


async def _try(engine: RayVLLMEngine) -> None:
    """Starts an engine; one that fails says why. Settings that are refused are refused to all alike."""
    try:
        await engine.ready()
    except EngineError as error:
        engine.not_started = str(error)


def _with_files_alone(request: GenerationRequest) -> GenerationRequest:
    """Returns a request whose images are their files, of which vLLM makes the tensors itself: they are far smaller."""
    images = [evolve(placed, image=evolve(placed.image, tensors={})) for placed in request.images]
    return evolve(request, images=tuple(images))


def _told(actor: _Actor) -> str:
    return f"Engine {actor.name} (actor {actor.id})"
