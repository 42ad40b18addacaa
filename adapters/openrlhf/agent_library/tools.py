"""Tools, and the registry in which an environment keeps them."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from rollgrad.adapters.openrlhf.agent_library.bridge import run_sync
from rollgrad.domain.episodes.messages import ToolResult as CoreResult


class ToolBase(ABC):
    """A function that the model may call.

    `parameters` lists the arguments, each a dict with `name`, `type` (of JSON schema), `description` and `required`
    (default False), or is a JSON schema itself.
    """

    name: str = ""
    description: str = ""
    parameters: Any = ()

    @abstractmethod
    def call(self, context: dict[str, Any], **kwargs: Any) -> str:
        """Runs the tool. `context` has the number of the turn (`step`, from 1), never the label. It may
        also be written `call(self, *, context, arguments)` or `async call(self, arguments)`."""

    def openai_tool(self) -> dict[str, Any]:
        """Returns the tool's schema, as chat templates and OpenAI clients take it."""
        return openai_tool(self)


class ThinkTool(ToolBase):
    """`think`: lets the model write notes; they come back as they are."""

    name = "think"
    description = "Write down thoughts or a plan before you go on. It changes nothing and looks nothing up."
    parameters = ({"name": "notes", "type": "string", "description": "The thoughts.", "required": True},)

    def call(self, context: dict[str, Any], **kwargs: Any) -> str:
        """Returns the notes."""
        return str(kwargs["notes"])


class FinalTool(ToolBase):
    """`final`: ends the episode with an answer."""

    name = "final"
    description = "Give the final answer. It ends the task, so call it once, when you are sure."
    parameters = ({"name": "answer", "type": "string", "description": "The complete answer.", "required": True},)

    def call(self, context: dict[str, Any], **kwargs: Any) -> str:
        """Returns the answer."""
        return str(kwargs["answer"])


class ToolRegistry:
    """Tools by name, in the order of their registration."""

    def __init__(self, tools: Iterable[Any] = ()) -> None:
        self._tools: dict[str, Any] = {}
        for tool in tools:
            self.register(tool)

    def register(self, tool: Any) -> None:
        """Adds `tool`: a `ToolBase`, or one of rollgrad's own tools; it takes the place of one of the same name.

        Raises:
            ValueError: it has no name.
        """
        if not getattr(tool, "name", ""):
            raise ValueError(f"The tool {type(tool).__name__} has no name: set the class attribute `name`.")
        self._tools[tool.name] = tool

    def names(self) -> list[str]:
        """Returns the names."""
        return list(self._tools)

    def get(self, name: str) -> Any:
        """Returns the tool.

        Raises:
            KeyError: there is none of that name.
        """
        return self._tools[name]

    def list_openai_tools(self) -> list[dict[str, Any]]:
        """Returns the schemas of all tools, as chat templates take them."""
        return [openai_tool(tool) for tool in self._tools.values()]


def openai_tool(tool: Any) -> dict[str, Any]:
    """Returns a tool in the OpenAI shape."""
    function = {"name": tool.name, "description": tool.description, "parameters": schema(tool)}
    return {"type": "function", "function": function}


def schema(tool: Any) -> dict[str, Any]:
    """Returns the JSON schema of a tool's arguments."""
    if isinstance(tool.parameters, Mapping):
        return dict(tool.parameters)
    properties = {
        one["name"]: {key: value for key, value in one.items() if key not in ("name", "required")}
        for one in tool.parameters
    }
    required = [one["name"] for one in tool.parameters if one.get("required")]
    return {"type": "object", "properties": properties, "required": required}


def call_tool(tool: Any, arguments: Mapping[str, Any], context: dict[str, Any]) -> CoreResult:
    """Calls a tool as its signature requires; waits for an asynchronous one.

    Raises:
        Exception: any exception of the tool.
    """
    names = inspect.signature(tool.call).parameters
    if "arguments" in names:
        given = {"context": context} if "context" in names else {}
        answer = tool.call(arguments=dict(arguments), **given)
    else:
        answer = tool.call(context, **arguments)
    if inspect.iscoroutine(answer):
        answer = run_sync(answer)
    return answer if isinstance(answer, CoreResult) else CoreResult(content=str(answer))
