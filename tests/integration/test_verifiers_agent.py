"""Environments of the real package verifiers, before 0.4 and since, in processes of their own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from benchmarks.beside import beside
from rollgrad.adapters.agents import verifiers_worker
from rollgrad.adapters.agents.verifiers import VerifiersAgent
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ConfigurationError, DataError, ForeignError
from rollgrad.domain.ports.agent_program import AgentResult, AgentTask
from tests.fakes.scripted_engine import MODEL, ScriptedEngine, Served, assert_recorded, serving

SUMS = '''
from pathlib import Path

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def right(completion, answer) -> float:
    return float(answer in completion[-1].content)


async def length(completion) -> float:
    return len(completion)


class Alone(vf.SingleTurnEnv):
    @vf.cleanup
    async def note(self, state):
        if not state["trajectory"]:
            (Path.home() / "unanswered").touch()


def load_environment(most: int):
    print("this is no answer")
    rows = [{"question": f"What is {n} plus 4?", "answer": str(n + 4), "info": {"n": n}} for n in range(most)]
    data = Dataset.from_list(rows)
    rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.0])
    alone = Alone(dataset=data, eval_dataset=data.select([0]), rubric=rubric, system_prompt="Be brief.")
    tools = vf.ToolEnv(tools=[add], max_turns=3, dataset=data, rubric=rubric)
    return vf.EnvGroup([alone, tools], env_names=["alone", "tools"])
'''
TASKS = """
import verifiers.v1 as vf
from openai import AsyncOpenAI


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class SumConfig(vf.TasksetConfig):
    most: int = 1


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for n in range(self.config.most):
            yield SumTask(SumData(prompt=f"What is {n} plus 4?", answer=str(n + 4)), self.config.task)


