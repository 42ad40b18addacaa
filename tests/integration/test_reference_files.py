"""Files as users of OpenRLHF and OpenRLHF-Agent write them train a real (tiny) model unchanged."""

import json
import string
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import rollgrad
from rollgrad.adapters.openrlhf.executor import CustomAgentExecutor
from rollgrad.adapters.openrlhf.loading import load_agent_file
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.domain.episodes.generation import SamplingParams, StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.entrypoints.cli.main import main
from rollgrad.testing.chat_codec import FakeChatCodec
from rollgrad.testing.rollout_engine import FakeRolloutEngine
from tests.example_runs import logged

RANDOM_STEPS = """
import random
from typing import Any, Dict

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0
        self.max_steps = random.randint(1, 3)

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        print(f"step {self.step_idx} of {self.max_steps}")
        observation_text, action_text, label = states["observation_text"], states["action_text"], states["label"]
        assert "go" in observation_text and label.startswith("label")
        done = self.step_idx >= self.max_steps
        reward = torch.rand((1,)).float() if done else torch.tensor(0)
        feedback = "\\n\\nHuman: [CORRECT]\\n</s>" if done else "\\n\\nHuman: [INCORRECT]\\nAgain.\\n\\nAssistant: "
        self.step_idx += 1
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": feedback,
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"dummy_scores": reward, f"reached_{min(self.step_idx, 2)}": torch.tensor([1.0, 0.0])},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""

GAME = """
import gem

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.utils.logging_utils import init_logger

logger = init_logger(__name__)


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.env = gem.make("game:GuessTheNumber-v0", max_turns=2)

    async def reset(self, states: dict, **kwargs):
        observation, info = self.env.reset()
        return {"observation": states["observation"] + observation}

    async def step(self, states: dict, **kwargs):
        from openrlhf.utils import extract_boxed_answer, grade_answer

        observation, reward, terminated, truncated, info = self.env.step(states["action_text"])
        logger.info("reward %s", reward)
        equal = grade_answer(extract_boxed_answer("\\\\boxed{2/4}"), "0.5")
        return {
            "rewards": reward, "environment_feedback": observation, "done": terminated or truncated,
            "extra_logs": {"equal": equal, "turns_played": info["turn"]},
        }

    def close(self):
        logger.info("closed")


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""

GEM = """
class Guess:
    def __init__(self, max_turns):
        self.max_turns, self.turn = max_turns, 0

    def reset(self, seed=None):
        return " Guess a number.", {}

    def step(self, action):
        self.turn += 1
        return " Wrong.", float(len(action)), False, self.turn >= self.max_turns, {"turn": self.turn}


def make(name, max_turns):
    assert name == "game:GuessTheNumber-v0"
    return Guess(max_turns)
"""

TOKEN_LEVEL = """
from copy import deepcopy

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        from vllm import SamplingParams

        prompt_ids = hf_tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        first = (await llm_engine.generate(prompt_ids, deepcopy(sampling_params))).outputs[0]
        own = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=3, stop="#", n=1, repetition_penalty=1.0)
        second = (await llm_engine.generate(prompt_ids, own)).outputs[0]
        assert len(second.token_ids) <= 3 and first.finish_reason in ("stop", "length")

        def segment(output, **more):
            return {
                "prompt": prompt, "label": label, "images": None,
                "observation_tokens": prompt_ids + output.token_ids,
                "action_ranges": [(len(prompt_ids), len(prompt_ids) + len(output.token_ids))],
                "rollout_log_probs": [0.0] * len(prompt_ids)
                + [choice[token].logprob for token, choice in zip(output.token_ids, output.logprobs)],
                **more,
            }

        score = float(sum(first.token_ids))  # replies of one length are not alike
        return [
            segment(first, extra_logs={"segments": 2}),
            segment(second, reward=score, scores=score, extra_logs={"segments": 2}),
        ]
"""

