"""`rollgrad rescore`: the same reward gives the same numbers, another one is written beside, none changes."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollgrad.adapters.tracking.browse.rescored import summary, with_changes
from rollgrad.adapters.tracking.trajectory_files import trajectory_files
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.rescoring import _replies
from rollgrad.entrypoints.ui.run_view import RunView
from tests.fakes import kept_run

REWARD = """
def reward_func(queries, prompts, labels, tokens, digits, hard, step):
    assert all(isinstance(label, str) for label in labels)
    assert all(isinstance(number, int) for number in digits)
    asked = zip(queries, prompts, labels, tokens, digits, hard, strict=True)
    return [
        len(query) / 7 + int(label) / 3 + sum(ids) % 11 + number + step + (0.5 if row["deep"] else 0.0)
        for query, prompt, label, ids, number, row in asked
    ]
"""
OTHER = """
def reward_func(queries, prompts):
    return [None if "<|im_end|>" in q[len(p):] else float(len(q) - len(p)) for q, p in zip(queries, prompts)]
"""


@pytest.fixture
def run(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """A run of two steps, whose reward reads all that it can; in the current directory."""
    rows = [
        {"input": [{"role": "user", "content": f"{a}?"}], "label": str(a), "digits": a % 3, "hard": {"deep": a > 4}}
        for a in range(1, 9)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "other.py").write_text(OTHER)
    settings = {
        "actor": {"model_name_or_path": str(tiny_model_dir), "dtype": "float32"},
        "algo": {"advantage": {"estimator": "rloo"}},
        "data": {"prompt_dataset": "prompts.jsonl", "label_key": "label"},
        "reward": {"function_path": "reward.py"},
        "rollout": {"batch_size": 2, "n_samples_per_prompt": 3, "max_new_tokens": 6},
        "train": {"max_steps": 2},
        "logger": {"console": False},
        "ckpt": {"output_dir": "out"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "rl", "--config", "run.yaml"]) == 0
    capsys.readouterr()
    return Path("out")


def rescored(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["rescore", "out", *flags]) == 0
    content: dict[str, Any] = json.loads(Path(capsys.readouterr().out.strip()).read_bytes())
    return content


def test_rewards_anew(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run serves several questions: it takes longer than they do."""
    stored = {path: path.read_bytes() for path in trajectory_files(run)}
    same = rescored(capsys)
    assert same["summary"] == {"rows": 12, "same": 12, "sign_changed": 0, "rank_changed": 0, "failed": 0}
    assert len({row["old"] for row in same["rows"]}) > 6
    assert all(row["old"] == row["new"] for row in same["rows"])

    other = rescored(capsys, "--reward.function_path", "other.py")
    assert other["reward"] == "--reward.function_path other.py"
    view = RunView(run, id="out", name="out")
    shown = {row["key"]: row for row in view.trajectories("", "", 0, 100)["rows"]}
    for row in other["rows"]:
        whole = view.trajectory(row["key"])
        assert whole["reward"] == row["old"]
        reply = "".join(whole["tokens"]["text"]["texts"][index] for index in whole["tokens"]["text"]["index"])
        reply = reply[len(whole["prompt"]) :]
        assert row["new"] == (None if "<|im_end|>" in reply else float(len(reply)))
        assert shown[row["key"]]["new_reward"] == row["new"]
    assert [entry["name"] for entry in view.overview()["rescored"]] == [same["name"], other["name"]]
    assert view.rescored(other["name"]) == other
    assert len(view.rollouts().find("new_reward is not null")) == 12 - other["summary"]["failed"]
    assert {path: path.read_bytes() for path in trajectory_files(run)} == stored

    (run / "rescored" / f"{other['name']}.json").write_text("{")
    assert "has no new rewards" in view.overview()["rescored"][1]["problem"]
    assert all(row["new_reward"] is None for row in view.trajectories("", "", 0, 100)["rows"])

    for words, sentence in (
        ([], "rescore takes the directory of a run"),
        (["elsewhere"], "'elsewhere' holds no run: name the directory of one"),
        (["out", "--reward.function_path", "missing.py"], "missing.py"),
        (["out", "--reward.verifer", "math"], "--reward.verifer"),
    ):
        assert main(["rescore", *words]) == 2
        assert sentence in capsys.readouterr().err


def test_rewards_until_a_judge_failed_are_kept(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lasts = "answered = 0\ndef reward_func(completions):\n    global answered\n    answered += 1\n"
    Path("down.py").write_text(f"{lasts}    return [1 / (answered < 6)] * len(completions)\n")
    assert main(["rescore", "out", "--reward.function_path", "down.py"]) == 2
    said = capsys.readouterr().err
    assert "ZeroDivisionError: division by zero (down.py, line 5). What was judged" in said
    assert "--retry_failed" not in said
    (path,) = (run / "rescored").iterdir()
    assert str(path) in said.replace("\n", "")
    assert [row["new"] for row in json.loads(path.read_bytes())["rows"]] == [1.0] * 5 + [None]


@pytest.mark.parametrize(
    ("old", "new", "signs", "ranks"),
    [
        ([0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [], []),
        ([0.0, 1.0, 1.0], [5.0, 6.0, 6.0], [], []),
        ([0.0, 1.0], [1.0, 0.0], [0, 1], [0, 1]),
        ([0.0, 0.0], [0.0, 1.0], [0, 1], [0]),
        ([1.0, 2.0, 9.0], [1.0, 5.0, 6.0], [1], []),
        ([0.0, 1.0, 2.0], [0.0, None, 2.0], [], []),
    ],
)
def test_what_a_reward_changes_is_seen_within_groups(
    old: Sequence[float], new: Sequence[float | None], signs: Sequence[int], ranks: Sequence[int]
) -> None:
    rows = [
        {"key": f"step/1/0/{place}/0", "old": a, "new": b} for place, (a, b) in enumerate(zip(old, new, strict=True))
    ]
    rows.append({"key": "step/1/1/9/0", "old": 100.0, "new": -100.0})  # of another group
    found = with_changes(rows)
    assert [place for place, row in enumerate(found) if row["sign_changed"]] == list(signs)
    assert [place for place, row in enumerate(found) if row["rank_changed"]] == list(ranks)
    assert summary(found)["failed"] == sum(reward is None for reward in new)


def test_rollouts_of_several_branches_are_left_out_whole(tmp_path: Path) -> None:
    vocabulary = kept_run.Vocabulary()
    rows = [
        kept_run.row(vocabulary, sample=sample, branch=branch, parts=[(0, ["a"]), (1, ["b"])])
        for sample, branch in ((0, 0), (0, 1), (1, 0))
    ]
    kept_run.write_rows(tmp_path / "trajectories" / "step-000001.parquet", rows)
    left_out = Counter[str]()
    assert [row["key"] for row in _replies(tmp_path, left_out, [])] == ["step/1/0/1/0"]
    assert left_out.total() == 2
