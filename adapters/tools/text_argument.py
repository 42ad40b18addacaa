"""The arguments of a tool that takes one text."""

from collections.abc import Mapping
from typing import Any

from rollgrad.domain.episodes.messages import ToolResult


def text_schema(argument: str, description: str) -> Mapping[str, Any]:
    """Returns the JSON schema of one required string, `argument`, and nothing else."""
    return {
        "type": "object",
        "properties": {argument: {"type": "string", "description": description}},
        "required": [argument],
        "additionalProperties": False,
    }


def read_text(tool: str, argument: str, arguments: Mapping[str, Any]) -> str | ToolResult:
    """Returns the text, or the result that describes the model's mistake."""
    if argument not in arguments:
        problem = f"`{argument}` is missing"
    elif unknown := sorted(set(arguments) - {argument}):
        problem = f"`{unknown[0]}` is unknown, the only argument is `{argument}`"
    elif not isinstance(text := arguments[argument], str):
        problem = f"`{argument}` must be a string"
    else:
        return text
    return ToolResult(content=f"The arguments of {tool!r} are wrong: {problem}.", is_error=True)
