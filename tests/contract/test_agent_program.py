"""Promises of every agent program."""

import asyncio
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollgrad.adapters.agents.command import CommandAgent
from rollgrad.adapters.agents.function import FunctionAgent
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.agent_program import AgentProgram, AgentResult, AgentTask

WAIT_SECONDS = 60.0
Make = Callable[[str], AgentProgram]


@pytest.fixture(params=["function", "async_function", "command"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes a program of one of three behaviours: `echo`, `raise`, `hang`."""

    def command(behaviour: str) -> AgentProgram:
        does = {
            "echo": "print(json.loads(sys.stdin.read())['prompt'])",
            "raise": "raise ValueError('no such door')",
            "hang": "pathlib.Path('STARTED').touch(); time.sleep(1000)",
        }[behaviour]
        path = tmp_path / "agent.py"
        path.write_text(f"import json, pathlib, sys, time\n{does.replace('STARTED', str(tmp_path / 'started'))}")
        return CommandAgent(shlex.join([sys.executable, str(path)]))

    def function(behaviour: str) -> AgentProgram:
        def play(task: AgentTask) -> str:
            if behaviour == "raise":
                raise ValueError("no such door")
            return str(task.prompt.messages[-1]["content"])

        async def play_later(task: AgentTask) -> str:
            if behaviour == "hang":
                (tmp_path / "started").touch()
                await asyncio.sleep(1000)
            return play(task)

        return FunctionAgent(play if request.param == "function" and behaviour != "hang" else play_later)

    return command if request.param == "command" else function


def task(text: str) -> AgentTask:
    prompt = Prompt(token_ids=(1,), text=text, messages=({"role": "user", "content": text},))
    return AgentTask(prompt=prompt, root_url="http://127.0.0.1:1/s/key", api_key="key", model="policy")


async def test_episodes_overlap_and_keep_their_tasks_apart(make: Make) -> None:
    async def body() -> list[AgentResult]:
        program = make("echo")
        assert isinstance(program, AgentProgram)
        return await asyncio.gather(*(program.run(task(f"question {n}")) for n in range(5)))

    assert await body() == [AgentResult(answer=f"question {n}") for n in range(5)]


async def test_what_goes_wrong_is_an_exception_of_the_episode(make: Make) -> None:
    program = make("raise")
    with pytest.raises(Exception, match="no such door"):
        await program.run(task("x"))
    assert (await make("echo").run(task("still there"))) == AgentResult(answer="still there")


async def test_cancelling_ends_it(make: Make, tmp_path: Path) -> None:
    running = asyncio.create_task(make("hang").run(task("x")))
    async with asyncio.timeout(WAIT_SECONDS):
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
