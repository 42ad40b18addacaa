"""Agents that know nothing of training are trained: functions and programs with the real SDKs, on a tiny real model."""

import json
import string
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import rollgrad
from rollgrad.adapters.tracking.trajectory_files import read_trajectories, trajectory_files
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.reward import Verifier
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.train import PartialRollout
from rollgrad.domain.errors import EngineError, ForeignError
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.composition.rl.forms import unprescribed
from rollgrad.entrypoints.composition.rl.training_server import TrainingServer
from rollgrad.testing.chat_codec import FakeChatCodec
from rollgrad.testing.reward_source import FakeRewardSource
from tests.example_runs import logged
from tests.fakes.scripted_engine import ScriptedEngine

OPENAI = """
import openai

def run_agent(task):
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        messages = list(task.prompt.messages)
        for turn in range(2):
            reply = client.chat.completions.create(model=task.model, messages=messages)
            message = reply.choices[0].message
            messages += [message.to_dict(), {"role": "user", "content": "and then?"}]
        assert task.prompt.label.startswith("label")
        return {RETURN}
"""
ANTHROPIC = """
import anthropic

async def run_agent(task):
    async with anthropic.AsyncAnthropic(base_url=task.root_url, api_key=task.api_key) as client:
        messages = list(task.prompt.messages)
        for turn in range(2):
            async with client.messages.stream(model=task.model, messages=messages, max_tokens=50) as stream:
                reply = await stream.get_final_message()
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "and then?"}]
        return {RETURN}
"""
BRANCHES = """
import asyncio

import openai

async def run_agent(task):
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        async def ask(*messages):
            reply = await client.chat.completions.create(model=task.model, messages=messages)
            return reply.choices[0].message.content or ""
        question = task.prompt.messages[-1]
        helpers = [{"role": "system", "content": f"You are sub-agent {number}."} for number in range(2)]
        advice = await asyncio.gather(*(ask(helper, question) for helper in helpers))
        await ask(*task.prompt.messages, {"role": "system", "content": "".join(advice)})
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.unlearned_key) as client:
        await ask({"role": "user", "content": "You are an opponent."})
    return float(len(advice[0]))
"""
SIDES = """
import openai

games = {}

def run_agent(task):
    number = games[task.prompt.text] = games.get(task.prompt.text, 0) + 1
    for role in ("first", "second"):
        with openai.OpenAI(base_url=task.base_url, api_key=task.role_key(role)) as client:
            client.chat.completions.create(model=task.model, messages=list(task.prompt.messages))
    return {"rewards": {"first": float(number), "second": -float(number)}, "metrics": {"calls": 3}}
"""
PROGRAM = """
import json, os, sys

import openai

given = json.loads(sys.stdin.readline())
assert "label" not in json.dumps(given)
with openai.OpenAI() as client:
    messages = given["messages"]
    for turn in range(2):
        reply = client.chat.completions.create(model=os.environ["ROLLGRAD_MODEL"], messages=messages)
        text = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
print("thinking aloud")
print(given["prompt"], "was the question")
"""
AGENT_PROGRAM = """
from pathlib import Path

import openai

from rollgrad.domain.ports.agent_program import AgentProgram, AgentResult

class Agent(AgentProgram):
    async def run(self, task):
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            await client.chat.completions.create(model=task.model, messages=list(task.prompt.messages))
        return AgentResult(reward=2.5, metrics={"calls": 1.0})

    async def aclose(self):
        with open(Path(__file__).parent / "closed", "a") as file:
            file.write("closed ")

run_agent = Agent()
"""


