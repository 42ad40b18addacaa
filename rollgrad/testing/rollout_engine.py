"""A `RolloutEngine` that draws tokens uniformly, one a turn of the event loop, without a model."""

import asyncio
import math
import random
from collections.abc import Callable

from rollgrad.application.engines.changes import Changes
from rollgrad.domain.control.request_flow import ArrivedRequest, RequestFlow
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, StopReason
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine, tell

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
        self._flow = RequestFlow()
        self._changes = Changes()

    def set_version(self, version: int) -> None:
        """Sets the version of the weights that tokens are drawn under.

        Raises:
            EngineError: requests are in flight and the engine is not paused.
        """
        self._flow.require_change_of_weights()
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
        arrived = self._flow.arrive()
        try:
            await self._changes.until(lambda: self._flow.may_begin or self._flow.aborted(arrived))
            self._flow.begin(arrived)
            return await self._draw(request, arrived, on_token or (lambda token: None))
        finally:
            self._flow.end(arrived)
            self._changes.tell()

    async def _draw(
        self, request: GenerationRequest, arrived: ArrivedRequest, on_token: Callable[[int], None]
    ) -> Generation:
        params = request.params
        prompt = request.prompt_token_ids
        generator = random.Random(f"{params.seed} {prompt[: len(prompt) - request.begun]}")
        for _ in range(request.begun):
            generator.randrange(VOCABULARY)
        tokens: list[int] = []
        versions: list[int] = []
        flow = self._flow
        reason = StopReason.LENGTH
        while len(tokens) < params.max_new_tokens:
            for _ in range(1 + self.latency(request)):
                await asyncio.sleep(0)
            await self._changes.until(lambda: not flow.paused or flow.aborted(arrived))
            if flow.aborted(arrived):
                reason = StopReason.ABORTED
                break
            if self.fail_with is not None:
                message, self.fail_with = self.fail_with, None
                raise EngineError(f"Generation failed: {message}")
            tokens.append(generator.randrange(VOCABULARY))
            versions.append(self.version)
            last = len(tokens) == params.max_new_tokens or tokens[-1] in params.stop_token_ids
            tell(on_token, tokens[-1], -math.log(VOCABULARY), self.version, last=last)
            if tokens[-1] in params.stop_token_ids and len(tokens) > params.min_new_tokens:
                reason = StopReason.STOP
                break
        logprobs = [-math.log(VOCABULARY)] * len(tokens)
        top_logprobs = [(token, logprobs[0]) for token in range(params.top_logprobs)] if tokens else []
        return Generation(
            token_ids=tokens,
            logprobs=logprobs,
            versions=versions,
            stop_reason=reason,
            top_logprobs=[top_logprobs] * len(tokens) if top_logprobs else (),
        )

    async def pause(self, mode: PauseMode) -> None:
        """Stops drawing: after all requests (WAIT), at once (KEEP), or ending them (ABORT)."""
        flow = self._flow
        ended = flow.begun if mode is PauseMode.ABORT else []
        flow.pause(mode)
        self._changes.tell()
        await self._changes.until(lambda: not any(map(flow.holds, ended)))
        await self._changes.until(lambda: not (flow.draining and flow.has_begun))
        flow.drained()

    async def resume(self) -> None:
        """Draws again."""
        self._flow.resume()
        self._changes.tell()

    async def sleep(self) -> None:
        """Holds requests until `wake`.

        Raises:
            EngineError: requests are in flight.
        """
        self._flow.sleep()

    async def wake(self) -> None:
        """Lets requests go on."""
        self._flow.wake()
        self._changes.tell()
