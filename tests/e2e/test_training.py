"""Whole runs of the command line and the library on the tiny model."""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import rollgrad
from rollgrad.adapters.engines.embedded.weights import SharedWeights
from rollgrad.adapters.tracking.trajectory_files import read_trajectories
from rollgrad.application.settings.presets import PRESETS
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.algorithms.catalogue import ESTIMATORS
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.cli.main import main
from rollgrad.testing.clock import FakeClock
from rollgrad.testing.metric_sink import FakeMetricSink
from rollgrad.testing.prompt_source import FakePromptSource
from rollgrad.testing.reward_source import FakeRewardSource
from tests.example_runs import logged
from tests.fakes.hub import hub_double

REWARD = """
def reward_func(queries, prompts, labels):
    replies = [q[len(p):] for q, p in zip(queries, prompts, strict=True)]
    return {"rewards": [sum(c.isalpha() for c in r) / (1 + len(r)) for r in replies],
            "extra_logs": {"length": [len(r) for r in replies]}}
"""
STEP_KEYS = {
    "step",
    "reward/mean",
    "reward/score_mean",
    "rollout/samples",
    "rollout/response_length_mean",
    "rollout/response_length_max",
    "rollout/truncated_share",
    "rollout/zero_spread_share",
    "advantage/mean",
    "advantage/abs_mean",
    "policy/loss",
    "policy/entropy",
    "policy/grad_norm",
    "policy/lr",
    "policy/approx_kl",
    "policy/clip_low_share",
    "policy/clip_high_share",
    "policy/ratio_mean",
    "time/generate_s",
    "time/experience_s",
    "time/update_s",
    "time/sync_s",
    "time/step_s",
}
"""Metrics that each step reports, whatever the settings."""


