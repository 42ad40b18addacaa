"""Thinking and answering."""

import pytest

from rollgrad.adapters.tools.basic import FinalTool, ThinkTool
from rollgrad.domain.episodes.messages import ToolResult


async def test_thinking_echoes_nothing() -> None:
    result = await ThinkTool().call({"notes": "secret plan"})
    assert result == ToolResult(content="Noted.")


async def test_the_final_answer_ends_the_episode() -> None:
    assert await FinalTool().call({"answer": "42"}) == ToolResult(content="42", terminates=True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "`answer` is missing"),
        ({"answer": 42}, "`answer` must be a string"),
        ({"answer": "42", "sure": True}, "`sure` is unknown, the only argument is `answer`"),
    ],
)
async def test_a_bad_answer_says_what_is_wrong_and_does_not_end(arguments: dict[str, object], problem: str) -> None:
    result = await FinalTool().call(arguments)
    assert result == ToolResult(content=f"The arguments of 'final' are wrong: {problem}.", is_error=True)