def config(tiny_model_dir: Path, folder: Path) -> RLConfig:
    rows = [{"input": f"go {i}", "label": f"label {i}"} for i in range(4)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = RLConfig()
    made.actor.model_name_or_path, made.actor.dtype = str(tiny_model_dir), DType.FLOAT32
    made.algo.advantage.estimator = "reinforce"
    made.data.prompt_dataset, made.data.label_key = str(folder / "data.jsonl"), "label"
    made.train.max_steps, made.train.batch_size = 2, 4
    made.rollout.batch_size, made.rollout.n_samples_per_prompt, made.rollout.max_new_tokens = 2, 2, 8
    made.rollout.stop_strings = ("\ufffd", *string.printable)  # a random model seldom ends a turn by itself
    made.ckpt.output_dir, made.logger.console = str(folder / "out"), False
    return made


def with_file(tiny_model_dir: Path, folder: Path, source: str) -> RLConfig:
    made = config(tiny_model_dir, folder)
    (folder / "agent.py").write_text(source)
    made.train.agent_func_path = str(folder / "agent.py")
    return made


def with_program(tiny_model_dir: Path, folder: Path, source: str) -> RLConfig:
    made = config(tiny_model_dir, folder)
    (folder / "agent.py").write_text(source)
    made.agent.command = f"{sys.executable} {folder / 'agent.py'}"
    return made


FORM = """
import json

import openai

WORD = {"type": "string", "pattern": "^[a-z]{4}$"}
SCHEMA = {"type": "object", "properties": {"w": WORD}, "required": ["w"], "additionalProperties": False}

def run_agent(task):
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        messages = list(task.prompt.messages)
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        reply = client.chat.completions.create(model=task.model, messages=messages, response_format=form)
        text = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
        client.chat.completions.create(model=task.model, messages=messages, max_tokens=4)
        return float(ord(json.loads(text)["w"][0]) % 7)
"""


@pytest.mark.parametrize("adapters", [False, True], ids=["a reference", "its own weights without adapters"])
def test_replies_of_a_prescribed_form_are_learned_from(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], adapters: bool
) -> None:
    """The trainer's log-probs and the reference's are of the distribution that was sampled, also when an update is
    replayed from its kept rollouts."""
    made = with_file(tiny_model_dir, tmp_path, FORM)
    made.rollout.max_new_tokens, made.rollout.stop_strings, made.rollout.temperature = 24, (), 0.8
    made.algo.kl.init_coef = 0.1
    made.actor.lora.rank = 4 if adapters else 0
    made.actor.adam.lr = 1e-2
    rollgrad.train(made)
    first, second = logged(tmp_path / "out")
    assert {first["reward/branches"], second["reward/branches"]} == {1}
    assert abs(first["policy/ref_kl"]) < 1e-6, "both are of the same weights and the same allowed tokens"
    assert second["policy/ref_kl"] != 0
    kept = [read_trajectories(path).to_pylist() for path in trajectory_files(tmp_path / "out")]
    for row in (row for step in kept for row in step):
        assert len(json.loads(row["grammars"])) == 1, "the second turn was free"
        assert row["token_trainer_logprob"] == pytest.approx(row["token_logprob"], abs=1e-5)
        sampled = [p for p, turn in zip(row["token_logprob"], row["token_turn"], strict=True) if turn == 0]
        assert 0.0 in sampled, "some token of the form had to come"
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "out"), "--step", "1"]) == 0
    _, *told = capsys.readouterr().out.splitlines()
    assert told
    for name, before, now in map(str.split, told):
        assert float(now) == pytest.approx(float(before), rel=1e-4, abs=1e-6), name


def test_a_form_that_the_loss_could_not_follow_is_refused(tiny_model_dir: Path) -> None:
    def refusal(*brought: str, **settings: object) -> str | None:
        made = RLConfig()
        for name, value in settings.items():
            section, _, setting = name.partition("_")
            setattr(getattr(made, section), setting, value)
        return unprescribed(made, brought)

    assert refusal() is None
    assert refusal(rollout_engine=Engine.VLLM, cluster_enable=True) is None
    assert refusal(rollout_engine=Engine.SERVER) is None
    assert refusal(train_partial_rollout=PartialRollout.RECOMPUTE) is None
    for told, reason in (
        *(
            (refusal(rollout_engine=engine, train_partial_rollout=PartialRollout.RECOMPUTE), "train.partial_rollout r")
            for engine in (Engine.VLLM, Engine.SERVER)
        ),
        (refusal("policy"), "an adapter of one's own (policy)"),
    ):
        assert told is not None
        assert f"cannot be prescribed while the model is trained with {reason}" in told


