"""The agent server of a training run, on the loopback interface, inside the run's event loop."""

import asyncio
from typing import TYPE_CHECKING

from rollgrad.application.episodes.chat_service import ChatService
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.errors import ForeignError
from rollgrad.domain.ports.agent_program import AgentProgram
from rollgrad.domain.ports.chat_codec import ChatCodec
from rollgrad.domain.ports.closing import AsyncClosable
from rollgrad.domain.ports.rollout_engine import RolloutEngine

if TYPE_CHECKING:
    from rollgrad.adapters.servers.server import Server

MODEL = "policy"
"""Name of the trained model for agents."""


class TrainingServer:
    """Serves a `ChatService`, from the first request for its address until `aclose`. `unprescribed` is as for
    `ChatService`; `sees_images`: requests may have images, which are larger than the text of their tokens."""

    def __init__(
        self, engine: RolloutEngine, codec: ChatCodec, unprescribed: str | None, *, sees_images: bool = False
    ) -> None:
        self.engine = engine
        self.service = ChatService(engine, codec, max_tokens=engine.max_tokens, unprescribed=unprescribed)
        self._codec = codec
        self._sees_images = sees_images
        self._server: Server | None = None
        self._agents: list[AsyncClosable] = []
        self._starting = asyncio.Lock()

    async def url(self) -> str:
        """Returns the server's address, `http://127.0.0.1:PORT`."""
        async with self._starting:
            if self._server is None:
                from rollgrad.adapters.servers.agent_server import AgentServer, max_body_bytes
                from rollgrad.adapters.servers.server import Server

                app = AgentServer(self.service, self._codec, model=MODEL).app()
                longest = None if self._sees_images else self.service.max_tokens
                self._server = Server(app, name="agent server", max_body=max_body_bytes(longest))
                await self._server.start()
        assert self._server.url is not None
        return self._server.url

    def serves(self, agent: AgentProgram) -> None:
        """Notes an agent that is played with, which `aclose` closes too, if it can be closed."""
        if isinstance(agent, AsyncClosable):
            self._agents.append(agent)

    async def aclose(self) -> None:
        """Closes the agents, then stops serving, whatever they raise; idempotent.

        Raises:
            ForeignError: an agent cannot be closed.
        """
        server, self._server = self._server, None
        try:
            for agent in self._agents:
                with foreign_code(
                    lambda words: ForeignError(f"The agent could not be closed: its aclose raised {words}")
                ):
                    await agent.aclose()
        finally:
            if server is not None:
                await server.stop()
