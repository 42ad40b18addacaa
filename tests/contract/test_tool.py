"""Promises of every tool."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from rollgrad.adapters.tools.basic import FinalTool, ThinkTool
from rollgrad.adapters.tools.function import FunctionTool
from rollgrad.adapters.tools.mcp import connect
from rollgrad.adapters.tools.python import PythonTool
from rollgrad.domain.episodes.messages import ToolResult
from rollgrad.domain.ports.environment import Tool, tool_schema
from rollgrad.testing.tool import FakeTool
from tests.fakes.tool import mcp_command


def repeat(text: str) -> str:
    """Says it again."""
    return text


async def repeat_later(text: str) -> str:
    """Says it again."""
    await asyncio.sleep(0)
    return text


KINDS: dict[str, tuple[str, Callable[[str], str]]] = {
    "fake": ("text", str),
    "function": ("text", str),
    "async_function": ("text", str),
    "think": ("notes", lambda text: "Noted."),
    "final": ("answer", str),
    "python": ("code", lambda text: f"{text!r}"),
    "python_of_an_episode": ("code", lambda text: f"{text!r}"),
    "mcp": ("text", str),
}
"""The one argument of each, and what it answers to a text (to the text's literal, in Python's case)."""


@asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[Tool]:
    if kind == "mcp":
        async with await connect(mcp_command(folder), start_timeout=300) as connection:
            yield next(tool for tool in connection.tools if tool.name == "repeat")
        return
    made: dict[str, Callable[[], Tool]] = {
        "fake": FakeTool,
        "function": lambda: FunctionTool(repeat),
        "async_function": lambda: FunctionTool(repeat_later),
        "think": ThinkTool,
        "final": FinalTool,
        "python": PythonTool,
        "python_of_an_episode": lambda: PythonTool().for_episode(),
    }
    yield made[kind]()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def arguments(kind: str, text: str) -> dict[str, Any]:
    return {KINDS[kind][0]: repr(text) if kind.startswith("python") else text}


async def play(kind: str, folder: Path, scenario: Callable[[Tool], Any]) -> Any:
    async with opened(kind, folder) as tool:
        return await scenario(tool)


async def test_it_describes_itself_with_a_valid_schema_of_an_object(kind: str, tmp_path: Path) -> None:
    async def scenario(tool: Tool) -> None:
        assert isinstance(tool, Tool)
        assert tool.name.isidentifier()
        assert tool.description
        Draft202012Validator.check_schema(tool.parameters)
        assert tool.parameters["type"] == "object"
        validator = Draft202012Validator(tool.parameters)
        assert validator.is_valid(arguments(kind, "hello"))
        assert not validator.is_valid({})
        assert json.loads(json.dumps(tool_schema(tool)))["function"]["name"] == tool.name

    await play(kind, tmp_path, scenario)


async def test_a_call_answers_with_a_result(kind: str, tmp_path: Path) -> None:
    result = await play(kind, tmp_path, lambda tool: tool.call(arguments(kind, "häß 漢")))
    assert result == ToolResult(content=KINDS[kind][1]("häß 漢"), terminates=kind == "final")


async def test_bad_arguments_are_told_not_raised(kind: str, tmp_path: Path) -> None:
    argument = KINDS[kind][0]

    async def scenario(tool: Tool) -> list[ToolResult]:
        return [await tool.call(bad) for bad in ({}, {argument: {"a": 1}}, {argument: None}, {"other": "x"})]

    for result in await play(kind, tmp_path, scenario):
        assert result.is_error
        assert not result.terminates
        assert argument in result.content


async def test_concurrent_calls_do_not_mix(kind: str, tmp_path: Path) -> None:
    texts = ["x" * (12 - n) + str(n) for n in range(12)]

    async def scenario(tool: Tool) -> list[ToolResult]:
        return list(await asyncio.gather(*(tool.call(arguments(kind, text)) for text in texts)))

    results = await play(kind, tmp_path, scenario)
    assert [result.content for result in results] == [KINDS[kind][1](text) for text in texts]


async def test_a_tool_answers_again_after_a_bad_call(kind: str, tmp_path: Path) -> None:
    async def scenario(tool: Tool) -> ToolResult:
        await tool.call({"other": 1})
        return await tool.call(arguments(kind, "still here"))

    assert (await play(kind, tmp_path, scenario)).content == KINDS[kind][1]("still here")


async def test_close_may_be_called_twice(kind: str, tmp_path: Path) -> None:
    async def scenario(tool: Tool) -> None:
        await tool.call(arguments(kind, "hello"))
        await tool.close()
        await tool.close()

    await play(kind, tmp_path, scenario)
