"""`rollgrad loop rs|iter_dpo|csft` as a user runs them, with a real (tiny) model."""

import asyncio
import gc
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file

import rollgrad
from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.models.torch import allocator
from rollgrad.application.rollouts.evaluation import EvaluationService
from rollgrad.application.settings.dpo import PreferenceAdamConfig, PreferenceModelConfig
from rollgrad.application.settings.loop import (
    CSFTConfig,
    CSFTRun,
    IterDPOConfig,
    IterDPORun,
    LoopRun,
    RSConfig,
    RSRun,
    training_run,
)
from rollgrad.application.settings.loop_rules import UNREAD, loop_errors, may_change
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.ckpt import CheckpointConfig, Resume
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.application.settings.sections.eval import EvalConfig
from rollgrad.application.settings.sections.logger import LoggerConfig
from rollgrad.application.settings.sections.reward import RewardConfig
from rollgrad.application.settings.sections.rollout import RolloutConfig
from rollgrad.application.settings.sft import SupervisedAdamConfig, SupervisedModelConfig, SupervisedTrainConfig
from rollgrad.domain.errors import CheckpointError, ConfigurationError, DataError
from rollgrad.entrypoints.cli.essentials import ESSENTIALS
from rollgrad.entrypoints.cli.loop import LOOPS
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.parsing import parse_run
from rollgrad.entrypoints.config_io import dump_config, setting_names
from tests.example_runs import logged
from tests.scripts import ScriptHost

ROWS, PROMPTS, SAMPLES = 6, 4, 4
REWARD = """
def reward_func(completions):
    return [float(sum(map(ord, text)) % 7) for text in completions]
"""
COMMON = {"model_name_or_path": "", "dtype": DType.FLOAT32, "lr_warmup_ratio": 0.0}


@pytest.fixture
def make(tiny_model_dir: Path, tmp_path: Path) -> Any:
    """Makes the settings of a loop of a kind, with the output `name`."""
    data, reward = tmp_path / "prompts.jsonl", tmp_path / "reward.py"
    data.write_text("".join(json.dumps({"prompt": f"What is {a} plus {a}?"}) + "\n" for a in range(ROWS)))
    reward.write_text(REWARD)

    def settings(kind: str, name: str = "run", **loop: Any) -> Any:
        actor = {**COMMON, "model_name_or_path": str(tiny_model_dir)}
        learner: Any = SupervisedModelConfig(**actor, adam=SupervisedAdamConfig(lr=1e-3))
        if kind == "iter_dpo":
            learner = PreferenceModelConfig(**actor, adam=PreferenceAdamConfig(lr=1e-3))
        run, section = {
            "rs": (RSRun, RSConfig),
            "iter_dpo": (IterDPORun, IterDPOConfig),
            "csft": (CSFTRun, CSFTConfig),
        }[kind]
        return run(
            loop=section(**{"iterations": 2, **loop}),
            actor=learner,
            data=DataConfig(prompt_dataset=str(data)),
            # Replies of four tokens of a random model that are never cut off: "a" is in every second token.
            rollout=RolloutConfig(
                batch_size=PROMPTS, n_samples_per_prompt=SAMPLES, max_new_tokens=40, stop_strings=("a", "e", "i", "o")
            ),
            reward=RewardConfig(function_path=str(reward)),
            ckpt=CheckpointConfig(output_dir=str(tmp_path / name)),
            logger=LoggerConfig(console=False),
        )

    return settings


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def same(first: Path, second: Path) -> bool:
    ours, theirs = weights(first), weights(second)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_rejection_sampling_learns_the_best_replies(make: Any, tiny_model_dir: Path) -> None:
    run = make("rs", top_k=2)
    run.eval = EvalConfig(dataset=run.data.prompt_dataset, split="train", max_samples=2, max_new_tokens=4)
    result = rollgrad.loop(run)
    here = result.output_dir / "iteration_1"
    scored = rows(here / "scored.jsonl")
    assert len(scored) == PROMPTS * SAMPLES
    kept = rows(here / "examples.jsonl")
    for number in {row["row"] for row in scored}:
        group = [row for row in scored if row["row"] == number and row["stop_reason"] == "stop"]
        best = sorted({row["completion"]: row["reward"] for row in group}.values(), reverse=True)[:2]
        assert [row["reward"] for row in kept if row["row"] == number] == best
    replies = {(row["row"], row["completion"]): row for row in scored}
    for row in kept:
        reply = replies[row["row"], row["completion"]]
        assert row["input_ids"] == reply["prompt_tokens"] + reply["tokens"]
        assert row["labels"] == [-100] * len(reply["prompt_tokens"]) + reply["tokens"]
    assert result.model == result.output_dir / "iteration_2" / "run" / "model"
    assert not same(result.model, tiny_model_dir)
    assert [set(metrics) >= {"eval/pass@1"} for metrics in result.history] == [True] * 3
    assert result.history[1]["loop/examples"] == len(kept)
    assert result.history[1]["reward/mean"] == pytest.approx(sum(row["reward"] for row in scored) / len(scored))
    assert result.report is not None
    assert [line["step"] for line in logged(result.output_dir)] == [0, 1, 2]
    second = {row["row"] for row in rows(result.output_dir / "iteration_2" / "replies.jsonl")}
    assert len(second) == PROMPTS
    assert {row["row"] for row in scored} | second == set(range(ROWS))  # it went on, and began again