@pytest.mark.parametrize("source", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
def test_a_function_returns_its_reward(tiny_model_dir: Path, tmp_path: Path, source: str) -> None:
    result = rollgrad.train(with_file(tiny_model_dir, tmp_path, source.replace("{RETURN}", "1.5")))
    assert result.steps == 2
    for row in logged(tmp_path / "out"):
        assert row["reward/mean"] == 1.5
        assert row["reward/turns"] == 2
        assert row["reward/branches"] == 1
    assert (result.model / "model.safetensors").exists()


def test_an_agent_with_a_process_of_its_own_is_closed_with_the_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    made = with_file(tiny_model_dir, tmp_path, AGENT_PROGRAM)
    made.train.max_steps = 1
    rollgrad.train(made)
    (row,) = logged(tmp_path / "out")
    assert (row["reward/mean"], row["reward/calls"]) == (2.5, 1.0)
    assert (tmp_path / "closed").read_text() == "closed "


async def test_an_agent_that_cannot_be_closed_leaves_no_server() -> None:
    class Breaks:
        async def run(self, task: Any) -> Any: ...

        async def aclose(self) -> None:
            raise OSError("no space left")

    codec = FakeChatCodec()
    server = TrainingServer(ScriptedEngine(codec, 0, ()), codec, None)
    server.serves(Breaks())
    url = await server.url()
    with pytest.raises(ForeignError, match=r"its aclose raised OSError: no space left"):
        await server.aclose()
    with pytest.raises(urllib.error.URLError, match="refused"):  # an answer would be an HTTPError, which is one too
        urllib.request.urlopen(url)


def test_each_role_learns_from_a_reward_of_its_own(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Both sides of a game are trained, each with the advantage that it has among its like."""
    made = with_file(tiny_model_dir, tmp_path, SIDES)
    made.algo.advantage.estimator, made.train.max_steps = "dr_grpo", 1
    rollgrad.train(made)
    (row,) = logged(tmp_path / "out")
    assert (row["reward/mean"], row["reward/mean/first"], row["reward/mean/second"]) == (0.0, 1.5, -1.5)
    assert row["reward/calls"] == 3.0
    (path,) = trajectory_files(tmp_path / "out")
    kept = read_trajectories(path).to_pylist()
    assert len(kept) == 8
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for each in kept:
        groups.setdefault((each["group_id"], each["role"]), []).append(each)
    assert sorted(role for _, role in groups) == ["first", "first", "second", "second"]
    for (_, role), members in groups.items():
        mean = sum(each["reward"] for each in members) / 2
        assert mean == (1.5 if role == "first" else -1.5)
        for each in members:
            assert each["reward"] != mean
            assert {x for x, kind in zip(each["token_advantage"], each["token_kind"], strict=True) if kind == 1} == {
                each["reward"] - mean
            }


@pytest.mark.parametrize(("answer", "judged"), [("None", None), ("'the ' + 'answer'", "the answer")])
def test_the_runs_reward_judges_an_answer(
    tiny_model_dir: Path, tmp_path: Path, answer: str, judged: str | None
) -> None:
    judge = FakeRewardSource(lambda request: 0.25)
    made = with_file(tiny_model_dir, tmp_path, OPENAI.replace("{RETURN}", answer))
    made.train.max_steps = 1
    rollgrad.train(made, reward=judge)
    (row,) = logged(tmp_path / "out")
    assert row["reward/mean"] == 0.25
    seen = [request.response for request in judge.requests]
    assert len(seen) == 4
    assert judged is None or set(seen) == {judged}


def test_a_verifier_judges_an_answer(tiny_model_dir: Path, tmp_path: Path) -> None:
    made = with_file(tiny_model_dir, tmp_path, OPENAI.replace("{RETURN}", "task.prompt.label"))
    made.reward.verifier, made.train.max_steps = Verifier.EXACT_MATCH, 1
    rollgrad.train(made)
    assert logged(tmp_path / "out")[0]["reward/mean"] == 1.0


def test_branches_are_one_sample_with_one_reward(tiny_model_dir: Path, tmp_path: Path) -> None:
    made = with_file(tiny_model_dir, tmp_path, BRANCHES)
    made.algo.advantage.estimator = "group_norm"
    rollgrad.train(made)
    for row in logged(tmp_path / "out"):
        assert row["reward/turns"] == 3
        assert row["reward/branches"] == 3
        assert row["reward/unlearned_turns"] == 1
        assert row["reward/score_mean"] <= 8 * 4, "characters of at most eight tokens"


def test_a_program_is_trained_by_its_base_url(tiny_model_dir: Path, tmp_path: Path) -> None:
    judge = FakeRewardSource(lambda request: 1.0)
    made = with_program(tiny_model_dir, tmp_path, PROGRAM)
    made.train.max_steps, made.rollout.n_samples_per_prompt = 1, 1
    made.train.batch_size = 2
    rollgrad.train(made, reward=judge)
    (row,) = logged(tmp_path / "out")
    assert row["reward/turns"] == 2
    seen = [request.response for request in judge.requests]
    assert len(seen) == 2
    assert all(text.startswith("go ") and text.endswith(" was the question") for text in seen)


CRASH = "import sys\nsys.exit('the disk is full')"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def run_agent(task):\n    raise ValueError('no such door')", "ValueError: no such door"),
        ("import sys\nasync def run_agent(task):\n    sys.exit(3)", "SystemExit: 3"),
        ("def run_agent(task):\n    return 1.0", "without a reply"),
        ("def run_agent(task):\n    return [1.0]", r"The agent returned \[1.0\], but it returns its answer"),
    ],
    ids=["raises", "exits", "silent", "wrong"],
)
def test_what_a_function_does_wrong_is_said(tiny_model_dir: Path, tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        rollgrad.train(with_file(tiny_model_dir, tmp_path, source))


def test_what_a_program_complains_of_is_said(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="exit status 1: the disk is full"):
        rollgrad.train(with_program(tiny_model_dir, tmp_path, CRASH), reward=FakeRewardSource())


@pytest.mark.parametrize(
    "limit", ["max_turns", "max_episode_tokens", "max_len", "positions", "bytes", "max_episode_seconds"]
)
def test_an_episode_that_reaches_a_limit_is_truncated_not_failed(
    tiny_model_dir: Path, tmp_path: Path, limit: str
) -> None:
    source = OPENAI.replace("range(2)", "range(1000)").replace("{RETURN}", "1.0")
    made = with_file(tiny_model_dir, tmp_path, source)
    made.train.max_steps = 1
    if limit == "max_turns":
        made.rollout.max_turns = 3
    elif limit == "max_episode_seconds":
        made.rollout.max_episode_seconds = 15
        slow = source.replace(
            "            message = reply",
            "            import time; time.sleep(10**6 * turn)\n            message = reply",
        )
        (tmp_path / "agent.py").write_text(slow)
    elif limit == "max_episode_tokens":
        made.rollout.max_episode_tokens = 100
    elif limit == "max_len":
        made.data.max_len = 100
    elif limit == "bytes":
        (tmp_path / "agent.py").write_text(source.replace('"and then?"', '"x" * 10**6'))
    rollgrad.train(made)
    (row,) = logged(tmp_path / "out")
    assert row["reward/mean"] == 0.0, "it did not come to return its reward"
    assert row["rollout/truncated_share"] == 1.0
    if limit == "max_turns":
        assert row["reward/turns"] == 3


def test_a_program_that_is_missing_ends_the_command_line_with_2(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config(tiny_model_dir, tmp_path)
    arguments = [
        *("--actor.model_name_or_path", str(tiny_model_dir)),
        *("--data.prompt_dataset", str(tmp_path / "data.jsonl"), "--data.label_key", "label"),
        *("--agent.command", "/no/such/agent --fast", "--reward.verifier", "exact_match"),
        *("--algo.advantage.estimator", "reinforce", "--ckpt.output_dir", str(tmp_path / "out")),
        *("--train.max_steps", "1", "--rollout.batch_size", "2", "--rollout.max_new_tokens", "8"),
    ]
    assert main(["train", "rl", *arguments]) == 2
    assert "/no/such/agent" in capsys.readouterr().err
