"""A `Tool` that follows a function."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rollgrad.adapters.tools.text_argument import read_text, text_schema
from rollgrad.domain.episodes.messages import ToolResult
from rollgrad.domain.ports.environment import Tool


class FakeTool(Tool):
    """`repeat`: answers `text` with what `answer` makes of it; keeps what it was asked."""

    name = "repeat"
    description = "Says it again."
    parameters = text_schema("text", "What to say.")

    def __init__(self, answer: Callable[[str], ToolResult] = lambda text: ToolResult(content=text)) -> None:
        self._answer = answer
        self.calls: list[str] = []
        self.closed = False

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Returns `answer(text)`, or what is wrong with the arguments."""
        text = read_text(self.name, "text", arguments)
        if isinstance(text, ToolResult):
            return text
        self.calls.append(text)
        await asyncio.sleep(0)
        return self._answer(text)

    async def close(self) -> None:
        """Sets `closed`."""
        self.closed = True