AGENT = """
import torch

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf_agent import AgentSession, make_environment, make_template
from openrlhf_agent.environment import ToolBase


class LengthTool(ToolBase):
    name = "length"
    description = "Counts characters."
    parameters = [{"name": "text", "type": "string", "description": "What to count.", "required": True}]

    def call(self, context, **kwargs):
        return str(len(kwargs["text"]))


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        environment = make_environment("default", max_steps=3)
        environment.registry.register(LengthTool())
        self.session = AgentSession(environment, make_template("qwen3"))

    async def reset(self, states: dict, **kwargs):
        self.session.reset(states["observation"])
        return {"observation": self.session.template.render_system("Call tools.") + states["observation"]}

    async def step(self, states: dict, **kwargs):
        result = self.session.step_from_text(states["action_text"], label=states["label"])
        call = '<tool_call>{"name": "length", "arguments": {"text": "four"}}</tool_call>'
        counted = make_environment("default")
        counted.registry.register(LengthTool())
        other = AgentSession(counted, make_template("qwen3")).step_from_text(call)
        return {
            "rewards": torch.tensor(result.reward + len(states["action_text"])),
            "scores": torch.tensor(result.reward),
            "environment_feedback": "" if result.terminated else result.rendered_observation,
            "done": result.terminated,
            "extra_logs": {"hints": float("no_tool_call" in result.rendered_observation),
                           "counted": float(other.observations[0])},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""

OPENAI_SERVER = """
import threading
import time

import uvicorn
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from vllm import SamplingParams

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    \"""Its model is behind an OpenAI server of its own, whose thread and event loop are not those of the run.\"""

    client = None

    def start(self, llm_engine, tokenizer):
        self.calls = {}

        async def complete(request):
            body = await request.json()
            text = "".join(message["content"] for message in body["messages"])
            prompt = tokenizer.encode(text, add_special_tokens=False)
            params = SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"], logprobs=1)
            output = (await llm_engine.generate(prompt, params)).outputs[0]
            logprobs = [here[token].logprob for token, here in zip(output.token_ids, output.logprobs)]
            self.calls[body["session_id"]] = (prompt, list(output.token_ids), logprobs, threading.get_ident())
            message = {"role": "assistant", "content": output.text}
            choice = {"index": 0, "message": message, "finish_reason": output.finish_reason, "logprobs": None}
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
            return JSONResponse(answer)

        app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        threading.Thread(target=server.run, daemon=True).start()
        while not server.started:
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        self.client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY")

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        if self.client is None:
            self.start(llm_engine, hf_tokenizer)
        session = f"{prompt} {id(sampling_params)}"
        answer = await self.client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=sampling_params.max_tokens,
            temperature=sampling_params.temperature,
            extra_body={"session_id": session},
        )
        tokens, sampled, logprobs, thread = self.calls.pop(session)
        return {
            "observation_tokens": tokens + sampled,
            "action_ranges": [(len(tokens), len(tokens) + len(sampled))],
            "rollout_log_probs": [0.0] * len(tokens) + logprobs,
            "reward": float(sum(sampled) % 7 + len(answer.choices[0].message.content)),
            "extra_logs": {"elsewhere": float(thread != threading.get_ident())},
        }
"""

REWARD = """
import torch

from openrlhf.utils import extract_boxed_answer, grade_answer


def reward_func(queries, prompts, labels):
    from openrlhf.utils.logging_utils import init_logger

    init_logger("reward").info("%d replies", len(queries))
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts))
    reward = torch.tensor([float(len(query) - len(prompt)) for query, prompt in zip(queries, prompts)])
    right = [grade_answer(extract_boxed_answer("\\\\boxed{1}"), label) for label in labels]
    return {
        "rewards": reward,
        "scores": torch.tensor(right).float(),
        "extra_logs": {"custom_metric": reward.mean().item(), "right": torch.tensor(right).float()},
    }
"""


