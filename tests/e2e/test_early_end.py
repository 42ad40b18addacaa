"""Runs of the command line that end before their time, or begin where another one has been: nothing is lost."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.run_record import RunStatus, read_run
from tests.example_runs import logged

STARTUP_SECONDS = 300.0
STOP_SECONDS = 200.0
STEPS, BREAKS_AT = 4, 3

REWARD = """
def reward_func(queries, prompts, labels):
    return [len(query) % 5 for query in queries]
"""
BROKEN = """
import os
from pathlib import Path

LIMIT = int(os.environ.get("FILE_LIMIT", "0"))

def reward_func(queries, prompts, labels):
    if Path("out/metrics.jsonl").exists() and len(Path("out/metrics.jsonl").read_text().splitlines()) == {at} - 1:
        if LIMIT:
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
        else:
            raise KeyError("the judge is down")
    return [len(query) % 5 for query in queries]
""".replace("{at}", str(BREAKS_AT))
"""Breaks in rollout `BREAKS_AT`: it raises, or from then on no larger file can be written, as on a full disk."""


@pytest.fixture
def workspace(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"input": f"Say {n}."}) for n in range(8)))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "broken.py").write_text(BROKEN)
    settings = {
        "actor": {"model_name_or_path": str(tiny_model_dir), "dtype": "float32", "adam": {"lr": 1e-3}},
        "algo": {"advantage": {"estimator": "rloo"}},
        "data": {"prompt_dataset": "prompts.jsonl"},
        "reward": {"function_path": "reward.py"},
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 2, "max_new_tokens": 8},
        "train": {"max_steps": STEPS},
        "logger": {"console": False},
        "ckpt": {"output_dir": "out"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*flags: str) -> int:
    return main(["train", "rl", "--config", "run.yaml", *flags])


def start(rollgrad_command: list[str], *flags: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*rollgrad_command, "train", "rl", "--config", "run.yaml", *flags],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def weights(path: Path | str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def same(left: Path | str, right: Path | str) -> bool:
    first, second = (load_file(Path(path, "model.safetensors")) for path in (left, right))
    return all(torch.equal(first[name], second[name]) for name in second)


def step(output: str = "out") -> int:
    return int(json.loads(Path(output, "model.state.json").read_text())["step"])


def steps() -> list[Any]:
    return [row["step"] for row in logged(Path("out"))]


def test_a_reward_that_breaks_costs_its_own_rollout_only(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--reward.function_path", "broken.py") == 2
    error = capsys.readouterr().err
    assert "KeyError: 'the judge is down'" in error
    assert "Traceback" not in error
    assert step() == BREAKS_AT - 1
    assert Path("out/report.html").exists()
    assert train("--ckpt.resume", "auto") == 0
    assert steps() == list(range(1, STEPS + 1))
    assert train("--ckpt.output_dir", "whole") == 0
    assert same("out/model", "whole/model")


@pytest.mark.usefixtures("workspace")
def test_a_full_disk_leaves_the_last_finished_step(rollgrad_command: list[str]) -> None:
    """The training state, three times as large as the model, cannot be written any more; the model can."""
    assert train("--train.max_steps", "1", "--ckpt.output_dir", "size") == 0
    size = max(path.stat().st_size for path in Path("size/model").iterdir())
    assert Path("size/training_state_1/state.pt").stat().st_size > 2 * size
    flags = ("--reward.function_path", "broken.py", "--ckpt.state_steps", "1")
    process = start(rollgrad_command, *flags, FILE_LIMIT=str(size + size // 2))
    _, stderr = process.communicate(timeout=STARTUP_SECONDS)
    assert process.returncode == 2, stderr
    assert "Traceback" not in stderr
    assert "error: The training state cannot be written" in stderr.splitlines()[-1]
    assert step() == BREAKS_AT
    assert weights("out/model")
    assert train("--ckpt.resume") == 0, "the state of the step before is whole"
    assert steps() == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.chaos)])
def test_a_signal_ends_the_run_as_ctrl_c_does(
    workspace: Path, rollgrad_command: list[str], number: signal.Signals
) -> None:
    process = start(rollgrad_command, "--train.max_steps", "100000")
    metrics = workspace / "out" / "metrics.jsonl"
    deadline = time.monotonic() + STARTUP_SECONDS
    try:
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        while (found := read_run(workspace / "out")) is None or found["status"] is RunStatus.RUNNING:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGHUP)  # as a shell sends it after its terminal, while the report is written
        _, stderr = process.communicate(timeout=STOP_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 128 + number, stderr
    assert "what was trained is in out" in stderr
    assert (workspace / "out" / "report.html").exists()
    assert step() == steps()[-1] >= 2
    assert weights(workspace / "out" / "model")
    more = str(step() + 1)
    assert train("--ckpt.resume", "--train.max_steps", more) == 0
    assert steps() == list(range(1, int(more) + 1))


BLOCKING = """
import time
from pathlib import Path

