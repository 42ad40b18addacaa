"""Values that tools, environments and sessions exchange."""

from typing import Any

from attrs import define, field


@define
class ToolCall:
    """A call that the model asked for."""

    id: str
    name: str
    arguments: dict[str, Any] = field(factory=dict)


@define
class ToolResult:
    """What a tool answers to the call `tool_call_id`."""

    tool_call_id: str
    content: str
    is_error: bool = False


@define
class AgentStepResult:
    """One turn: what the environment answered to each call, and how the model is told of it.

    `rendered_observation` follows the model's reply as it is and ends with the generation prompt; `actions` has None
    for a call that could not be read, and is None itself without any call.
    """

    observations: list[str]
    reward: float
    terminated: bool
    rendered_observation: str
    actions: list[ToolCall | None] | None
    parse_error: bool = False


class Hint(str):
    """An observation for the model alone. The type is the flag: no text that a tool or the model writes becomes one."""

    __slots__ = ()
