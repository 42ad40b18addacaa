"""Agents as functions and as programs: what they are given, what they may return, and how they end."""

import asyncio
import contextlib
import contextvars
import json
import os
import shlex
import socket
import sys
import threading
import time
from asyncio import base_subprocess
from pathlib import Path
from typing import Any

import pytest

from rollgrad.adapters.agents.command import MAX_OUTPUT, CommandAgent
from rollgrad.adapters.agents.function import FunctionAgent
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ConfigurationError, ForeignError
from rollgrad.domain.ports.agent_program import AgentResult, AgentTask

WAIT_SECONDS = 300.0
TASK = AgentTask(
    unlearned_key="other",
    prompt=Prompt(
        token_ids=(1,),
        text="rendered",
        label="the secret label",
        metadata={"hint": "the secret label"},
        messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "g\u00f6\nthere"}),
    ),
    root_url="http://127.0.0.1:1/s/key",
    api_key="key",
    model="policy",
)


async def call(function: Any) -> AgentResult:
    return await FunctionAgent(function).run(TASK)


@pytest.mark.parametrize(
    ("returned", "result"),
    [
        (None, AgentResult()),
        ("7", AgentResult(answer="7")),
        ("", AgentResult(answer="")),
        (0.5, AgentResult(reward=0.5)),
        (True, AgentResult(reward=1.0)),
        ({}, AgentResult()),
        ({"reward": 0, "metrics": {"calls": 2}}, AgentResult(reward=0.0, metrics={"calls": 2.0})),
        ({"answer": "x", "metrics": None}, AgentResult(answer="x")),
        ({"rewards": {"first": 1, "second": -0.5}}, AgentResult(rewards={"first": 1.0, "second": -0.5})),
    ],
)
async def test_what_a_function_may_return(returned: Any, result: AgentResult) -> None:
    async def later(task: AgentTask) -> Any:
        return returned

    assert await call(lambda task: returned) == result
    assert await call(later) == result
    assert await call(lambda task: later(task)) == result, "a function that returns an awaitable"


WRONG = [
    [1.0],
    {"rewards": 1},
    {"rewards": {"first": 1.0}, "reward": 1.0},
    {"points": 1},
    object(),
    {"answer": 3},
]


@pytest.mark.parametrize("returned", WRONG)
async def test_what_a_function_may_not_return(returned: Any) -> None:
    with pytest.raises(
        ForeignError,
        match=r"^The agent returned .*(, but .*(texts|metrics|None|numbers)|: leave .*)\.$",
    ):
        await call(lambda task: returned)


def test_a_role_is_named_in_its_key() -> None:
    assert TASK.role_key("black-1") == "key:black-1"
    for name in ("", "a b", "a:b", "\u00e9", "x" * 65):
        with pytest.raises(ValueError, match=r"must be a word of at most 64 letters"):
            TASK.role_key(name)


async def test_a_function_that_exits_ends_its_episode_only() -> None:
    async def later(task: AgentTask) -> None:
        sys.exit("enough")

    for function in (lambda task: sys.exit(3), later):
        with pytest.raises(ForeignError, match=r"The agent raised SystemExit: (3|enough)"):
            await call(function)


async def test_blocking_functions_play_at_once_and_may_be_left_behind() -> None:
    together, forever = threading.Barrier(300), threading.Event()

    agent = FunctionAgent(lambda task: together.wait(WAIT_SECONDS))
    await asyncio.gather(*(agent.run(TASK) for _ in range(300)))
    task = asyncio.create_task(FunctionAgent(lambda task: forever.wait()).run(TASK))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    forever.set()


async def test_an_asynchronous_function_that_blocks_does_not_keep_the_server_from_answering_it() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"4")
        writer.close()

    async def blocks(task: AgentTask) -> str:
        with socket.create_connection(address, timeout=WAIT_SECONDS) as connection:
            return connection.recv(1).decode()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        async with asyncio.timeout(WAIT_SECONDS / 10):
            assert await call(blocks) == AgentResult(answer="4")


async def test_an_asynchronous_function_that_is_cancelled_cleans_up_first() -> None:
    began, cleaned = threading.Event(), threading.Event()

    async def waits(task: AgentTask) -> None:
        try:
            began.set()
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.01)
            cleaned.set()

    task = asyncio.create_task(call(waits))
    await asyncio.to_thread(began.wait, WAIT_SECONDS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned.is_set()


async def test_asynchronous_functions_share_an_event_loop_and_see_the_episode_context() -> None:
    once, seen = asyncio.Semaphore(1), contextvars.ContextVar("seen", default="")

    async def shares(task: AgentTask) -> str:
        async with once:
            await asyncio.sleep(0.01)
            return seen.get()

    seen.set("episode")
    for result in await asyncio.gather(call(shares), call(shares)):
        assert result == AgentResult(answer="episode")


def program(folder: Path, source: str) -> CommandAgent:
    path = folder / "an agent.py"
    path.write_text(source)
    return CommandAgent(shlex.join([sys.executable, str(path)]))


async def run(folder: Path, source: str) -> AgentResult:
    return await program(folder, source).run(TASK)


async def test_a_program_is_given_the_question_and_the_address_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "ROLLGRAD_TOKEN", "WANDB_API_KEY", "http_proxy"):
        monkeypatch.setenv(name, "the parent's secret")
    monkeypatch.setenv("OPENAI_API_KEY", "the parent's secret")
    source = "import json, os, sys\nprint(json.dumps([dict(os.environ), sys.stdin.read()]))"
    environment, given = json.loads((await run(tmp_path, source)).answer or "")
    assert "secret" not in json.dumps(environment)
    assert "secret" not in given
    assert environment["OPENAI_BASE_URL"] == "http://127.0.0.1:1/s/key/v1"
    assert environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1/s/key"
    assert environment["OPENAI_API_KEY"] == environment["ANTHROPIC_API_KEY"] == "key"
    assert (environment["ROLLGRAD_MODEL"], environment["ROLLGRAD_UNLEARNED_KEY"]) == ("policy", "other")
    assert json.loads(given) == {"prompt": "g\u00f6\nthere", "messages": list(TASK.prompt.messages)}
    assert given.endswith("\n")
    assert given.count("\n") == 1


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        ("pass", None),
        ("print()", None),
        ("print('thinking')\nprint('  7 ')", "7"),
        ("print('thinking')\nprint('a\u2028b\x85c')", "a\u2028b\x85c"),
        ("import sys\nsys.stdin.close()\nprint('never read')", "never read"),
        ("import os\nos.write(1, b'\\xff!')", "\ufffd!"),
        ("import os, time\nprint('out', flush=True)\nos.close(1); os.close(2)\ntime.sleep(0.3)", "out"),
    ],
)
async def test_the_last_line_is_the_answer(tmp_path: Path, source: str, answer: str | None) -> None:
    assert await run(tmp_path, source) == AgentResult(answer=answer)