class Asks(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        assert "ROLLGRAD_EPISODE" not in (await runtime.run(["env"], {})).stdout, "a program knows keys of episodes"
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            messages = [{"role": "user", "content": data.prompt}]
            for question in ("Sure?", None):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages += [reply.choices[0].message.to_dict(), {"role": "user", "content": question}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Asks", "Sums"]
"""
GAME = """
import verifiers.v1 as vf


class GameConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    user: vf.AgentConfig = vf.AgentConfig()


class Game(vf.Env[GameConfig]):
    async def setup(self, agents):
        agents.user.trainable = False

    async def run(self, task, agents):
        for player in (agents.user, agents.first, agents.second):
            await player.run(task)


__all__ = ["Game", "GameConfig"]
"""
LEAVES_CHILDREN = """
import os
import signal
import time


class Environment:
    requires_group_rollouts = False

    def get_dataset(self):
        if os.fork() == 0:
            os.setsid()  # it has left the group, and holds the outputs open
            time.sleep(60)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def load_environment(*env_id):
    return Environment()
"""
"""As package and as environment, as are the following."""
NEVER_ENDS = """
import time


class Environment:
    requires_group_rollouts = False

    async def _teardown(self):
        time.sleep(600)


def load_environment(*env_id):
    return Environment()
"""
ROWS = """
class Environment:
    requires_group_rollouts = False

    def get_dataset(self):
        return [{"prompt": [{"role": "user", "content": "1?"}], "answer": "1"}, {"prompt": None, "answer": None}]

    async def _teardown(self): ...


def load_environment(*env_id):
    return Environment()
"""
SLOW = """
import asyncio
import time
from pathlib import Path


class Environment:
    requires_group_rollouts = False

    async def _teardown(self):
        await asyncio.sleep(0.5)
        Path.home().joinpath("torn down").touch()


def load_environment(*env_id, forever=False):
    if forever:
        Path.home().joinpath("loading").touch()
        time.sleep(600)
    return Environment()
"""
TELLS = """
import json
import os
import sys


class Environment:
    requires_group_rollouts = False

    def __init__(self, key):
        self.key = key

    def get_dataset(self):
        return [{"prompt": json.dumps([sys.orig_argv, dict(os.environ)]), "answer": self.key}]

    async def _teardown(self): ...


def load_environment(*env_id, key=None):
    return Environment(key)
"""
IMPATIENT = """
import sys
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("worker", sys.argv.pop(1))
worker = module_from_spec(spec)
spec.loader.exec_module(worker)
worker.END_SECONDS = 0.1
worker.main()
"""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 4}}\n</tool_call>'
WAIT_SECONDS = 300.0


def prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(token_ids=(1,), text="x", metadata=row)


def task(row: dict[str, Any], served: Served, session: Any = None) -> AgentTask:
    session = session or served.session
    keys = {"api_key": session.key, "unlearned_key": session.unlearned.key}
    return AgentTask(prompt=prompt(row), root_url=f"{served.url}/s/{session.key}", model=MODEL, **keys)


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a module, and the packages of a folder, before those that the worker has."""

    def put(name: str, source: str, packages: Path | None = None) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{packages}" if packages else str(tmp_path))
        monkeypatch.setenv("HOME", str(tmp_path))

    return put


@pytest.fixture
def engine(tiny_tokenizer: Any) -> ScriptedEngine:
    return ScriptedEngine(TemplateCodec(tiny_tokenizer), tiny_tokenizer.eos_token_id, ())


def says(engine: ScriptedEngine, *texts: str) -> None:
    engine._script = iter(texts)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="verifiers 0.3.1 has no release for Python 3.14")
async def test_an_environment_of_load_environment(put: Any, engine: ScriptedEngine, tmp_path: Path) -> None:
    put("toy_sums", SUMS, beside("verifiers-0.3"))
    agent = VerifiersAgent("toy-sums", env_args={"most": 2})
    try:
        rows = await agent.rows("train")
        assert [(row["prompt"][-1]["content"], row["answer"]) for row in rows] == [
            (f"What is {n} plus 4?", str(n + 4)) for n in (0, 1, 0, 1)
        ]
        assert await agent.rows("train") == rows, "each time from the first"
        (held_out, *_) = await agent.rows("eval")
        assert held_out["prompt"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is 0 plus 4?"},
        ]
        async with serving(engine, engine._codec) as served:
            says(engine, "It is 4.")
            alone = await agent.run(task(rows[0], served))
            assert (alone.reward, alone.metrics["right"], alone.metrics["length"]) == (1.0, 1.0, 1.0)
            assert_recorded(served.session, engine.said)
            assert "Be brief." in engine.prompt(0)

            session, before = served.open(), len(engine.said)
            says(engine, CALL, "It is 6.")
            tools = await agent.run(task(rows[3], served, session))
            assert (tools.reward, tools.metrics["right"], tools.metrics["length"]) == (0.0, 0.0, 3.0)
            assert_recorded(session, engine.said[before:])
            assert "<tool_response>\n5\n</tool_response>" in engine.prompt(2)

            engine.free.clear()  # two at once, one of which is given up
            says(engine, "It is 4.", "It is 4.")
            given_up, goes_on = (asyncio.create_task(agent.run(task(rows[0], served, served.open()))) for _ in "ab")
            async with asyncio.timeout(WAIT_SECONDS):
                while engine.waiting < 2:
                    await asyncio.sleep(0.01)
                assert not (tmp_path / "unanswered").exists()
                given_up.cancel()
                while not (tmp_path / "unanswered").exists():
                    await asyncio.sleep(0.01)
            engine.free.set()
            assert (await goes_on).reward == 1.0

            short = served.open(max_turns=1)
            says(engine, CALL)
            with pytest.raises(ForeignError, match=r"toy-sums failed: .*turn"):
                await agent.run(task(rows[3], served, short))
            assert short.stopped is not None, "the executor counts it as truncated"

            engine.free.clear()
            says(engine, "never said")
            dies = asyncio.create_task(agent.run(task(rows[0], served, served.open())))
            async with asyncio.timeout(WAIT_SECONDS):
                while not engine.waiting:
                    await asyncio.sleep(0.01)
            assert agent._worker is not None
            assert agent._worker._process is not None
            os.kill(agent._worker._process.pid, signal.SIGKILL)
            with pytest.raises(ForeignError, match="toy-sums failed: its process ended"):
                await dies
        with pytest.raises(ConfigurationError, match=r"is no row of the environment toy-sums.*write_rows"):
            await agent.run(AgentTask(prompt=prompt({}), root_url="http://x", api_key="x", model=MODEL))
    finally:
        await agent.aclose()
        await agent.aclose()


async def test_a_taskset_with_its_harness(put: Any, engine: ScriptedEngine) -> None:
    put("toy_tasks", TASKS, beside("verifiers"))
    taskset = {"most": 2}
    agent = VerifiersAgent("toy-tasks", env_args={"taskset": taskset, "agent": {"runtime": {"type": "subprocess"}}})
    try:
        rows = await agent.rows("train")
        assert [(row["prompt"], row["answer"]) for row in rows] == [
            ("What is 0 plus 4?", "4"),
            ("What is 1 plus 4?", "5"),
        ]
        with pytest.raises(DataError, match="toy-tasks gives no rows for eval: A taskset has one set of rows"):
            await agent.rows("eval")
        async with serving(engine, engine._codec) as served:
            says(engine, "Hm.", "It is 5.")
            assert await agent.run(task(rows[1], served)) == AgentResult(
                reward=1.0, metrics={"right": 1.0, "length": 8.0}
            )
            assert_recorded(served.session, engine.said)
            engine.failures = 10
            with pytest.raises(ForeignError, match=r"toy-tasks failed: .*out of memory"):
                await agent.run(task(rows[1], served, served.open()))
    finally:
        await agent.aclose()


async def test_agents_of_one_episode_are_roles_unless_they_are_not_trainable(put: Any, engine: ScriptedEngine) -> None:
    put("toy_game", GAME, beside("verifiers"))
    put("toy_tasks", TASKS, beside("verifiers"))
    seats = {name: {"runtime": {"type": "subprocess"}} for name in ("first", "second", "user")}
    agent = VerifiersAgent("toy-tasks", env_args={"id": "toy-game", "taskset": {"most": 2}, **seats})
    try:
        (row, _) = await agent.rows("train")
        async with serving(engine, engine._codec) as served:
            says(engine, "Hi.", "Hello.", "Hm.", "It is 4.", "Hm.", "It is 5.")
            result = await agent.run(task(row, served))
            assert result.rewards == {"first": 1.0, "second": 0.0}
            assert result.reward is None
            assert result.metrics == {
                "first_right": 1.0,
                "first_length": 8.0,
                "second_right": 0.0,
                "second_length": 8.0,
            }
            recorded = served.session.ledger.trajectories(group_id=0, sample_id=0, stop_reason=StopReason.STOP)
            assert [trajectory.role for trajectory in recorded] == ["first", "second"]
            assert served.session.unlearned.count == 2
            assert_recorded(served.session, engine.said[2:], branches=2)
    finally:
        await agent.aclose()


LONG = """
class Environment:
    requires_group_rollouts = False

    def get_dataset(self):
        raise ValueError("no\\n" * 10_000)

    async def _teardown(self): ...


def load_environment(*env_id):
    return Environment()
"""
"""As package and as environment."""


async def test_a_long_error_is_cut_and_on_one_line(put: Any, tmp_path: Path) -> None:
    put("verifiers", LONG)
    (tmp_path / "toy_old.py").write_text(LONG)
    agent = VerifiersAgent("toy-old")
    with pytest.raises(DataError, match=r"ValueError: no no no") as raised:
        await agent.rows("train")
    assert len(str(raised.value)) < 1100
    await agent.aclose()


async def test_what_cannot_be_loaded_ends_the_run(put: Any, tmp_path: Path) -> None:
    put("toy_old", "def load_environment(): ...")
    served: Any = Served(url="http://127.0.0.1:1", service=None, session=None)  # type: ignore[arg-type]
    row = task(
        {"verifiers": json.dumps({})}, served, session=SimpleNamespace(key="k", unlearned=SimpleNamespace(key="u"))
    )
    for agent, why in (
        (VerifiersAgent("toy-old"), "has no package verifiers: install it there, with the environment"),
        (VerifiersAgent("toy-old", python="/no/python"), "'/no/python', which cannot be run"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            await agent.run(row)
        await agent.aclose()
    (tmp_path / "verifiers.py").write_text('__version__ = "0.1.5"\ndef load_environment(name): return object()')
    agent = VerifiersAgent("toy-old")
    with pytest.raises(ConfigurationError, match=r"verifiers 0\.1\.5 is too old: install verifiers>=0\.1\.14,<0\.4"):
        await agent.run(row)
    await agent.aclose()
    (tmp_path / "verifiers.py").write_text('__version__ = "0.4.0"')
    agent = VerifiersAgent("toy-old")
    with pytest.raises(ConfigurationError, match=r"which verifiers 0\.4\.0 no longer knows: install verifiers<0\.4"):
        await agent.run(row)
    await agent.aclose()


async def test_a_process_that_dies_ends_though_its_children_hold_its_outputs(put: Any, tmp_path: Path) -> None:
    put("verifiers", LEAVES_CHILDREN)
    (tmp_path / "toy_old.py").write_text(LEAVES_CHILDREN)
    agent = VerifiersAgent("toy-old")
    async with asyncio.timeout(30):
        with pytest.raises(DataError, match="its process ended"):
            await agent.rows("train")
        one, other = await asyncio.gather(agent._started(), agent._started())
        assert one is other, "episodes that come at once start one process"
        with pytest.raises(DataError, match="its process ended"):
            await agent.rows("train")
        await agent.aclose()


def test_an_environment_that_does_not_end_does_not_outlive_a_run_that_was_killed(put: Any, tmp_path: Path) -> None:
    put("verifiers", NEVER_ENDS)
    (tmp_path / "toy_old.py").write_text(NEVER_ENDS)
    ended = subprocess.run(
        [sys.executable, "-P", "-c", IMPATIENT, verifiers_worker.__file__, "toy-old"],
        input=b"{}\n",
        capture_output=True,
        start_new_session=True,
        timeout=60,
    )
    assert (ended.stdout, ended.returncode) == (b'{"ready": true}\n', -signal.SIGKILL), ended.stderr


@pytest.mark.parametrize("in_a_notebook", [False, True])
def test_rows_are_written(in_a_notebook: bool, put: Any, tmp_path: Path) -> None:
    put("verifiers", ROWS)
    (tmp_path / "toy_old.py").write_text(ROWS)
    agent, path = VerifiersAgent("toy-old"), tmp_path / "rows.jsonl"

    async def cell() -> int:
        return agent.write_rows(str(path))

    assert (asyncio.run(cell()) if in_a_notebook else agent.write_rows(str(path))) == 2
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["prompt"] == [{"role": "user", "content": "1?"}]
    assert (first["answer"], second["prompt"], second["answer"]) == ("1", "Task 1", "")
    assert json.loads(second["verifiers"]) == {"prompt": None, "answer": None}


async def test_arguments_may_hold_keys(put: Any, tmp_path: Path) -> None:
    put("verifiers", TELLS)
    (tmp_path / "toy_old.py").write_text(TELLS)
    agent = VerifiersAgent("toy-old", env_args={"key": "a-secret"})
    (row,) = await agent.rows("train")
    await agent.aclose()
    assert row["answer"] == "a-secret"
    assert "toy-old" in row["prompt"]
    assert "a-secret" not in row["prompt"], "others see command lines"


async def test_an_environment_has_time_to_tear_down(put: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgrad.adapters.agents.verifiers.QUIET_SECONDS", 0.0)
    put("verifiers", SLOW)
    (tmp_path / "toy_old.py").write_text(SLOW)
    agent = VerifiersAgent("toy-old")
    await agent._started()
    with capture_logs() as logs:
        await agent.aclose()
    assert (tmp_path / "torn down").exists()
    assert [entry["event"] for entry in logs] == ["waiting for the environment to tear down"]
    with capture_logs() as logs:
        agent = VerifiersAgent("toy-old", env_args={"forever": True})
        starting = asyncio.create_task(agent._started())
        async with asyncio.timeout(60):
            while not (tmp_path / "loading").exists():
                await asyncio.sleep(0.01)
            await agent.aclose()
    assert logs == [], "nothing has been loaded that could be torn down"
    with pytest.raises(asyncio.CancelledError):
        await starting