async def reward_func(queries, prompts, labels):
    block("reward")
    return [len(query) % 5 for query in queries]

def on_step(step, metrics, groups):
    block("on_step")

def block(name):
    if name == "{name}" and Path("out/metrics.jsonl").exists():
        Path("blocked").touch()
        time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reward", "on_step"])
def test_a_signal_ends_a_run_that_users_code_blocks(workspace: Path, rollgrad_command: list[str], name: str) -> None:
    Path("blocking.py").write_text(BLOCKING.replace("{name}", name))
    own = ("--reward.function_path", "blocking.py", "--train.on_step_path", "blocking.py")
    process = start(rollgrad_command, *own, "--train.max_steps", "100000")
    deadline = time.monotonic() + STARTUP_SECONDS
    try:
        while not Path("blocked").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=STOP_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert "blocking.py, line 15" in stderr
    assert step() == steps()[-1] == (1 if name == "reward" else 2)
    assert weights(workspace / "out" / "model")
    assert Path("out", f"training_state_{step()}").exists()


def test_a_second_run_in_the_same_place_is_refused_until_told_to_overwrite(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workspace / "out").mkdir()
    (workspace / "out" / "notes.txt").write_text("mine")
    assert train("--ckpt.save_steps", "2") == 0
    first = Path("out/metrics.jsonl").read_text()
    capsys.readouterr()
    for flags in ((), ("--dry_run",)):
        assert train(*flags) == 2
        error = capsys.readouterr().err
        assert "'out', which holds a run of 4 steps" in error
        assert "--ckpt.overwrite" in error
        assert "--ckpt.resume" in error
    assert Path("out/metrics.jsonl").read_text() == first
    assert train("--ckpt.overwrite", "--ckpt.resume") == 2
    assert train("--ckpt.overwrite", "--train.max_steps", "1") == 0
    assert steps() == [1]
    assert not Path("out/step_2").exists()
    assert Path("out/notes.txt").read_text() == "mine"


def test_what_cannot_begin_replaces_nothing(workspace: Path) -> None:
    assert train("--train.max_steps", "1") == 0
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{}")
    assert train("--ckpt.overwrite", "--actor.model_name_or_path", "./broken") == 2
    assert steps() == [1]
    assert step() == 1
    assert Path("out/training_state_1").exists()