def config(tiny_model_dir: Path, folder: Path, *, agent: str | None = None, reward: str | None = None) -> RLConfig:
    rows = [{"input": f"go {i}", "label": "1" if agent is None else f"label {i}"} for i in range(4)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = RLConfig()
    made.actor.model_name_or_path, made.actor.dtype = str(tiny_model_dir), DType.FLOAT32
    made.algo.advantage.estimator = "reinforce"
    made.data.prompt_dataset, made.data.label_key = str(folder / "data.jsonl"), "label"
    made.train.max_steps = 2
    made.rollout.batch_size, made.rollout.n_samples_per_prompt, made.rollout.max_new_tokens = 2, 2, 8
    if agent is not None:
        (folder / "agent_func.py").write_text(agent)
        made.train.agent_func_path = str(folder / "agent_func.py")
        made.rollout.stop_strings = ("\ufffd", *string.printable)  # a random model seldom ends a turn by itself
    if reward is not None:
        (folder / "reward_func.py").write_text(reward)
        made.reward.function_path = str(folder / "reward_func.py")
    made.ckpt.output_dir, made.logger.console = str(folder / "out"), False
    return made


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (RANDOM_STEPS, {"reward/reached_1": 1.0, "reward/reached_2": 1.0}),
        (GAME, {"reward/equal": 1.0, "reward/turns_played": 2.0}),
        (TOKEN_LEVEL, {"reward/segments": 2.0}),
        (AGENT, {"reward/counted": 4.0, "reward/turns": 3.0, "reward/score_mean": 0.0}),
        (OPENAI_SERVER, {"reward/elsewhere": 1.0}),
    ],
    ids=["random steps", "game", "token level", "openrlhf-agent", "openai server"],
)
def test_agent_files_train(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, wanted: dict[str, float]
) -> None:
    (tmp_path / "gem.py").write_text(GEM)
    monkeypatch.syspath_prepend(tmp_path)
    made = config(tiny_model_dir, tmp_path, agent=source)
    assert rollgrad.train(made).steps == 2
    for row in logged(tmp_path / "out"):
        assert {key: row[key] for key in wanted} == wanted
        assert row["policy/grad_norm"] > 0
        # A temperature of its own is not the one that the trainer scores with.
        assert source is TOKEN_LEVEL or row["policy/mismatch_abs"] < 1e-3


def test_a_reward_file_trains_from_the_command_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    made = config(tiny_model_dir, tmp_path, reward=REWARD)
    arguments = [
        *("train", "rl", "--actor.model_name_or_path", str(tiny_model_dir)),
        *("--algo.advantage.estimator", "reinforce", "--data.prompt_dataset", made.data.prompt_dataset),
        *("--data.label_key", "label", "--reward.function_path", str(made.reward.function_path)),
        *("--train.max_steps", "1", "--rollout.batch_size", "2", "--rollout.n_samples_per_prompt", "2"),
        *("--rollout.max_new_tokens", "8", "--ckpt.output_dir", made.ckpt.output_dir),
    ]
    assert main(arguments) == 0
    (row,) = logged(tmp_path / "out")
    assert row["reward/right"] == row["reward/score_mean"] == 1.0
    assert row["reward/custom_metric"] == pytest.approx(row["reward/mean"])