@pytest.fixture
def workspace(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a dataset, a reward function and a configuration of two steps."""
    rows = [{"input": f"What is {a} plus {b}?", "label": str(a + b)} for a in range(1, 4) for b in range(1, 4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text(REWARD)
    settings = {
        "actor": {"model_name_or_path": str(tiny_model_dir), "dtype": "float32", "adam": {"lr": 1e-3}},
        "algo": {"advantage": {"estimator": "group_norm"}},
        "data": {"prompt_dataset": "prompts.jsonl", "label_key": "label"},
        "reward": {"function_path": "reward.py"},
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 3, "max_new_tokens": 8},
        "train": {"max_steps": 2, "seed": 5},
        "logger": {"console": False},
        "ckpt": {"output_dir": "out"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*flags: str) -> int:
    return main(["train", "rl", "--config", "run.yaml", *flags])


def metrics(output: str = "out") -> list[dict[str, float]]:
    return logged(Path(output))


def timeless(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if not key.startswith(("time/", "memory/"))} for row in rows]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}


def moved(before: Path, after: Path) -> float:
    old, new = weights(before), weights(after)
    assert old.keys() == new.keys()
    return max(float((old[name] - new[name]).abs().max()) for name in old)


QUICK = ("gae", "group_norm")
OF_PRESETS = {settings.get("algo.advantage.estimator") for settings in PRESETS.values()}
"""Estimators by which test_algorithms.py trains anyway."""
PLAIN = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow, *[pytest.mark.wide] * (name in OF_PRESETS)])
    for name, traits in ESTIMATORS.items()
    if {*traits.needs} <= {"group", "critic"}
]
"""Estimators that need no more than samples and a critic."""


@pytest.mark.parametrize("estimator", PLAIN)
def test_every_estimator_trains(
    workspace: Path, tiny_model_dir: Path, estimator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--algo.advantage.estimator", estimator) == 0
    rows = metrics()
    assert [row["step"] for row in rows] == [1, 2]
    expected = STEP_KEYS | {"reward/length"}
    if "critic" in ESTIMATORS[estimator].needs:
        expected |= {f"critic/{key}" for key in ("loss", "value_loss", "value_clip_share", "grad_norm", "lr")}
        expected |= {"critic/explained_variance"}
    for row in rows:
        assert expected <= row.keys()
        assert all(value is not None and math.isfinite(value) for value in row.values())
        assert row["rollout/samples"] == 12
        assert row["policy/ratio_mean"] == pytest.approx(1.0)
    assert moved(tiny_model_dir, workspace / "out" / "model") > 1e-4
    state = json.loads((workspace / "out" / "model.state.json").read_text())
    assert state["step"] == 2
    assert capsys.readouterr().out.strip().endswith("report.html")


def test_a_run_whose_replies_were_all_cut_off_learns_nothing_from_them(
    workspace: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the masks of `algo.mask_truncated` there is no optimizer step, and the run says why at its end."""
    assert train("--algo.mask_truncated", "--rollout.max_new_tokens", "2", "--train.max_steps", "3") == 0
    rows = metrics()
    assert [row["rollout/truncated_share"] for row in rows] == [1.0] * 3
    assert not any(key.startswith("policy/") for row in rows for key in row)
    assert moved(tiny_model_dir, workspace / "out" / "model") == 0.0
    assert "--rollout.max_new_tokens" in capsys.readouterr().err


@pytest.mark.parametrize("partial", ["none", "keep", "recompute"])
def test_asynchronous_runs_train(
    workspace: Path, tiny_model_dir: Path, partial: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overlap = ("--train.async_enable", "--train.max_staleness", "2", "--train.partial_rollout", partial)
    assert train(*overlap, "--algo.correction.level", "off") == 2
    assert "--algo.correction.level to auto" in capsys.readouterr().err
    assert train(*overlap, "--train.max_steps", "4", "--ckpt.state_steps", "2") == 0
    rows = metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert STEP_KEYS | {"staleness/mean", "staleness/share_lag_2", "time/trainer_idle_share"} <= row.keys()
        assert row["staleness/max"] <= 2
    assert moved(tiny_model_dir, workspace / "out" / "model") > 1e-4
    state = json.loads((workspace / "out" / "model.state.json").read_text())
    assert (state["trained"], state["dropped"], state["pending"]) == (16, {}, [])


BITS = ("--actor.deterministic",) if torch.cuda.is_available() else ()
"""Flags with which the same numbers give the same bits: a GPU adds up in any order."""


def test_the_same_seed_gives_the_same_run(workspace: Path) -> None:
    for output in ("a", "b"):
        assert train(*BITS, "--ckpt.output_dir", output) == 0
    assert train(*BITS, "--ckpt.output_dir", "c", "--train.seed", "6") == 0
    assert timeless(metrics("a")) == timeless(metrics("b"))
    assert timeless(metrics("a")) != timeless(metrics("c"))
    first, second = weights(workspace / "a" / "model"), weights(workspace / "b" / "model")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert Path("a/samples.jsonl").read_text() == Path("b/samples.jsonl").read_text()


RESUMABLE = {
    "grpo": ("--algo.kl.init_coef", "0.1", "--algo.kl.target", "0.001", "--reward.normalize", "running"),
    "ppo": (
        *("--algo.advantage.estimator", "gae", "--train.batch_size", "5", "--actor.lr_scheduler", "linear"),
        *("--actor.optim", "muon", "--train.enable_ema"),
    ),
    "float16": ("--actor.dtype", "float16", "--data.curriculum_range", "0.0", "0.4"),
}


@pytest.mark.parametrize("flags", RESUMABLE.values(), ids=RESUMABLE)
def test_a_resumed_run_is_the_run_that_was_never_interrupted(
    workspace: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_background = ("--ckpt.state_steps", "2", "--ckpt.async_save") if "gae" in flags else ()
    flags = (*BITS, *flags, "--eval.dataset", "prompts.jsonl", "--eval.max_samples", "3")
    assert train(*flags, *in_background, "--train.max_steps", "4", "--ckpt.output_dir", "whole") == 0
    push = SharedWeights.push

    async def interrupt(self: SharedWeights, policy: Any, version: int) -> dict[str, float]:
        result = await push(self, policy, version)
        if version == 3:  # after the state of step 2, before that of step 4
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(SharedWeights, "push", interrupt)
    stated = (*flags, "--train.max_steps", "4", "--ckpt.state_steps", "2")
    assert train(*stated) == 130
    assert "Ctrl-C broke off the end of the run, so that not all may be saved: --ckpt.resume" in capsys.readouterr().err
    monkeypatch.setattr(SharedWeights, "push", push)
    if in_background:  # the state that was written while a run went on
        for own in Path("out").glob("training_state_*"):
            shutil.rmtree(own)
        shutil.move("whole/training_state_2", "out")
    assert train(*stated, "--ckpt.resume") == 0
    assert timeless(metrics()) == timeless(metrics("whole"))
    for model in ("model", "model/ema") if "--train.enable_ema" in flags else ("model",):
        resumed, whole = weights(Path("out", model)), weights(Path("whole", model))
        assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert Path("out/samples.jsonl").read_text() == Path("whole/samples.jsonl").read_text()


def test_a_mixture_of_experts_is_trained_and_balanced(workspace: Path, tiny_mixture_dir: Path) -> None:
    flags = ("--actor.model_name_or_path", str(tiny_mixture_dir), "--actor.aux_loss_coef", "0.1")
    assert train(*flags, "--train.max_tokens_per_micro_batch", "200") == 0
    for row in metrics():
        assert 2 <= row["policy/aux_loss"] <= 4, "two of four experts a token"
    assert moved(tiny_mixture_dir, Path("out/model")) > 0


@pytest.mark.parametrize("replay", ["trainer", "engine"])
def test_updates_of_a_mixture_replay_its_experts(workspace: Path, tiny_mixture_dir: Path, replay: str) -> None:
    """In asynchronous runs the engine has weights of its own, and what goes on is in the training state."""
    flags = ("--actor.model_name_or_path", str(tiny_mixture_dir), "--actor.router_replay", replay)
    more = ("--train.batch_size", "6") if replay == "trainer" else ("--train.async_enable", "--ckpt.state_steps", "1")
    assert train(*flags, *more, "--actor.gradient_checkpointing") == 0
    assert moved(tiny_mixture_dir, Path("out/model")) > 0


def test_asynchronous_runs_take_out_the_mean_score(workspace: Path, tiny_model_dir: Path) -> None:
    """Score centering of replies that go on under new weights, resumed from a state with some of them in it."""
    flags = ("--algo.score_centering_top_k", "16", "--algo.correction.level", "off", "--train.max_staleness", "2")
    flags += ("--train.async_enable", "--train.partial_rollout", "recompute")
    assert train(*flags, "--ckpt.state_steps", "1", "--train.max_steps", "1") == 0
    assert train(*flags, "--ckpt.resume", "--train.max_steps", "3") == 0
    first, *later = metrics()
    assert first["policy/centering_residual"] == pytest.approx(0.0, abs=1e-4), "the sampler is the policy itself"
    for row in (first, *later):
        masses = row["policy/centering_sampler_mass"], row["policy/centering_policy_mass"]
        assert 16 / 1000 < min(masses) <= max(masses) <= 1
    assert max(row["policy/centering_residual"] for row in later) > 1e-3
    assert moved(tiny_model_dir, workspace / "out" / "model") > 1e-4


@pytest.mark.parametrize("pipeline", ["alternating", "overlapping"])
def test_a_vote_needs_no_labels(workspace: Path, tiny_model_dir: Path, pipeline: str) -> None:
    """The kept rollouts are worth what their group has elected; held-out ones what their labels say."""
    held_out = [json.loads(line) for line in Path("prompts.jsonl").read_text().splitlines()]
    Path("held_out.jsonl").write_text("\n".join(map(json.dumps, held_out)))
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"input": row["input"]}) for row in held_out))
    flags = ["--reward.function_path", "None", "--reward.verifier", "exact_match", "--reward.majority_vote"]
    flags += ["--data.label_key", "None", "--rollout.max_new_tokens", "1", "--rollout.temperature", "0.3"]
    if pipeline == "overlapping":
        flags += ["--train.async_enable", "--train.partial_rollout", "keep"]
    assert train(*flags) == 0
    for step in (1, 2):
        kept = read_trajectories(Path(f"out/trajectories/step-00000{step}.parquet")).to_pylist()
        for group in {row["group_id"] for row in kept}:
            rows = sorted((row for row in kept if row["group_id"] == group), key=lambda row: row["sample_id"])
            replies = [tuple(row["token"][row["prompt_tokens"] :]) for row in rows]
            elected = max(replies, key=replies.count)
            assert [row["score"] for row in rows] == [float(reply == elected) for reply in replies]
    assert any(row["reward/mean"] < 1 for row in metrics())
    assert all(row["reward/mean"] >= 1 / 3 for row in metrics())