def test_iterated_dpo_compares_the_best_with_the_worst(make: Any, tiny_model_dir: Path) -> None:
    result = rollgrad.loop(make("iter_dpo"))
    for number in (1, 2):
        here = result.output_dir / f"iteration_{number}"
        scored = rows(here / "scored.jsonl")
        pairs = rows(here / "examples.jsonl")
        assert pairs
        for pair in pairs:
            group = [r["reward"] for r in scored if r["row"] == pair["row"] and r["stop_reason"] == "stop"]
            assert (pair["chosen_reward"], pair["rejected_reward"]) == (max(group), min(group))
            assert pair["chosen_reward"] > pair["rejected_reward"]
    config = (result.output_dir / "iteration_2" / "run" / "config.yaml").read_text()
    assert f"ref:\n  model_name_or_path: {tiny_model_dir}\n" in config  # the first model, not the one it begins with


def test_groups_without_spread_have_no_pair(make: Any) -> None:
    with pytest.raises(DataError, match=r"None of the 16 replies .* prompts without spread"):
        rollgrad.loop(make("iter_dpo"), reward=lambda completions: [1.0] * len(completions))


def test_conditional_fine_tuning_says_what_a_reply_is_worth(make: Any) -> None:
    result = rollgrad.loop(make("csft", target=2.0))
    asked = " <rm_score>: 2.00 "
    for number in (1, 2):
        here = result.output_dir / f"iteration_{number}"
        scored = [row for row in rows(here / "scored.jsonl") if row["stop_reason"] == "stop"]
        contents = [row["messages"][-1]["content"] for row in scored]
        assert [content.endswith(asked) for content in contents] == [number == 2] * len(contents)
        rewards = torch.tensor([row["reward"] for row in scored], dtype=torch.float64)
        normal = ((rewards - rewards.mean()) / rewards.std()).tolist()
        examples = rows(here / "examples.jsonl")
        for row, value, content, example in zip(scored, normal, contents, examples, strict=True):
            told = f"{content.removesuffix(asked)} <rm_score>: {value:.2f} "
            assert example["prompt"] == [{"role": "user", "content": told}]
            assert example["completion"] == [{"role": "assistant", "content": row["completion"]}]


def test_a_loop_of_other_settings_is_refused(make: Any) -> None:
    run = make("rs", iterations=1)
    result = rollgrad.loop(run)
    other = evolve(run, rollout=evolve(run.rollout, temperature=0.5))
    with pytest.raises(CheckpointError, match=r"rollout\.temperature \(1\.0, now 0\.5\)"):
        rollgrad.loop(other)
    with pytest.raises(CheckpointError, match=r"kind \('RSRun', now 'IterDPORun'\)"):
        rollgrad.loop(make("iter_dpo", iterations=1))
    before = (result.output_dir / "loop.json").read_bytes()
    assert rollgrad.loop(run).model == result.model  # nothing is left to do
    assert (result.output_dir / "loop.json").read_bytes() == before
    longer = rollgrad.loop(make("rs", iterations=2))
    assert longer.model == result.output_dir / "iteration_2" / "run" / "model"


