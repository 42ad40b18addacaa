"""Agent files, OpenRLHF's included, train a real (tiny) model unchanged."""

import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch

import rollgrad
from rollgrad.adapters.openrlhf.loading import load_agent_file
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.domain.errors import ConfigurationError, RewardError
from tests.example_runs import logged

GUIDE = """
from typing import Any, Dict

import torch

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs) -> dict:
        self.step_idx = 0
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        assert states["label"].startswith("label")
        assert "go" in states["observation_text"]
        assert states["sampling_params"].max_tokens == 8
        self.step_idx += 1
        done = self.step_idx >= 3
        reward = torch.tensor(float(len(states["action_text"])))
        return {
            "rewards": reward,
            "scores": torch.tensor(0.5),
            "environment_feedback": "" if done else "\\n\\nHuman: [INCORRECT]\\nTry again.\\n\\nAssistant: ",
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"step": self.step_idx},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""

CUSTOM = """
from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ranges, logprobs = [], [0.0] * len(tokens)
        for turn in range(2):
            sampling_params.max_tokens = 4
            output = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
            ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            tokens = tokens + output.token_ids
            logprobs += [choice[t].logprob for t, choice in zip(output.token_ids, output.logprobs)]
            if turn == 0:
                extra = hf_tokenizer(" again ", add_special_tokens=False)["input_ids"]
                tokens, logprobs = tokens + extra, logprobs + [0.0] * len(extra)
        return {
            "prompt": prompt, "label": label, "observation_tokens": tokens, "action_ranges": ranges,
            "rollout_log_probs": logprobs, "reward": float(sum(tokens) % 7), "scores": 1.0,
            "extra_logs": {"turns": len(ranges)}, "truncated": False,
        }
"""

WRAPPED = GUIDE.replace(
    "        super().__init__(AgentInstance)\n",
    "        super().__init__(AgentInstance)\n\n"
    "    async def execute(self, *args, **kwargs):\n"
    "        result = await super().execute(*args, **kwargs)\n"
    "        result['extra_logs']['wrapped'] = 1\n"
    "        return result\n",
)

NATIVE = """
from rollgrad.domain.ports.environment import StepResult


class Environment:
    def __init__(self):
        self.turns = 0

    async def reset(self, prompt):
        return ""

    async def step(self, action):
        self.turns += 1
        return StepResult(observation=" more ", reward=float(len(action.text)), terminated=self.turns == 2,
                          metrics={"turns": self.turns})

    async def close(self):
        pass
"""


def config(tiny_model_dir: Path, folder: Path, source: str) -> RLConfig:
    (folder / "agent_func.py").write_text(source)
    rows = [{"input": f"go {i}", "label": f"label {i}"} for i in range(4)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = RLConfig()
    made.actor.model_name_or_path, made.actor.dtype = str(tiny_model_dir), DType.FLOAT32
    made.algo.advantage.estimator = "reinforce"
    made.data.prompt_dataset, made.data.label_key = str(folder / "data.jsonl"), "label"
    made.train.agent_func_path, made.train.max_steps = str(folder / "agent_func.py"), 1
    made.rollout.batch_size, made.rollout.n_samples_per_prompt, made.rollout.max_new_tokens = 2, 2, 8
    made.rollout.stop_strings = ("\ufffd", *string.printable)  # a random model seldom ends a turn by itself
    made.ckpt.output_dir, made.logger.console = str(folder / "out"), False
    return made


def metrics(folder: Path) -> dict[str, Any]:
    (row,) = logged(folder / "out")
    return row


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (GUIDE, {"reward/step": 3.0, "reward/score_mean": 0.5}),
        (CUSTOM, {"reward/turns": 2.0, "reward/score_mean": 1.0}),
        (WRAPPED, {"reward/wrapped": 1.0}),
        (NATIVE, {"reward/turns": 2.0}),
        (NATIVE.replace("async def", "def"), {"reward/turns": 2.0}),
    ],
    ids=["guide", "custom", "wrapped", "native", "plain functions"],
)
def test_agent_files_train(tiny_model_dir: Path, tmp_path: Path, source: str, wanted: dict[str, float]) -> None:
    result = rollgrad.train(config(tiny_model_dir, tmp_path, source))
    assert result.steps == 1
    row = metrics(tmp_path)
    assert {key: row[key] for key in wanted} == wanted
    assert row["policy/mismatch_abs"] < 1e-3, "the trainer scores the tokens that the engine sampled"
    assert row["policy/grad_norm"] > 0


def test_turns_keep_their_own_rewards(tiny_model_dir: Path, tmp_path: Path) -> None:
    made = config(tiny_model_dir, tmp_path, GUIDE)
    made.algo.advantage.estimator = "turn_group_norm"
    rollgrad.train(made)
    row = metrics(tmp_path)
    assert sum(v for k, v in row.items() if k.startswith("policy/gradient_share_turn_")) == pytest.approx(1.0)


def test_limits_end_episodes(tiny_model_dir: Path, tmp_path: Path) -> None:
    made = config(tiny_model_dir, tmp_path, NATIVE.replace("self.turns == 2", "False"))
    made.rollout.max_episode_tokens, made.rollout.max_turns = 60, 1000
    rollgrad.train(made)
    row = metrics(tmp_path)
    assert row["rollout/truncated_share"] == 1.0
    assert 1 < row["reward/turns"] < 60


def test_slow_environments_are_cut_off(tiny_model_dir: Path, tmp_path: Path) -> None:
    slow = NATIVE.replace("self.turns += 1\n", "self.turns += 1\n        import asyncio; await asyncio.sleep(1000)\n")
    made = config(tiny_model_dir, tmp_path, slow)
    made.rollout.max_episode_seconds = 5
    rollgrad.train(made)
    assert metrics(tmp_path)["rollout/truncated_share"] == 1.0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "defines no class Environment"),
        ("def main(task): ...", r"\(it defines main\): call it by one of these names"),
        ("import nothing_like_this", "cannot be imported"),
        ("from openrlhf.models import Actor", "cannot be imported"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "agent.py"
    path.write_text(source)
    with pytest.raises(ConfigurationError, match=message):
        load_agent_file(str(path))


def test_an_agent_may_rewrite_its_prompt(tiny_model_dir: Path, tmp_path: Path) -> None:
    source = GUIDE.replace('{"observation": states["observation"]}', '{"observation": "We go. " + states["label"]}')
    source = source.replace('assert "go" in', 'assert "user" not in states["observation_text"] and "We go. label" in')
    rollgrad.train(config(tiny_model_dir, tmp_path, source))
    assert metrics(tmp_path)["policy/mismatch_abs"] < 1e-3


UNREWARDED = {
    "instance": GUIDE.replace('"rewards": reward,', '"rewards": None,').replace('"scores": torch.tensor(0.5),', ""),
    "instance without the key": GUIDE.replace('"rewards": reward,', "").replace('"scores": torch.tensor(0.5),', ""),
    "instance that is wrapped": WRAPPED.replace('"rewards": reward,', "").replace('"scores": torch.tensor(0.5),', ""),
    "executor": CUSTOM.replace('"reward": float(sum(tokens) % 7), "scores": 1.0,', ""),
    "environment": NATIVE.replace("float(len(action.text))", "None"),
    "program": "def run_agent(task):\n    import openai\n    client = openai.OpenAI(base_url=task.base_url, "
    "api_key=task.api_key)\n    client.chat.completions.create(model=task.model, "
    "messages=[{'role': 'user', 'content': 'go'}])\n",
}
"""Agent files that leave the judgement to the run."""
QUERIES = """
def reward_func(queries, prompts, labels, tokens):
    assert all(label.startswith("label") for label in labels)
    assert all(query.startswith("<|im_start|>") and "<|im_end|>" in query for query in queries)
    assert all(tokens)
    return [2.5] * len(queries)
