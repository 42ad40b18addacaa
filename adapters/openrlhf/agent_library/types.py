"""Values that tools, environments and sessions exchange."""

from typing import Any

from attrs import define, field


@define
class ToolCall:
    """A tool call of the model."""

    id: str
    name: str
    arguments: dict[str, Any] = field(factory=dict)


@define
class ToolResult:
    """Answer of a tool to the call `tool_call_id`."""

    tool_call_id: str
    content: str
    is_error: bool = False


@define
class AgentStepResult:
    """Result of one turn: the environment's answer to each call, and the text of these for the model.

    `rendered_observation` directly follows the model's reply and ends with the generation prompt; `actions` has None
    for a call that could not be read, and is None itself without any call. `step_index` counts the episode's turns from
    1 on.
    """

    observations: list[str]
    reward: float
    terminated: bool
    rendered_observation: str
    actions: list[ToolCall | None] | None
    parse_error: bool = False
    step_index: int = 0

    @property
    def feedback_text(self) -> str:
        """Newer name of `rendered_observation`."""
        return self.rendered_observation


class Hint(str):
    """An observation for the model only. It is marked by its type, which no text of a tool or the model can imitate."""

    __slots__ = ()