@pytest.mark.parametrize("pipeline", ["alternating", "overlapping"])
def test_rollouts_that_repeat_themselves_are_left_out(workspace: Path, pipeline: str) -> None:
    """A policy that is hardly ever in doubt, at a low temperature, seems to repeat itself all the time."""
    flags = ["--algo.mask_repetition", "3", "--train.max_steps", "2"]
    if pipeline == "overlapping":
        flags += ["--train.async_enable", "--train.partial_rollout", "keep"]
    assert train(*flags) == 0
    assert [row["policy/repetition_share"] for row in metrics()] == [0.0, 0.0]
    assert train(*flags, "--rollout.temperature", "0.02", "--ckpt.output_dir", "cold") == 0
    for row in metrics("cold"):
        assert row["policy/repetition_share"] > 0
        assert row.get("policy/trained_share", 0.0) <= 1 - row["policy/repetition_share"]


@pytest.mark.parametrize("pipeline", ["alternating", "overlapping"])
def test_the_most_uncertain_tokens_are_learned_from(workspace: Path, tiny_model_dir: Path, pipeline: str) -> None:
    """However the step is divided; also of replies that go on under new weights."""
    flags = ["--algo.top_entropy_quantile", "0.2"]
    if pipeline == "overlapping":
        flags += ["--train.async_enable", "--train.max_staleness", "2", "--train.partial_rollout", "keep"]
    assert train(*flags, "--train.max_steps", "3") == 0
    for row in metrics():
        assert 0.2 <= row["policy/high_entropy_share"] < 0.35
    assert moved(tiny_model_dir, workspace / "out" / "model") > 1e-4
    first = metrics()[0]
    if pipeline == "alternating":
        flags += ["--train.max_tokens_per_micro_batch", "60", "--ckpt.output_dir", "divided"]
        assert train(*flags, "--train.max_steps", "1") == 0
        for name in ("high_entropy_share", "grad_norm"):
            assert metrics("divided")[0][f"policy/{name}"] == pytest.approx(first[f"policy/{name}"], rel=1e-3)


