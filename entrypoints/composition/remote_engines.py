"""The engines of `rollout.engine server`: made from their URLs, put behind one, and given the way of weights."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollgrad.adapters.engines.vllm_server.engine import ServedEngine
from rollgrad.adapters.models.torch.loading import load_generation_settings
from rollgrad.adapters.weights.channel import FleetWeights
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.control.engine_health import FleetBounds
from rollgrad.entrypoints.composition.factories import eos_token_ids

SERVER_RETURNS = 100
"""Times that a lost server may come back before it is left alone: it is then no longer lost, but broken."""


def make_served_engines(config: RLConfig, tokenizer: Any) -> list[ServedEngine]:
    """The engines of `rollout.server_urls`, ready to sample."""
    ends = eos_token_ids(load_generation_settings(config.actor.model_name_or_path), tokenizer)
    engines = [
        ServedEngine(url, eos_token_ids=ends, vocabulary=len(tokenizer), max_requests=config.rollout.max_batch_size)
        for url in config.rollout.server_urls
    ]
    _of_all(engines, ServedEngine.ready)
    return engines


def make_served_fleet(engines: list[ServedEngine]) -> EngineFleet:
    """The servers behind one engine."""
    fleet = EngineFleet(engines, bounds=FleetBounds(max_restarts=SERVER_RETURNS))
    fleet.max_tokens = min((e.max_tokens for e in engines if e.max_tokens is not None), default=None)
    return fleet


def make_served_weights(engines: list[ServedEngine], fleet: EngineFleet, *, temperature: float) -> FleetWeights:
    """The way of weights to the servers, all of which can take them."""
    _of_all(engines, ServedEngine.require_weights)
    return FleetWeights(fleet, temperature=temperature)


def _of_all(engines: list[ServedEngine], doing: Callable[[ServedEngine], Coroutine[Any, Any, None]]) -> None:
    """Has all servers do something, in an event loop of its own: there may be one here that waits for this."""

    async def together() -> None:
        try:
            await asyncio.gather(*map(doing, engines))
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))

    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, together()).result()