"""


@pytest.mark.parametrize("source", UNREWARDED.values(), ids=UNREWARDED)
def test_an_agent_without_rewards_is_judged_by_the_configured_one(
    source: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    made = config(tiny_model_dir, tmp_path, source)
    made.reward.function_path = str(tmp_path / "reward.py")
    (tmp_path / "reward.py").write_text(QUERIES)
    rollgrad.train(made)
    row = metrics(tmp_path)
    assert (row["reward/mean"], row["reward/score_mean"]) == (2.5, 2.5)


@pytest.mark.parametrize("source", UNREWARDED.values(), ids=UNREWARDED)
def test_an_agent_without_rewards_and_none_configured_ends_the_run(
    source: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"gave no reward for its episode.*--reward\.function_path"):
        rollgrad.train(config(tiny_model_dir, tmp_path, source))


@pytest.mark.parametrize("source", [UNREWARDED["executor"], UNREWARDED["environment"], None])
def test_a_reward_model_judges_the_very_tokens_of_an_episode(
    source: str | None, tiny_model_dir: Path, reward_model_dir: Path, tmp_path: Path
) -> None:
    made = config(tiny_model_dir, tmp_path, source or "")
    made.train.agent_func_path = made.train.agent_func_path if source else None
    made.reward.model_name_or_path, made.reward.timeout = str(reward_model_dir), 120.0
    groups: list[RolloutGroup] = []
    rollgrad.train(made, sample_log=lambda step, played: groups.extend(played))
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(reward_model_dir, dtype=torch.float32).eval()
    played = [trajectory for group in groups for trajectory in group.trajectories]
    with torch.no_grad():
        wanted = [float(model(trajectory.token_ids_T[None]).logits) for trajectory in played]
    assert [trajectory.reward for trajectory in played] == pytest.approx(wanted, abs=1e-5)
    assert len(set(wanted)) == 4, "episodes that score alike would show nothing"


def test_an_agent_s_own_rewards_go_before_the_configured_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    made = config(tiny_model_dir, tmp_path, NATIVE)
    made.reward.function_path = str(tmp_path / "reward.py")
    (tmp_path / "reward.py").write_text("def reward_func(queries):\n    return [1000.0] * len(queries)\n")
    rollgrad.train(made)
    assert metrics(tmp_path)["reward/mean"] < 500


def test_what_an_agent_raises_is_its_own_failure(tiny_model_dir: Path, tmp_path: Path) -> None:
    source = CUSTOM.replace("for turn in range(2):", "raise ValueError('no such door')\n        for turn in range(2):")
    with pytest.raises((RewardError, Exception), match="The agent raised ValueError: no such door"):
        rollgrad.train(config(tiny_model_dir, tmp_path, source))