def test_auto_resumes_where_there_is_something_and_begins_where_there_is_nothing(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = ("--ckpt.resume", "auto")
    assert train(*auto, "--train.max_steps", "2") == 0
    assert train(*auto) == 0
    assert steps() == list(range(1, STEPS + 1))
    for state in Path("out").glob("training_state_*"):
        shutil.rmtree(state)
    assert train(*auto) == 2, "it has saved one, which may be on a disk that is not there"
    assert "holds no training state, though the run in out saved one after step 4" in capsys.readouterr().err
    Path("out/run.json").unlink()
    assert train(*auto) == 2, "a model without a state would be replaced"
    assert "holds a run of 4 steps" in capsys.readouterr().err
    for name in ("model", "model.state.json"):
        Path("out", name).rename(f"kept_{name}")
    assert train(*auto, "--train.max_steps", "1") == 0, "logs of a run that was killed before it saved anything"
    assert "the run starts anew: there is no training state of the steps that it logged" in capsys.readouterr().err
    assert steps() == [1]


def test_the_training_state_may_lie_elsewhere(workspace: Path) -> None:
    elsewhere = ("--ckpt.state_dir", "scratch")
    assert train(*elsewhere, "--train.max_steps", "2") == 0
    assert not list(Path("out").glob("training_state_*"))
    assert Path("scratch/training_state_2").exists()
    assert train(*elsewhere, "--ckpt.resume") == 0
    assert step() == STEPS


def test_a_run_continues_as_what_it_began(
    workspace: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other rows, or a model of the same shapes, are found by what they hold; the same in another place is the same."""
    Path("keep.py").write_text("def keep(group):\n    return True\n")
    settings = yaml.safe_load(Path("run.yaml").read_text())
    settings["algo"]["dynamic_filtering_path"] = "keep.py"
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    shutil.copytree(tiny_model_dir, "moved")
    shutil.copy("prompts.jsonl", "moved.jsonl")
    assert train("--train.max_steps", "1") == 0
    kept = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file() and path.name != ".lock"}
    other_model = weights("moved")
    from safetensors.torch import save_file

    Path("rows.jsonl").write_text("\n".join(json.dumps({"input": f"Say {n}!"}) for n in range(8)))
    shutil.copytree("moved", "other")
    noise = {name: tensor + 0.01 for name, tensor in other_model.items() if name != "lm_head.weight"}
    save_file(noise, "other/model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    for flags, said in {
        ("--train.seed", "7"): "train.seed is 7, but was 42 when the run began",
        ("--actor.adam.weight_decay", "0.5"): "actor.adam.weight_decay is 0.5, but was 0.0 when",
        ("--rollout.temperature", "0.5"): "rollout.temperature is 0.5, but was 1.0 when",
        ("--data.prompt_dataset", "rows.jsonl"): "data.prompt_dataset is 'rows.jsonl', but was 'prompts.jsonl' when",
        ("--actor.model_name_or_path", "./other"): "actor.model_name_or_path is './other', but was",
    }.items():
        for last in ((), ("--dry_run",)):
            assert train("--ckpt.resume", *flags, *last) == 2
            errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1, errors
            assert said in errors[0]
    assert {path: path.read_bytes() for path in kept} == kept, "what is refused changes nothing"
    Path("prompts.jsonl").unlink()
    Path("keep.py").rename("moved/keep.py")
    Path("reward.py").write_text(f"{REWARD}# mended\n")
    moved = ("--data.prompt_dataset", "moved.jsonl", "--actor.model_name_or_path", "./moved")
    moved = (*moved, "--algo.dynamic_filtering_path", "moved/keep.py")
    lower = ("--actor.adam.lr", "0.0005")  # what is told to whom a larger one has ended a run
    assert train("--ckpt.resume", *moved, *lower, "--train.max_tokens_per_micro_batch", "300") == 0
    told = capsys.readouterr().err
    assert "train_max_tokens_per_micro_batch=" in told
    assert "actor_adam_lr=" in told
    assert 'algo_dynamic_filtering_path="keep.py -> moved/keep.py"' in told
    (warning,) = [line for line in told.splitlines() if "files of another content than it began with" in line]
    assert "reward_function_path=reward.py" in warning
    rows = logged(Path("out"))
    assert [row["policy/lr"] for row in rows] == [0.001] + [0.0005] * (STEPS - 1)
    assert steps() == list(range(1, STEPS + 1))
    assert yaml.safe_load(Path("out/config.yaml").read_text())["train"]["max_tokens_per_micro_batch"] == 300


def test_a_state_of_an_earlier_version_continues_after_a_warning(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--train.max_steps", "2") == 0
    state = torch.load("out/training_state_2/state.pt", weights_only=True)
    shutil.rmtree("out/training_state_2")
    state.pop("evaluated", None)
    torch.save(state, "out/training_state.pt")
    assert train("--ckpt.resume") == 0
    assert "nothing is compared" in capsys.readouterr().err
    assert steps() == list(range(1, STEPS + 1))
    assert train("--ckpt.output_dir", "whole") == 0
    assert same("out/model", "whole/model")


def test_a_broken_state_costs_the_steps_after_the_one_before(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--train.max_steps", "3", "--ckpt.state_steps", "1") == 0
    file = Path("out/training_state_3/state.pt")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert train("--ckpt.resume") == 0
    assert "state.pt of training_state_3 is not what was written" in capsys.readouterr().err
    assert steps() == list(range(1, STEPS + 1))
    assert train("--ckpt.output_dir", "whole") == 0
    assert same("out/model", "whole/model")


def test_a_run_that_was_over_repeats_nothing(workspace: Path) -> None:
    evaluates = ("--eval.dataset", "prompts.jsonl", "--eval.max_samples", "2")
    assert train(*evaluates) == 0
    first = Path("out/metrics.jsonl").read_text()
    assert train(*evaluates, "--ckpt.resume") == 0
    assert Path("out/metrics.jsonl").read_text() == first


def test_the_best_model_is_compared_on_where_held_out_rows_moved_but_not_where_they_changed(workspace: Path) -> None:
    best = ("--ckpt.best_metric", "eval/response_length_mean", "--eval.max_samples", "2", "--ckpt.state_steps", "1")

    def left() -> list[str]:
        return sorted(path.name for path in Path("out").glob("best_*") if path.is_dir())

    shutil.copy("prompts.jsonl", "held_out.jsonl")
    assert train(*best, "--eval.dataset", "held_out.jsonl", "--eval.steps", "1", "--train.max_steps", "1") == 0
    Path("held_out.jsonl").rename("moved.jsonl")
    moved = (*best, "--eval.dataset", "moved.jsonl", "--eval.steps", "1", "--ckpt.resume")
    assert train(*moved, "--train.max_steps", "2") == 0
    assert left() == []
    rows = Path("moved.jsonl").read_text().splitlines()
    Path("moved.jsonl").write_text("\n".join(reversed(rows)))
    assert train(*moved, "--train.max_steps", "3") == 0
    assert left() in (["best_1"], ["best_2"]), "whichever was the best one"


WANDERING = """
import os
os.chdir("/tmp")

def reward_func(queries, prompts, labels):
    os.chdir("/")
    return [len(query) % 5 for query in queries]
"""


def test_a_reward_that_changes_the_directory_moves_nothing(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("wandering.py").write_text(WANDERING)
    assert train("--reward.function_path", "wandering.py", "--ckpt.save_steps", "2", "--ckpt.state_steps", "1") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "out/report.html"
    os.chdir(workspace)
    assert steps() == list(range(1, STEPS + 1))
    assert {path.name for path in Path("out").iterdir() if not path.name.startswith(".")} == {
        *("config.yaml", "curves.png", "metrics.jsonl", "model", "model.state.json", "report.html", "run.json"),
        *("samples.jsonl", "trajectories", "step_2", "step_2.state.json", "training_state_3", "training_state_4"),
    }


def test_a_log_whose_last_line_was_cut_off_is_continued(workspace: Path) -> None:
    assert train("--train.max_steps", "2") == 0
    with Path("out/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/me')
    with Path("out/samples.jsonl").open("a") as file:
        file.write('{"step": 2, "prompt": "\u2028\x85", "response": ""}\n{"step"')
    assert train("--ckpt.resume") == 0
    assert steps() == list(range(1, STEPS + 1))
    samples = [json.loads(line) for line in Path("out/samples.jsonl").read_text(encoding="utf-8").split("\n") if line]
    assert [row["prompt"] for row in samples].count("\u2028\x85") == 1


def test_a_saved_critic_continues(workspace: Path) -> None:
    """A critic is saved below its model, and a later run that starts from it values what it valued."""
    from rollgrad.adapters.models.torch.loading.loading import load_critic

    ppo = ("--algo.advantage.estimator", "gae", "--critic.adam.lr", "1e-3")
    assert train(*ppo, "--ckpt.save_steps", "2") == 0
    for saved in ("out/step_2/critic", "out/model/critic"):
        _, head = load_critic(saved, dtype=torch.float32, device=torch.device("cpu"), flag="--critic")
        assert head["weight"].abs().max() > 0, "it has learned"
    assert train(*ppo, "--critic.model_name_or_path", "out/model/critic", "--ckpt.output_dir", "next") == 0
    explained = logged(Path("next"))
    fresh = logged(Path("out"))
    assert explained[0]["critic/value_loss"] < fresh[0]["critic/value_loss"]