OLD_CONSTRUCTOR = """
from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        self.queue = result_queue

    async def execute(self, prompt, label, sampling_params):
        await self.queue.put(prompt)
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "async def step(state, action, label, **kwargs): ...",
            "a function step, as in OpenRLHF 0.8: make it the method",
        ),
        (OLD_CONSTRUCTOR.partition("    async")[0], "derive it from MultiTurnAgentExecutor"),
        (OLD_CONSTRUCTOR, "takes max_steps, max_length, llm_engine, hf_tokenizer, result_queue, as in OpenRLHF 0.8"),
        (
            OLD_CONSTRUCTOR.replace(", max_steps, max_length, llm_engine, hf_tokenizer, result_queue", ""),
            "execute does not take max_length, hf_tokenizer, llm_engine, as in OpenRLHF 0.8",
        ),
        ("AgentExecutor = object()", r"leave @ray\.remote out"),
        ("class AgentExecutor: pass", "has no `async def execute"),
        ("class AgentExecutor:\n def __init__(self): 1 / 0\n async def execute(self, **k): ...", "ZeroDivisionError"),
        ("from openrlhf.trainer import PPOTrainer", "rollgrad stands in for openrlhf, openrlhf.utils"),
        ("from openrlhf_agent.agentkit.session import AgentSession", "types only: install openrlhf_agent for the rest"),
        ("from openrlhf.utils.agent import Missing", "cannot import name 'Missing'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "agent.py"
    path.write_text(source)
    with pytest.raises(ConfigurationError, match=message):
        load_agent_file(str(path))


async def play(result: str, *, max_length: int = 50) -> list[Trajectory] | RolloutFailure:
    """An episode of an executor that samples four tokens after two, with keys of its answer replaced by `result`."""

    class Executor:
        async def execute(self, prompt: str, sampling_params: Any, llm_engine: Any, **others: Any) -> Any:
            tokens = [1, 2]
            output = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
            answer: Any = {
                "observation_tokens": [*tokens, *output.token_ids],
                "action_ranges": [(2, 6)],
                "rollout_log_probs": [
                    0.0,
                    0.0,
                    *(c[t].logprob for t, c in zip(output.token_ids, output.logprobs, strict=True)),
                ],
                "reward": 1.0,
            }
            return eval(result, {"answer": answer})

    engine, codec = FakeRolloutEngine(), FakeChatCodec()
    engine.set_version(3)
    executor = CustomAgentExecutor(Executor(), engine, codec, None, max_length=max_length)
    request = EpisodeRequest(
        prompt=Prompt(token_ids=(1, 2), text="ab"), params=SamplingParams(max_new_tokens=4), group_id=5, sample_id=6
    )
    return await executor.run(request)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("None", "returned NoneType, but it must return a dict, or a list of them"),
        ("[]", "returned an empty list"),
        ("{}", "without 'observation_tokens' and 'action_ranges'"),
        ("{**answer, 'action_ranges': [(4, 6), (2, 4)]}", r"range \(2, 4\) after one that ends at 6"),
        ("{**answer, 'action_ranges': [(2, 4), (3, 6)]}", "may not overlap"),
        ("{**answer, 'action_ranges': [(2, 7)]}", "only 6 observation_tokens"),
        ("{**answer, 'action_ranges': [(3, 2)]}", "0 <= start <= stop"),
        ("{**answer, 'action_ranges': [(-1, 2)]}", "0 <= start <= stop"),
        ("{**answer, 'action_ranges': [2, 3]}", "cannot be read"),
        ("{**answer, 'action_ranges': []}", "no sampled token"),
        ("{**answer, 'rollout_log_probs': [0.0]}", "1 rollout_log_probs for 6 observation_tokens"),
        ("{**answer, 'rollout_log_probs': [float('nan')] * 6}", "log-prob nan"),
        ("{**answer, 'rollout_log_probs': None, 'observation_tokens': [1] * 6}", "engine never sampled the tokens"),
        ("{**answer, 'reward': 'high'}", "reward is 'high', which is no number"),
        ("{**answer, 'reward': float('inf')}", "reward is inf: it must be finite"),
        ("{**answer, 'images': ['a.png']}", "returned images"),
        ("{**answer, 'extra_logs': {'note': 'text'}}", r"extra_logs\['note'\] is 'text'"),
    ],
)
async def test_a_wrong_result_costs_its_own_episode(result: str, message: str) -> None:
    import re

    failure = await play(result)
    assert isinstance(failure, RolloutFailure)
    assert failure.kind is FailureKind.ENVIRONMENT
    assert re.search(message, failure.message), failure.message


async def test_results_become_trajectories() -> None:
    (whole,) = await played("answer")
    assert [(s.kind.value, s.start, s.stop, s.reward) for s in whole.segments] == [
        ("prompt", 0, 2, 0.0),
        ("action", 2, 6, 1.0),
    ]
    assert (whole.score, whole.stop_reason, whole.group_id, whole.sample_id) == (1.0, StopReason.ENVIRONMENT, 5, 6)
    assert whole.versions_T.tolist() == [-1, -1, 3, 3, 3, 3]
    (filled,) = await played("{**answer, 'rollout_log_probs': None}")
    assert filled.logprobs_T.tolist() == whole.logprobs_T.tolist(), "the engine's own"
    (cut,) = await played("{**answer, 'scores': 0.5}", max_length=4)
    assert (len(cut), cut.stop_reason, cut.score) == (4, StopReason.LENGTH, 0.5)
    (reaching,) = await played("{**answer, 'action_ranges': [(2, 9)]}", max_length=6)
    assert reaching.action_length == 4, "the tokens were cut at the episode's length, the range was not"


async def test_the_rewards_of_segments_add_up() -> None:
    first, second = await played("[{**answer, 'reward': None}, {**answer, 'reward': 2.0, 'scores': 0.25}]")
    assert (first.reward, second.reward) == (0.0, 2.0)
    assert first.score == second.score == 0.25
    assert first.sample_id == second.sample_id
    both = await played("[answer, answer]")
    assert [trajectory.score for trajectory in both] == [2.0, 2.0]


async def played(result: str, **limits: int) -> list[Trajectory]:
    answer = await play(result, **limits)
    assert isinstance(answer, list), answer
    return answer


async def test_a_setting_that_no_engine_knows_is_refused() -> None:
    class Executor:
        async def execute(self, sampling_params: Any, llm_engine: Any, **others: Any) -> Any:
            sampling_params.repetition_penalty = 1.2
            return await llm_engine.generate([1], sampling_params)

    executor = CustomAgentExecutor(Executor(), FakeRolloutEngine(), FakeChatCodec(), None, max_length=9)
    request = EpisodeRequest(prompt=Prompt(token_ids=(1,), text="a"), params=SamplingParams(), group_id=0, sample_id=0)
    failure = await executor.run(request)
    assert isinstance(failure, RolloutFailure)
    assert "repetition_penalty=1.2" in failure.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"rewards": reward, ', ""), "gave no reward for its episode, and no reward is set that could judge it"),
        (('"rewards": reward, ', '"rewards": [1.0, 2.0], '), "rewards has 2 numbers"),
        (('"done": terminated or truncated,', ""), "without 'done'"),
        (
            ('return {"observation": states["observation"] + observation}', "return None"),
            r"reset\(\) returned NoneType",
        ),
    ],
)
def test_what_an_instance_leaves_out_is_said(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], message: str
) -> None:
    (tmp_path / "gem.py").write_text(GEM)
    monkeypatch.syspath_prepend(tmp_path)
    assert change[0] in GAME
    with pytest.raises(Exception, match=message):
        rollgrad.train(config(tiny_model_dir, tmp_path, agent=GAME.replace(*change)))


def python(code: str, folder: Path) -> str:
    """Returns the output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_real_packages_come_first(tmp_path: Path) -> None:
    (tmp_path / "openrlhf").mkdir()
    (tmp_path / "openrlhf" / "__init__.py").write_text("real = True")
    (tmp_path / "vllm.py").write_text("class SamplingParams: real = True")
    code = """
        import sys
        sys.path.insert(0, ".")
        from rollgrad.adapters.system.stand_ins import install
        install()
        import openrlhf
        from vllm import SamplingParams
        assert openrlhf.real and SamplingParams.real
        try:
            import openrlhf.utils.agent
        except ModuleNotFoundError as error:
            print(error)
    """
    assert python(code, tmp_path) == "No module named 'openrlhf.utils'"


def test_stand_ins_claim_no_installation(tmp_path: Path) -> None:
    code = """
        import importlib.util
        import sys
        from rollgrad.adapters.system.stand_ins import install
        install()
        install()
        assert [type(finder).__name__ for finder in sys.meta_path].count("StandInFinder") == 1
        assert importlib.util.find_spec("openrlhf") is None
        assert "torch" not in sys.modules and "openrlhf" not in sys.modules

        def later():
            import openrlhf.utils.agent
            from openrlhf_agent.types import ToolCall
            return openrlhf.utils.agent.AgentInstanceBase.__name__, ToolCall("1", "f").arguments

        print(later())
    """
    assert python(code, tmp_path) == "('AgentInstanceBase', {})"