PLACES = ("rows", "stage", "training state")
KILLED = """
import os, signal, sys
import datasets, matplotlib.pyplot, torch, transformers.models.llama.modeling_llama
import rollgrad.entrypoints.loop as loops
from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.data import reply_log
from rollgrad.adapters.tracking import curves
from rollgrad.entrypoints.cli.essentials import ESSENTIALS
from rollgrad.entrypoints.cli.loop import LOOPS
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.parsing import parse_run
from rollgrad.entrypoints.config_io import dump_config, setting_names

curves.PANELS = ()

def killed_after(owner, name, times):
    function, calls = getattr(owner, name), []
    def counted(*arguments, **keywords):
        result = function(*arguments, **keywords)
        calls.append(1)
        if len(calls) == times:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, counted)

def torn(self):
    self._file.write(b"".join(self._pending)[:-20])
    os.kill(os.getpid(), signal.SIGKILL)

def once(settings, place=None):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        if place == "rows":
            reply_log.RowLog.flush = torn
        elif place == "stage":
            killed_after(loops, "_select", 1)
        elif place == "training state":
            killed_after(LocalCheckpointStore, "save_training", 1)
        status = main(["loop", "rs", "--config", settings])
    finally:
        os._exit(status)

undisturbed, *disturbed = sys.argv[1:]
assert once(undisturbed) == 0
for settings in disturbed:
    assert once(settings, os.path.basename(settings)) == -signal.SIGKILL, settings
    assert once(settings) == 0, settings
"""