async def test_a_prompt_and_an_answer_larger_than_pipes(tmp_path: Path) -> None:
    task = AgentTask(
        prompt=Prompt(token_ids=(1,), text="x" * 4_000_000), root_url="http://x", api_key="k", model="policy"
    )
    source = "import sys\nsys.stdout.write('y' * 900000); sys.stdout.flush()\nprint()\nprint(len(sys.stdin.read()))"
    result = await program(tmp_path, source).run(task)
    assert int(result.answer or "") > 4_000_000


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys\nsys.exit(3)", "exit status 3: no message"),
        ("raise ValueError('no such door')", "ValueError: no such door"),
        ("import os\nos.abort()", "exit status -6"),
        (f"while True: print('x' * {MAX_OUTPUT})", "wrote more than"),
        (f"import sys\nwhile True: sys.stderr.write('x' * {MAX_OUTPUT})", "wrote more than"),
    ],
)
async def test_a_program_that_fails(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        await run(tmp_path, source)


CHILD = """
import subprocess, sys, pathlib, os
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
pathlib.Path(sys.argv[0]).with_name("pids").write_text(f"{os.getpid()} {child.pid}")
"""


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(folder: Path) -> bool:
    pids = list(map(int, (folder / "pids").read_text().split()))
    deadline = time.monotonic() + WAIT_SECONDS
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


async def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    agent = program(tmp_path, CHILD + "child.wait()")
    task = asyncio.create_task(agent.run(TASK))
    async with asyncio.timeout(WAIT_SECONDS):
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(tmp_path)


async def test_a_program_ends_with_its_children_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it is under way before asyncio has its pipes."""
    connect = base_subprocess.BaseSubprocessTransport._connect_pipes  # type: ignore[attr-defined]
    connecting, going_on = asyncio.Event(), asyncio.Event()

    async def late(transport: Any, waiter: Any) -> None:
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
            await asyncio.sleep(0.01)
        connecting.set()
        await going_on.wait()
        await connect(transport, waiter)

    monkeypatch.setattr(base_subprocess.BaseSubprocessTransport, "_connect_pipes", late)
    task = asyncio.create_task(program(tmp_path, CHILD + "child.wait()").run(TASK))
    async with asyncio.timeout(WAIT_SECONDS):
        await connecting.wait()
        task.cancel()
        asyncio.get_running_loop().call_later(0.05, task.cancel)  # of one who is impatient
        asyncio.get_running_loop().call_later(0.1, going_on.set)
        with pytest.raises(asyncio.CancelledError):
            await task
    assert gone(tmp_path)


async def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    assert await run(tmp_path, CHILD + "print('done')") == AgentResult(answer="done")
    assert gone(tmp_path)


async def test_a_child_that_left_the_group_holds_nobody_up(tmp_path: Path) -> None:
    source = CHILD.replace('time.sleep(1000)"]', 'time.sleep(1000)"], start_new_session=True') + "print('done')"
    try:
        assert await run(tmp_path, source) == AgentResult(answer="done")
    finally:
        os.kill(int((tmp_path / "pids").read_text().split()[1]), 9)


@pytest.mark.parametrize("command", ["", "  ", "python 'agent.py"])
def test_commands_that_are_none(command: str) -> None:
    with pytest.raises(ConfigurationError, match=r"agent\.command"):
        CommandAgent(command)


async def test_programs_that_cannot_be_run(tmp_path: Path) -> None:
    script = tmp_path / "agent"
    script.write_text("echo hi")  # not executable
    for command in ("/no/such/agent", str(tmp_path), shlex.quote(str(script))):
        with pytest.raises(ConfigurationError, match=r"cannot be run .*: correct --agent\.command"):
            await CommandAgent(command).run(TASK)


async def test_so_many_programs_run_at_once(tmp_path: Path) -> None:
    """Each notes how many of its like are there while it runs."""
    script = (
        "import os, pathlib, time\n"
        f"place = pathlib.Path({str(tmp_path)!r})\n"
        "mine = place / str(os.getpid())\n"
        "mine.touch()\n"
        "time.sleep(0.2)\n"
        "print(len(list(place.iterdir())))\n"
        "mine.unlink()\n"
    )
    agent = CommandAgent(shlex.join([sys.executable, "-c", script]), processes=2)

    counts = [int(result.answer or 0) for result in (await asyncio.gather(*(agent.run(TASK) for _ in range(6))))]
    assert max(counts) <= 2
    assert len(counts) == 6
