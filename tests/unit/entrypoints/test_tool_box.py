"""Tools that `agent.tools` names, and the rules of the section `agent`."""

import asyncio
from pathlib import Path

import pytest

from rollgrad.application.settings.rules import validate
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.composition.serving.arguments import AssistantArguments
from rollgrad.entrypoints.composition.tool_box import ToolBox
from tests.fakes.tool import mcp_command

TOOLS = '''
import rollgrad


@rollgrad.tool
def double(number: int) -> int:
    """Doubles."""
    return 2 * number


def helper():
    pass
'''


async def names(box: ToolBox) -> list[str]:
    try:
        return [tool.name for tool in await box.open()]
    finally:
        await box.aclose()
        await box.aclose()


async def test_built_in_tools_files_and_servers(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    box = ToolBox(f"think, python ,{tmp_path / 'tools.py'},mcp:{mcp_command(tmp_path)}")
    found = await names(box)
    assert found[:3] == ["think", "python", "double"]
    assert len(found) > 3


async def test_episodes_that_begin_together_have_the_same_tools(tmp_path: Path) -> None:
    box = ToolBox(f"think,mcp:{mcp_command(tmp_path)}")
    try:
        first, *others = await asyncio.gather(*(box.open() for _ in range(3)))
        assert len(first) > 1
        assert others == [first, first]
    finally:
        await box.aclose()


async def test_a_server_that_could_not_be_used_is_tried_again() -> None:
    box = ToolBox("think,mcp:false")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="The MCP server 'false' cannot be used"):
            await box.open()
    await box.aclose()


async def test_no_tools() -> None:
    assert await names(ToolBox(None)) == []


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("hammer", "--agent.tools names 'hammer', which is no tool: the built-in ones are python, think, final;"),
        ("nowhere.py", "--agent.tools is 'nowhere.py', but there is no such file"),
        ("empty.py", "no function in it is marked as a tool: put @rollgrad.tool above"),
        ("mcp:no-such-program --port 1", "no program of this name may be run here): give a command that starts one"),
        ("mcp:'open", 'The MCP server "\'open" cannot be used (No closing quotation)'),
        ("think,think", "--agent.tools offers two tools called 'think': rename one of them."),
    ],
)
def test_mistakes(named: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.py").write_text("def f(): pass")
    with pytest.raises(ConfigurationError) as raised:
        ToolBox(named)
    assert message in str(raised.value)


async def test_a_server_that_is_none() -> None:
    with pytest.raises(ConfigurationError, match="The MCP server 'false' cannot be used"):
        await names(ToolBox("mcp:false"))


def config() -> RLConfig:
    made = RLConfig()
    made.actor.model_name_or_path = "model"
    made.data.prompt_dataset = "prompts.jsonl"
    made.algo.advantage.estimator = "group_norm"
    made.rollout.n_samples_per_prompt = 2
    made.reward.function_path = "reward.py"
    return made


def test_a_chat_is_refused_a_result_that_shows_nothing() -> None:
    with pytest.raises(ConfigurationError, match="--max_result_chars is 9, but it must be at least 100"):
        AssistantArguments(model="any", max_result_chars=9).check()


def test_what_agents_may_be_set_to() -> None:
    for tools, attempts, command in (("think", 1, None), (None, 3, None), (None, 1, "play")):
        made = config()
        made.agent.tools, made.agent.attempts, made.agent.command = tools, attempts, command
        made.rollout.max_turns = 3
        validate(made)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agent.tools": "think", "train.agent_func_path": "a.py"}, "agent.tools is 'think', but an environment plays"),
        ({"agent.tools": "think", "agent.command": "play"}, "which leads its own conversation, but agent.tools is"),
        ({"agent.attempts": 2, "agent.command": "play"}, "which leads its own conversation, but agent.attempts is 2"),
        ({"agent.system_prompt": "Hi"}, "there are no tools and a single attempt"),
        (
            {"agent.max_result_chars": 9, "agent.tools": "think"},
            "agent.max_result_chars is 9, but it must be at least 100",
        ),
        ({"agent.max_result_chars": 999}, "the model has no tools"),
        ({"agent.attempts": 0}, "agent.attempts is 0, but it must be at least 1"),
        ({"agent.tools": "think", "data.apply_chat_template": False}, "data.apply_chat_template is off"),
        ({"rollout.max_turns": 3}, "episodes have one turn without an agent: set --agent.tools"),
    ],
)
def test_what_they_may_not(settings: dict[str, object], message: str) -> None:
    made = config()
    for key, value in settings.items():
        section, name = key.split(".")
        setattr(getattr(made, section), name, value)
    with pytest.raises(ConfigurationError) as raised:
        validate(made)
    assert message in str(raised.value)