@pytest.mark.slow
@pytest.mark.chaos
def test_a_killed_loop_ends_as_one_that_nothing_disturbed(make: Any, script_host: ScriptHost, tmp_path: Path) -> None:
    """It is killed in the middle of a row, between two stages, and in the middle of its training."""
    files = []
    for place in ("undisturbed", *PLACES):
        run = make("rs", place, iterations=1, top_k=2)
        run.train = SupervisedTrainConfig(batch_size=2)
        run.ckpt.state_steps = 1
        files.append(tmp_path / "settings" / place)
        files[-1].parent.mkdir(exist_ok=True)
        files[-1].write_text(dump_config(run))
    ended = subprocess.run(
        [*script_host.python(), "-c", KILLED, *map(str, files)], capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr
    assert "an incomplete last line is removed" in ended.stderr
    whole = tmp_path / "undisturbed"
    for place in PLACES:
        for name in ("scored.jsonl", "examples.jsonl"):
            theirs, ours = (rows(folder / "iteration_1" / name) for folder in (whole, tmp_path / place))
            assert [{**row, "logprobs": None} for row in ours] == [{**row, "logprobs": None} for row in theirs]
        assert same(tmp_path / place / "iteration_1" / "run" / "model", whole / "iteration_1" / "run" / "model")


def test_an_interrupted_loop_goes_on(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM, which schedulers send, ends the training with its state; the next call takes it from there."""
    whole = make("rs", "whole", iterations=1, top_k=2)
    run = make("rs", iterations=1, top_k=2)
    for one in (whole, run):
        one.train = SupervisedTrainConfig(batch_size=2)
        one.ckpt.state_steps = 1
    rollgrad.loop(whole)
    save = LocalCheckpointStore.save_training

    def interrupted(self: Any, *arguments: Any, **keywords: Any) -> None:
        save(self, *arguments, **keywords)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(LocalCheckpointStore, "save_training", interrupted)
        first = rollgrad.loop(run)
    assert (first.stopped_by, first.model) == (signal.SIGTERM, None)
    state = json.loads((first.output_dir / "loop.json").read_text())
    assert (state["iteration"], state["stage"], state["position"]) == (1, "train", 0)
    second = rollgrad.loop(run)
    assert second.stopped_by is None
    assert second.model is not None
    assert same(second.model, Path(whole.ckpt.output_dir) / "iteration_1" / "run" / "model")
    steps = [line["step"] for line in rows(second.output_dir / "iteration_1" / "run" / "metrics.jsonl")]
    assert steps == sorted(set(steps))
    assert len(steps) > 1


def test_a_terminated_evaluation_is_repeated(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM ends it as Ctrl-C does; the next call evaluates again, and goes on."""
    run = make("rs", iterations=1)
    run.eval = EvalConfig(dataset=run.data.prompt_dataset, max_samples=1)
    play = EvaluationService.run
    places: list[str] = []

    async def interrupted(self: Any, *arguments: Any) -> Any:
        state = json.loads((Path(run.ckpt.output_dir) / "loop.json").read_text())
        places.append(f"{state['iteration']} {state['stage']}")
        if len(places) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)  # until the signal is heard
        return await play(self, *arguments)

    monkeypatch.setattr(EvaluationService, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rollgrad.loop(run)
    result = rollgrad.loop(run)
    assert places == ["0 evaluate", "1 evaluate", "1 evaluate"]
    assert len(result.history) == 2


def test_a_reward_that_is_not_there_is_missed_before_sampling(make: Any) -> None:
    run = make("rs")
    run.reward.function_path = "nowhere.py"
    with pytest.raises(ConfigurationError, match=r"'nowhere\.py', which is no file"):
        rollgrad.loop(run)
    assert not Path(run.ckpt.output_dir).exists()


def test_each_iteration_has_curves_of_its_own(make: Any) -> None:
    run = make("rs")
    run.logger.tensorboard_dir = "curves"
    folders = [
        training_run(run, examples="e", output_dir=f"loop/iteration_{number}/run").logger.tensorboard_dir
        for number in (1, 2)
    ]
    assert folders == ["curves/iteration_1", "curves/iteration_2"]


class Killed(BaseException):
    """Ends a process without a chance to save."""


def test_a_training_that_was_killed_before_its_first_state_begins_again(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model is there already, which another run would not replace."""
    run = make("rs", iterations=1)

    def killed(self: Any, *arguments: Any, **keywords: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(LocalCheckpointStore, "save_training", killed)
        with pytest.raises(Killed):
            rollgrad.loop(run)
    assert (Path(run.ckpt.output_dir) / "iteration_1" / "run" / "model").is_dir()
    assert rollgrad.loop(run).model is not None


def test_a_stage_leaves_no_model_in_memory_and_no_training_state(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine takes what is free on a GPU when it starts; and states of all iterations would fill the disk."""
    models: list[int] = []

    def count() -> None:
        models.append(sum(type(item).__name__ == "LlamaForCausalLM" for item in gc.get_objects()))

    gc.collect()
    count()
    monkeypatch.setattr(allocator, "give_back_freed_memory", count)
    result = rollgrad.loop(make("rs", iterations=1))
    assert len(models) == 1 + 3  # of sampling, judging and training
    assert max(models) == models[0]
    assert [path.name for path in result.output_dir.glob("iteration_1/run/training_state*")] == []


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("loop.iterations", True),
        ("reward.timeout", True),
        ("reward.remote_url", True),
        ("reward.function_path", False),
        ("train.num_epochs", False),
        ("train.seed", False),
    ],
)
def test_what_ends_a_loop_can_be_mended(name: str, may: bool) -> None:
    assert may_change(name) is may


def test_what_an_error_of_sampling_names_can_be_set() -> None:
    run = RSRun()
    run.rollout.max_failures, run.ckpt.resume = 9, Resume.AUTO
    assert may_change("rollout.max_failures")
    errors = "".join(map(str, loop_errors(run)))
    assert "max_failures" not in errors
    assert "ckpt.resume is auto, but a loop does not read it" in errors


def test_all_that_is_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--rollout.max_turns",
        "3",
        "--rollout.top_p",
        "7",
        "--train.batch_size",
        "0",
        "--rollout.engine",
        "server",
        "--data.curriculum_range",
        "0",
        "1",
        "--dpo.ref_sync_steps",
        "4",
    ]
    assert main(["loop", "iter_dpo", *words]) == 2
    error = capsys.readouterr().err
    for part in (
        "rollout.max_turns is 3, but a loop",
        "data.curriculum_range is (0.0, 1.0), but a loop",
        "rollout.top_p",
        "train.batch_size",
        "engine is server",
        "set --loop.reference previous",
    ):
        assert part in error
    for flag in ("--actor.model_name_or_path", "--data.prompt_dataset", "--rollout.n_samples_per_prompt", "No reward"):
        assert flag in error
    assert error.count("No model is set") == 1
    assert main(["loop", "csft", "--loop.suffix", "no reward"]) == 2
    assert "a text with {reward}" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "run"), [("rs", RSRun), ("iter_dpo", IterDPORun), ("csft", CSFTRun)])
def test_help_shows_what_a_loop_reads(name: str, run: type[LoopRun], capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(ESSENTIALS[f"loop {name}"][0].replace("\\\n", " "))
    _, example, unread = parse_run(LOOPS[name].arguments, run, f"loop {name}", words[3:])
    assert [*unread, *loop_errors(example)] == []
    assert main(["loop", name, "--help", "all"]) == 0
    shown = set(re.findall(r"^  --(\S+) ", capsys.readouterr().out, re.MULTILINE))
    assert shown - {"config", "dry_run", "print_config"} == set(setting_names(run)) - UNREAD
    assert main(["loop", name, "--help"]) == 0
    assert main(["loop", name, "--print_config", *words[3:]]) == 0