def test_resuming_from_nothing_or_something_else_is_refused(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--ckpt.resume") == 2
    assert "holds no training state" in capsys.readouterr().err
    assert train("--ckpt.state_steps", "1", "--train.max_steps", "1") == 0
    assert train("--ckpt.resume", "--algo.advantage.estimator", "gae") == 2
    assert "algo.advantage.estimator is 'gae', but was 'group_norm' when the run began" in capsys.readouterr().err
    Path("out/training_state_1/state.pt").write_bytes(b"not a state")
    assert train("--ckpt.resume") == 2
    assert "state.pt of training_state_1 is not what was written" in capsys.readouterr().err


@pytest.mark.slow
def test_the_size_of_a_micro_batch_changes_nothing(workspace: Path) -> None:
    assert train("--ckpt.output_dir", "whole") == 0
    assert train("--ckpt.output_dir", "parts", "--train.max_tokens_per_micro_batch", "40") == 0
    for whole, parts in zip(timeless(metrics("whole")), timeless(metrics("parts")), strict=True):
        for row in (whole, parts):
            row.pop("policy/mismatch_equal_share")  # equal to the bit: products of another size round differently
        assert parts == pytest.approx(whole, rel=1e-3, abs=1e-5)


def test_kl_in_the_reward_with_an_adaptive_weight(workspace: Path) -> None:
    assert train("--algo.kl.init_coef", "0.1", "--algo.kl.target", "0.001", "--algo.kl.horizon", "100") == 0
    first, second = metrics()
    assert first["policy/ref_kl"] == pytest.approx(0.0, abs=1e-5), "the policy starts as its reference"
    assert second["policy/ref_kl"] != 0.0
    assert first["policy/kl_coef"] == 0.1
    assert second["policy/kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 12 / 100))
    assert second["policy/mismatch_abs"] < 1e-4


@pytest.mark.slow
def test_kl_as_a_loss(workspace: Path) -> None:
    flags = ("--algo.kl.init_coef", "0.5", "--algo.kl.use_loss", "--algo.kl.estimator", "k3")
    assert train(*flags, "--train.batch_size", "6") == 0
    assert train("--train.batch_size", "6", "--ckpt.output_dir", "without") == 0
    with_kl, without = metrics(), metrics("without")
    assert all(row["policy/ref_kl"] >= 0 for row in with_kl)
    assert with_kl[1]["policy/ref_kl"] > 0
    assert timeless(without) != timeless([{k: v for k, v in row.items() if "kl" not in k} for row in with_kl])
    assert "policy/ref_kl" not in without[0]


@pytest.mark.parametrize("old", ["recompute", pytest.param("rollout", marks=pytest.mark.slow)])
def test_several_epochs_and_minibatches(workspace: Path, old: str) -> None:
    flags = f"--train.max_epochs 2 --train.batch_size 5 --algo.old_logprobs {old} --actor.adam.lr 0.01"
    assert train(*flags.split(), "--actor.lr_scheduler", "linear", "--actor.min_lr_ratio", "0.0") == 0
    rows = metrics()
    assert all(row["policy/ratio_mean"] != 1.0 for row in rows)
    assert any(row["policy/clip_low_share"] + row["policy/clip_high_share"] > 0 for row in rows)
    mismatch = rows[0]["policy/mismatch_equal_share"]
    assert (mismatch == 1.0) == (old == "rollout")
    # 12 optimizer steps in all: the mean rates of steps 0-5 and 6-11 on a line from 0.01 to 0.
    assert [row["policy/lr"] for row in rows] == pytest.approx([0.01 * (1 - 2.5 / 12), 0.01 * (1 - 8.5 / 12)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_sixteen_bits_and_gradient_checkpointing(workspace: Path, tiny_model_dir: Path, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    assert train("--actor.dtype", name, "--actor.gradient_checkpointing", "--rollout.temperature", "0.8") == 0
    assert len(metrics()) == 2
    assert all(("policy/loss_scale" in row) == (dtype == torch.float16) for row in metrics())
    from safetensors.torch import load_file

    saved = load_file(workspace / "out" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {dtype}


def test_evaluation_and_checkpoints_on_schedule(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--eval.dataset prompts.jsonl --eval.steps 1 --eval.max_samples 4 --ckpt.save_steps 1"
    assert train(*flags.split(), "--train.max_steps", "3", "--logger.console", "--logger.log_samples", "2") == 0
    rows = metrics()
    assert [row["step"] for row in rows if "eval/pass@1" in row] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2, 3]
    assert {path.name for path in Path("out").iterdir() if path.is_dir()} == {
        "step_1",
        "step_2",
        "model",
        "training_state_3",
        "trajectories",
    }
    assert len(Path("out/samples.jsonl").read_text().splitlines()) == 6
    assert "eval/pass@1" in capsys.readouterr().out


def test_a_best_model_by_another_evaluation_is_not_replaced(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated = ("--eval.dataset", "prompts.jsonl", "--eval.steps", "1", "--ckpt.resume", "auto")
    assert train(*evaluated, "--train.max_steps", "1", "--ckpt.best_metric", "eval/mean@1") == 0
    best = weights(Path("out/best"))
    assert train(*evaluated, "--train.max_steps", "2") == 0  # the metric is forgotten once
    capsys.readouterr()
    other = ("--ckpt.best_metric", "eval/mean@1", "--eval.max_samples", "3")
    assert train(*evaluated, *other, "--train.max_steps", "3") == 0
    assert "a new search for the best begins" in capsys.readouterr().err
    assert json.loads(Path("out/best_1.state.json").read_text())["step"] == 1
    assert all(torch.equal(tensor, best[name]) for name, tensor in weights(Path("out/best_1")).items())
    assert json.loads(Path("out/best.state.json").read_text())["step"] == 3
    assert "| nan |" in Path("out/model/README.md").read_text(), "what was measured at first is nothing to compare with"
    assert train("--train.max_steps", "1", "--ckpt.overwrite") == 0
    assert not [*Path("out").glob("best*")]


@pytest.mark.slow
def test_the_model_is_on_the_hub_when_the_run_has_finished(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_a-token-of-nobody")
    with hub_double() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        hub.broken = True
        assert train("--train.max_steps", "1", "--ckpt.push_to_hub", "me/name") == 0
        assert Path("out/report.html").is_file(), "nothing waits for the hub"
        hub.broken = False
        assert train("--train.max_steps", "1", "--ckpt.push_to_hub", "me/name", "--ckpt.resume") == 0
        assert hub.files == {path.name: path.read_bytes() for path in Path("out/model").iterdir()}
        assert b"rollgrad" in hub.files["README.md"]
        hub.files.clear()
        # No reply is right, so that no evaluation is better than the first.
        best = ("--eval.dataset", "prompts.jsonl", "--eval.steps", "1", "--ckpt.best_metric", "eval/pass@1")
        assert train(*best, "--ckpt.push_to_hub", "me/name", "--ckpt.overwrite") == 0
    assert json.loads(Path("out/best.state.json").read_text())["step"] == 1
    assert hub.files == {path.name: path.read_bytes() for path in Path("out/best").iterdir()}
    assert hub.files["model.safetensors"] != Path("out/model/model.safetensors").read_bytes()
    assert b"in 1 step " in hub.files["README.md"]
    assert b"eval/pass@1" in hub.files["README.md"]


def test_one_pass_over_the_prompts_by_default(workspace: Path) -> None:
    assert train("--train.max_steps", "None") == 0
    assert len(metrics()) == 3  # 9 prompts, 4 a rollout


@pytest.mark.slow
def test_reasoning_gym_tasks_bring_prompts_and_reward(workspace: Path) -> None:
    flags = ("--reward.function_path", "None", "--data.label_key", "None", "--data.size", "6")
    assert train(*flags, "--data.prompt_dataset", "reasoning_gym:basic_arithmetic") == 0
    assert [row["rollout/samples"] for row in metrics()] == [12, 12]


@pytest.mark.slow
def test_the_command_line_as_a_process(workspace: Path, rollgrad_command: list[str]) -> None:
    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=workspace, capture_output=True, text=True, timeout=400)

    trained = run(*rollgrad_command, "train", "rl", "--config", "run.yaml")
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout == "out/report.html\n"
    assert "Traceback" not in trained.stderr
    warnings = [line for line in trained.stderr.splitlines() if "arning" in line]
    assert all("were cut off" in line for line in warnings), "a finding of this run, and none of a library"
    flags = "--actor.model_name_or_path out/model --eval.dataset prompts.jsonl --json"
    evaluated = run(*rollgrad_command, "eval", "--config", "run.yaml", *flags.split())
    assert evaluated.returncode == 0, evaluated.stderr
    found = json.loads(evaluated.stdout)
    assert {
        "eval/pass@1",
        "eval/mean@1",
        "eval/response_length_mean",
        "eval/truncated_share",
        "eval/failed",
        "eval/pass@1_stderr",
        "eval/mean_stderr",
        "eval/length",  # which the reward tells
    } == found.keys()
    assert 0 < found["eval/mean@1"] < 1


def continued_evaluation(written: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns the results of an evaluation of two models that ends within the second's first prompt, and continues;
    after it has refused to continue by other settings."""
    path = Path("kept/replies.jsonl")
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    path.write_text("".join([*lines[:9], lines[9][:40]]))
    for flags, changed in (
        (["--eval.top_p", "0.5"], "eval.top_p"),
        (["--eval.max_samples", "1"], "prompts"),
        (["--reward.pass_threshold", "0.7"], "reward.pass_threshold"),
    ):
        assert main([*written, *flags]) == 2
        assert f"differ in {changed} (" in capsys.readouterr().err
    assert path.read_text().count("\n") == 9, "what was refused changes nothing"
    assert main(written) == 0
    told = capsys.readouterr()
    assert "done=2" in told.err.replace("=2 ", "=2"), "of the first model all prompts are there"
    assert sorted(path.read_text().splitlines()) == sorted(whole.splitlines())
    return json.loads(told.out)


@pytest.mark.slow
def test_evaluation_with_several_samples(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--eval.dataset", "prompts.jsonl", "--eval.n_samples_per_prompt", "4", "--eval.temperature", "1.0")
    assert main(["eval", "--config", "run.yaml", *flags, "--reward.pass_threshold", "0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 <= found["eval/pass@1"] <= found["eval/pass@2"] <= found["eval/pass@4"] <= 1
    assert main(["eval", "--config", "run.yaml", *flags]) == 0
    assert "eval/pass@4" in capsys.readouterr().out
    likeliest = []
    for more in (("--eval.top_k", "1"), ("--eval.top_p", "1e-9"), ("--eval.temperature", "0")):
        own = [*flags, *more, "--eval.n_samples_per_prompt", "1"]
        assert main(["eval", "--config", "run.yaml", *own, "--json"]) == 0
        likeliest.append(json.loads(capsys.readouterr().out))
    assert likeliest[0] == likeliest[1] == likeliest[2] != found
    shutil.copytree(rollgrad.load_config("run.yaml").actor.model_name_or_path, "copied")
    few = (*flags, "--eval.max_samples", "2")
    written = ["eval", "copied", "./copied", "--config", "run.yaml", *few, "--json", "--output", "kept/replies.jsonl"]
    Path("kept").mkdir()
    Path("kept", "replies.jsonl").touch()  # as a start that failed leaves it
    assert main(written) == 0
    both = json.loads(capsys.readouterr().out)
    kept = [json.loads(line) for line in Path("kept/replies.jsonl").read_text().splitlines()]
    models, groups = (sorted(row[name] for row in kept) for name in ("model", "group_id"))
    assert (models, groups) == ((["./copied"] * 8 + ["copied"] * 8), [0] * 8 + [1] * 8)
    assert fmean(row["score"] for row in kept) == pytest.approx(both["copied"]["eval/mean@4"])
    assert all(row["prompt"] and row["response"] and row["label"] and row["stop_reason"] for row in kept)
    assert continued_evaluation(written, capsys) == both
    assert {name: value for name, value in both["./copied"].items() if "difference" not in name} == both["copied"]
    assert both["./copied"]["eval/pass@1_difference"] == both["./copied"]["eval/mean_difference_stderr"] == 0
    assert main(["eval", "copied", "./copied", "--config", "run.yaml", *few]) == 0
    assert re.search(r"metric .* copied .* ./copied", capsys.readouterr().out)
    assert main(["eval", "copied", "absent/", "--config", "run.yaml", *few]) == 2
    assert "'absent/'" in capsys.readouterr().err
    shutil.copytree("copied", "broken")
    weights = load_file("copied/model.safetensors")
    save_file({name: weights[name] for name in sorted(weights)[1:]}, "broken/model.safetensors", {"format": "pt"})
    assert main(["eval", "copied", "broken", "--config", "run.yaml", *few, "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"copied": both["copied"]}, "what was evaluated before is told"
    assert not Path("out").exists(), "evaluation writes nothing"


def library_config() -> rollgrad.RLConfig:
    config = rollgrad.load_config("run.yaml")
    config.reward.function_path = None
    return config


def vowels(queries: list[str], prompts: list[str], labels: list[Any]) -> list[float]:
    return [sum(c in "aeiou" for c in q[len(p) :]) / 8 for q, p in zip(queries, prompts, strict=True)]


@pytest.mark.parametrize(
    "reward", [vowels, FakeRewardSource(lambda request: len(request.response) / 10)], ids=["function", "source"]
)
def test_the_library_takes_rewards_and_adapters(
    workspace: Path, tiny_model_dir: Path, reward: "Callable[..., Any] | FakeRewardSource"
) -> None:
    sink = FakeMetricSink()
    result = rollgrad.train(library_config(), reward=reward, sink=sink, clock=FakeClock())
    assert result.steps == 2
    assert not result.interrupted
    assert [step for step, _ in sink.records] == [1, 2]
    assert sink.closed
    assert sink.records[0][1]["time/step_s"] == 0.0
    assert moved(tiny_model_dir, result.model) > 1e-4
    assert result.report is None, "without metrics.jsonl there is nothing to report"


def test_the_library_evaluates_rows_of_the_caller(workspace: Path) -> None:
    """In the place of `eval.dataset`, which need not be set; what are no rows is refused, and not passed over."""
    config = library_config()
    config.eval.dataset, config.eval.max_samples = None, 2
    asked: list[str] = []

    def heard(request: RewardRequest) -> float:
        asked.append(request.label)
        return 1.0

    rows = [{"prompt": f"{n} + 1", "label": f"own {n}"} for n in range(3)]
    config.data.input_key, config.data.label_key = "prompt", "label"
    found = rollgrad.evaluate(config, reward=FakeRewardSource(heard), prompts=rows)
    assert sorted(asked) == ["own 0", "own 1"]
    assert found["eval/mean@1"] == 1.0
    for wrong in ([], FakePromptSource([])):
        with pytest.raises(ConfigurationError, match=r"evaluate\(\) takes a list of mappings"):
            rollgrad.evaluate(config, reward=FakeRewardSource(heard), prompts=wrong)


async def test_the_library_inside_a_running_loop(workspace: Path) -> None:
    result = rollgrad.train(library_config(), reward=vowels)
    assert result.steps == 2
    assert result.report is not None
    assert result.report.exists()


def test_an_unknown_adapter_is_refused_with_the_known_ones(workspace: Path) -> None:
    with pytest.raises(ValueError, match=r"'motor'.*engine"):
        rollgrad.train(library_config(), reward=vowels, motor=object())


def test_what_is_evaluated_is_the_model_as_it_is(workspace: Path) -> None:
    """Training would change it: an evaluation does not."""
    config = library_config()
    config.eval.dataset, config.eval.temperature = "prompts.jsonl", 0.0
    replies: list[str] = []

    def heard(request: RewardRequest) -> float:
        replies.append(request.response)
        return 1.0

    for lora in (LoraConfig(), LoraConfig(rank=4, load_in_4bit=True)):
        config.actor.lora = lora
        rollgrad.evaluate(config, reward=FakeRewardSource(heard))
    count = len(replies) // 2
    assert replies[:count] == replies[count:]
    assert any(replies)


def test_evaluate_returns_the_metrics(workspace: Path) -> None:
    config = library_config()
    config.eval.dataset = "prompts.jsonl"
    config.eval.max_samples = 3
    seen: list[RewardRequest] = []

    def all_right(request: RewardRequest) -> float:
        seen.append(request)
        return 1.0

    found = rollgrad.evaluate(config, reward=FakeRewardSource(all_right))
    assert found["eval/pass@1"] == 1.0
    assert [request.label for request in seen] == ["2", "3", "4"]
    assert Reward(value=1.0).score is None
