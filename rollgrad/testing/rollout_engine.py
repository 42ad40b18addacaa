"""A `RolloutEngine` that draws tokens uniformly, one a turn of the event loop, without a model."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable

from rollgrad.domain.episodes.generation import Generation, GenerationRequest, StopReason
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine

VOCABULARY = 256
"""Tokens 0..255: the bytes of `FakeChatCodec`."""


class FakeRolloutEngine(RolloutEngine):
    """Each token is uniform under the request's seed and prompt. `fail_with` makes the next token raise; `latency` is
    the turns of the event loop that each token of a request takes besides its own."""

    def __init__(self) -> None:
        self.version = 0
        self.fail_with: str | None = None
        self.latency: Callable[[GenerationRequest], int] = lambda request: 0
        self.requests: list[GenerationRequest] = []
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = asyncio.Event()
        self._running.set()
        self._aborts = 0
        self._begun: Counter[int] = Counter()
        """Requests in flight by the aborts before them."""
        self._draining = False

    def set_version(self, version: int) -> None:
        """Sets the version of the weights that tokens are drawn under.

        Raises:
            EngineError: requests are in flight and the engine is not paused.
        """
        if self._in_flight and self._running.is_set():
            raise EngineError("Weights changed while requests were in flight: pause the engine first.")
        self.version = version

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        """Returns uniform tokens, each with the log-prob -log 256 and the version at its draw.

        Raises:
            EngineError: the prompt is empty, or `fail_with` is set.
        """
        if not request.prompt_token_ids:
            raise EngineError("The request has no prompt tokens.")
        self.requests.append(request)
        while self._draining:
            await asyncio.sleep(0)
        aborts = self._aborts
        self._in_flight += 1
        self._begun[aborts] += 1
        self._idle.clear()
        try:
            return await self._draw(request, on_token or (lambda token: None))
        finally:
            self._in_flight -= 1
            self._begun[aborts] -= 1
            if not self._in_flight:
                self._idle.set()

    async def _draw(self, request: GenerationRequest, on_token: Callable[[int], None]) -> Generation:
        params = request.params
        prompt = request.prompt_token_ids
        generator = random.Random(f"{params.seed} {prompt[: len(prompt) - request.begun]}")
        for _ in range(request.begun):
            generator.randrange(VOCABULARY)
        tokens: list[int] = []
        versions: list[int] = []
        aborts = self._aborts
        reason = StopReason.LENGTH
        while len(tokens) < params.max_new_tokens:
            for _ in range(1 + self.latency(request)):
                await asyncio.sleep(0)
            while not self._running.is_set() and self._aborts == aborts:
                await asyncio.sleep(0)
            if self._aborts != aborts:
                reason = StopReason.ABORTED
                break
            if self.fail_with is not None:
                message, self.fail_with = self.fail_with, None
                raise EngineError(f"Generation failed: {message}")
            tokens.append(generator.randrange(VOCABULARY))
            versions.append(self.version)
            on_token(tokens[-1])
            if tokens[-1] in params.stop_token_ids and len(tokens) > params.min_new_tokens:
                reason = StopReason.STOP
                break
        logprobs = [-math.log(VOCABULARY)] * len(tokens)
        return Generation(token_ids=tokens, logprobs=logprobs, versions=versions, stop_reason=reason)

    async def pause(self, mode: PauseMode) -> None:
        """Stops drawing: after all requests (WAIT), at once (KEEP), or ending them (ABORT)."""
        if mode is PauseMode.WAIT:
            self._draining = True
            self._running.set()
            await self._idle.wait()
        self._running.clear()
        if mode is PauseMode.ABORT:
            self._aborts += 1
            while any(count for aborts, count in self._begun.items() if aborts < self._aborts):
                await asyncio.sleep(0)

    async def resume(self) -> None:
        """Draws again."""
        self._draining = False
        self._running.set()

    async def sleep(self) -> None:
        """Does nothing, since there is no memory to free.

        Raises:
            EngineError: requests are in flight.
        """
        if self._in_flight:
            raise EngineError("The engine cannot sleep while requests are in flight.")

    async def wake(self) -> None:
        """Does nothing."""
