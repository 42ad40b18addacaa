"""Tools without an effect on the world: thinking aloud, and giving the final answer."""

from collections.abc import Mapping
from typing import Any

from rollgrad.adapters.tools.text_argument import read_text, text_schema
from rollgrad.domain.episodes.messages import ToolResult
from rollgrad.domain.ports.environment import Tool


class ThinkTool(Tool):
    """`think`: lets the model write notes, which are in its call and so in the transcript; nothing comes back."""

    name = "think"
    description = "Write down thoughts or a plan before you go on. It changes nothing and looks nothing up."
    parameters = text_schema("notes", "The thoughts.")

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Returns an acknowledgement."""
        notes = read_text(self.name, "notes", arguments)
        return notes if isinstance(notes, ToolResult) else ToolResult(content="Noted.")

    async def close(self) -> None:
        """Does nothing."""


class FinalTool(Tool):
    """`final`: ends the episode with an answer, which is the result's content."""

    name = "final"
    description = "Give the final answer. It ends the task, so call it once, when you are sure."
    parameters = text_schema("answer", "The answer, complete and without further explanation.")

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Returns the answer and terminates."""
        answer = read_text(self.name, "answer", arguments)
        return answer if isinstance(answer, ToolResult) else ToolResult(content=answer, terminates=True)

    async def close(self) -> None:
        """Does nothing."""
