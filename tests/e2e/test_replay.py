"""`rollgrad replay`: an update from kept rollouts has the metrics that the run logged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollgrad.adapters.tracking.trajectory_files import trajectory_files
from rollgrad.entrypoints.cli.main import main

REWARD = """
def reward_func(queries, prompts):
    return [sum(c.isalpha() for c in q[len(p):]) / 8 for q, p in zip(queries, prompts, strict=True)]
"""


@pytest.fixture
def train(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Trains in the current directory; takes flags."""
    prompts = [{"input": f"What is {a} plus {a}?", "label": str(2 * a)} for a in range(1, 9)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (tmp_path / "reward.py").write_text(REWARD)
    settings = {
        "actor": {"model_name_or_path": str(tiny_model_dir), "dtype": "float32", "adam": {"lr": 1e-2}},
        "algo": {"advantage": {"estimator": "rloo"}, "kl": {"init_coef": 0.1, "use_loss": True, "estimator": "k3"}},
        "data": {"prompt_dataset": "prompts.jsonl", "label_key": "label"},
        "reward": {"function_path": "reward.py"},
        "rollout": {"batch_size": 2, "n_samples_per_prompt": 3, "max_new_tokens": 6},
        "train": {"max_steps": 2},
        "logger": {"console": False},
        "ckpt": {"output_dir": "out"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> None:
        assert main(["train", "rl", "--config", "run.yaml", *flags]) == 0

    return run


def replayed(capsys: pytest.CaptureFixture[str], step: int) -> dict[str, tuple[float, float]]:
    capsys.readouterr()
    assert main(["replay", "out", "--step", str(step)]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    return {name: (float(logged), float(now)) for name, logged, now in map(str.split, lines)}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["replay", *words]) == 2
    return capsys.readouterr().err


def test_an_update_again_has_the_metrics_that_were_logged(
    train: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    train("--ckpt.save_steps", "1")
    kept = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    steps: list[dict[str, Any]] = []
    for step in (1, 2):
        found = replayed(capsys, step)
        assert {"policy/loss", "policy/policy_loss", "policy/ref_kl", "policy/grad_norm"} <= set(found)
        for name, (logged, now) in found.items():
            assert now == pytest.approx(logged, rel=1e-4, abs=1e-6), name
        steps.append(found)
    assert steps[0]["policy/grad_norm"][1] != pytest.approx(steps[1]["policy/grad_norm"][1], rel=1e-3)
    assert steps[1]["policy/ref_kl"][1] > 1e-4, "the second update begins with other weights"
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == kept

    assert "set --step to its number" in refused(capsys, "out")
    assert "replay takes the directory of a run" in refused(capsys)
    assert "numbered from 1" in refused(capsys, "out", "--step", "0")
    whole = ("--algo.kl.estimator", "full", "--algo.kl.teacher_template", "{prompt}")
    assert "kept without what the reference read" in refused(capsys, "out", "--step", "1", *whole)
    assert "step-000009.parquet is not there" in refused(capsys, "out", "--step", "9")
    trajectory_files(Path("out"))[1].write_bytes(b"PAR1")
    assert "cannot be read" in refused(capsys, "out", "--step", "2")
    Path("out/metrics.jsonl").unlink()
    assert "metrics.jsonl cannot be read" in refused(capsys, "out", "--step", "1")


@pytest.mark.parametrize("top_k", [(), ("--algo.kl.top_k", "8")], ids=["vocabulary", "likely tokens"])
def test_an_update_is_compared_again_with_what_the_run_started_with(
    train: Callable[..., None], capsys: pytest.CaptureFixture[str], top_k: tuple[str, ...]
) -> None:
    train("--ckpt.save_steps", "1", "--algo.kl.estimator", "full", *top_k)
    found = replayed(capsys, 2)
    for name, (logged, now) in found.items():
        assert now == pytest.approx(logged, rel=1e-4, abs=1e-6), name
    assert found["policy/ref_kl"][0] > 1e-4
    moving = ("--algo.kl.ref_sync_steps", "1", "--algo.kl.top_k", "8")
    assert "reference that moves or is on a server" in refused(capsys, "out", "--step", "2", *moving)


def test_several_optimizer_steps_are_replayed_from_the_first_update_alone(
    train: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    train("--train.batch_size", "3", "--algo.top_entropy_quantile", "0.2")
    for name, (logged, now) in replayed(capsys, 1).items():
        assert now == pytest.approx(logged, rel=1e-4, abs=1e-6), name
    assert "replay --step 1" in refused(capsys, "out", "--step", "2")
    assert "were not kept: replay one of 1" in refused(capsys, "out", "--step", "2", "--train.batch_size", "6")
