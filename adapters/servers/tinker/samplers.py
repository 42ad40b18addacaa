"""Samplers: weights that never change, and the few of them whose models are in memory.

Does not own: where weights are kept (`shelf.py`), nor messages.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from rollgrad.domain.batches.datums import Datum, of_datums, pack_datums
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.models import ReferenceModel
from rollgrad.domain.ports.rollout_engine import RolloutEngine

IDLE = 3
"""Samplers that stay in memory while nobody uses them: the newest, the one before, and a reference."""


@frozen(kw_only=True, eq=False)
class Sampler:
    """Fixed weights: the engine that samples from them, and the model that scores prompts by them."""

    engine: RolloutEngine
    model: ReferenceModel


@frozen(kw_only=True, eq=False)
class Weights:
    """Origin of a sampler: `directory` of its adapters of rank `rank`, None for the base model alone; `path`, if they
    have a name."""

    directory: Path | None = None
    rank: int = 0
    path: str | None = None


@define(eq=False)
class _Loaded:
    """A sampler in memory, and the number of requests that use it. While there is none, its engine sleeps: it would
    keep the memory of its keys and values."""

    sampler: "asyncio.Future[Sampler]"
    users: int = 0
    turning: asyncio.Lock = field(factory=asyncio.Lock)
    """Held while the engine wakes or falls asleep."""

    async def wake(self) -> Sampler:
        """Returns the sampler, awake."""
        sampler = await asyncio.shield(self.sampler)  # which others may wait for, too
        async with self.turning:
            await sampler.engine.wake()
        return sampler

    async def rest(self) -> None:
        """Puts the engine to sleep, if nobody uses it."""
        async with self.turning:
            if not self.users and self.sampler.done() and self.sampler.exception() is None:
                with suppress(EngineError):  # a request may outlive another that failed beside it
                    await self.sampler.result().engine.sleep()


class Samplers:
    """Samples from weights, in one event loop.

    Args:
        load: makes a sampler from weights.
    """

    def __init__(self, load: Callable[[Weights], Awaitable[Sampler]]) -> None:
        self._load = load
        self._weights: dict[str, Weights] = {}
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()

    def add(self, sampler_id: str, weights: Weights) -> None:
        """Adds a sampler; nothing is loaded until it is used."""
        self._weights[sampler_id] = weights

    def drop(self, sampler_id: str) -> None:
        """Forgets a sampler; does nothing if it is unknown."""
        self._weights.pop(sampler_id, None)
        self._loaded.pop(sampler_id, None)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._weights])

    def weights(self, sampler_id: str) -> Weights | None:
        """Returns the origin of a sampler; None if it is unknown."""
        return self._weights.get(sampler_id)

    async def sample(
        self, sampler_id: str, prompt: Sequence[int], params: SamplingParams, count: int, *, scored: bool
    ) -> tuple[list[Generation], Tensor | None]:
        """Returns `count` replies, whose seeds follow that of `params`, and with `scored` logprobs_T of the prompt.

        Raises:
            EngineError: the sampler has been dropped, or fails.
        """
        async with self._in_memory(sampler_id) as sampler:
            seeds = [(params.seed + number) % 2**62 for number in range(count)]
            requests = [
                GenerationRequest(prompt_token_ids=tuple(prompt), params=evolve(params, seed=seed)) for seed in seeds
            ]
            generations = await asyncio.gather(*map(sampler.engine.generate, requests))
            logprobs_T = await asyncio.to_thread(prompt_logprobs, sampler.model, prompt) if scored else None
        return generations, logprobs_T

    @asynccontextmanager
    async def _in_memory(self, sampler_id: str) -> AsyncIterator[Sampler]:
        loaded = self._loaded.get(sampler_id)
        if loaded is None or (loaded.sampler.done() and loaded.sampler.exception() is not None):
            weights = self._weights.get(sampler_id)
            if weights is None:
                raise EngineError(f"There is no sampler {sampler_id!r} any more: its session has ended.")
            loaded = _Loaded(asyncio.ensure_future(self._load(weights)))
            self._loaded[sampler_id] = loaded
        self._loaded.move_to_end(sampler_id)
        loaded.users += 1
        try:
            yield await loaded.wake()
        finally:
            loaded.users -= 1
            self._unload()
            await loaded.rest()

    def _unload(self) -> None:
        idle = [sampler_id for sampler_id, loaded in self._loaded.items() if not loaded.users]
        for sampler_id in idle[: max(0, len(idle) - IDLE)]:
            del self._loaded[sampler_id]


def prompt_logprobs(model: ReferenceModel, prompt: Sequence[int]) -> Tensor:
    """Returns logprobs_T of a prompt's tokens; NaN for the first, which nothing predicts."""
    logprobs_T = torch.full((len(prompt),), torch.nan)
    if len(prompt) > 1:
        tokens_T, nothing_T = torch.tensor(prompt), torch.zeros(len(prompt) - 1)
        datum = Datum(
            tokens_T=tokens_T[:-1],
            targets_T=tokens_T[1:],
            weights_T=nothing_T,
            sampled_logprobs_T=nothing_T,
            advantages_T=nothing_T,
        )
        batch = pack_datums([datum])
        [logprobs_T[1:]] = of_datums(model.score(batch).logprobs_N, batch)
    return logprobs_T
