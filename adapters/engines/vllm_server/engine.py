"""A rollout engine on a running server, `vllm serve` or another server of token ids, by its URL.

It is neither started nor ended here. A lost server is used again when it answers; in a training run it then gets the
current weights first (`application.engines.fleet`).
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.engines.vllm.engine import CoreEngine
from rollgrad.adapters.engines.vllm_server.core import ServedCore
from rollgrad.application.engines.fleet_member import FleetMember
from rollgrad.domain.errors import EngineError

log = structlog.get_logger(__name__)

RETRY_SECONDS = 1.0
"""Seconds between checks whether a lost server answers again."""


class ServedEngine(CoreEngine, FleetMember):
    """A `CoreEngine` over a server. `ready` has to be called before anything else.

    Args:
        url: address of the server.
        eos_token_ids: tokens that end every reply.
        vocabulary: token ids below it are tokens.
        max_requests: number of requests that the server is given at once; others wait here.
        flag: setting that names the server.
    """

    def __init__(
        self,
        url: str,
        *,
        eos_token_ids: Sequence[int],
        vocabulary: int,
        max_requests: int = 128,
        flag: str = "rollout.server_urls",
    ) -> None:
        self._server = ServedCore(url, vocabulary=vocabulary, max_requests=max_requests, flag=flag)
        super().__init__(self._server, eos_token_ids=eos_token_ids)
        self._trains = False
        self._directory: Path | None = None

    async def ready(self) -> None:
        """Finds out how the server samples.

        Raises:
            EngineError: it does not answer.
            ConfigurationError: it does not tell the tokens that it samples, or their log-probs.
        """
        await self._server.probe()
        self.max_tokens = self._server.max_tokens

    async def require_images(self, renderer: ImageRenderer) -> None:
        """Makes sure that it takes images as `renderer` renders them, now and whenever it comes back.

        Raises:
            EngineError: it does not answer.
            ConfigurationError: it takes none; the message says how to start it.
        """
        await self._server.require_images(renderer)

    async def require_weights(self, directory: Path | None = None) -> None:
        """Makes sure that it takes weights, now and whenever it comes back, through files in `directory` or, without,
        through shared memory. Whatever the server is at is ended.

        Raises:
            EngineError: it does not answer.
            ConfigurationError: it takes none; the message says how to start it.
        """
        await self._server.require_weights(directory)
        self._trains, self._directory = True, directory

    @property
    def names(self) -> tuple[str, ...]:
        """Names that the server has for its model."""
        return self._server.names

    @property
    def processed(self) -> bool:
        """Whether its log-probs are of the distribution that is sampled, not of the logits alone."""
        return self._server.processed

    async def restart(self) -> None:
        """Waits for the server to answer again; the caller sets the deadline.

        Raises:
            ConfigurationError: it came back as one that cannot be used.
        """
        await self.close()
        while True:
            try:
                await self.ready()
                if self._trains:
                    await self.require_weights(self._directory)
                break
            except EngineError as error:
                log.debug("server.lost", url=self._server.http.url, reason=str(error))
                await asyncio.sleep(RETRY_SECONDS)
        self._forget_state()

    async def close(self) -> None:
        """Ends connections, not the server; it may be used again."""
        await self._server.http.aclose()
