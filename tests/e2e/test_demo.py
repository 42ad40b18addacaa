"""The demos' promises: a real model learns a real task within minutes, and the same seed gives the same curve."""

import filecmp
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.example_runs import logged
from tests.tiny_models import tiny_llama

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
POINTS = 15
"""Held-out greedy accuracy gained, in percentage points: about half of what these steps gain."""
STEPS = 2
"""Enough to gain that much; the demo itself goes on."""
MISMATCH = 1e-4
"""Nats by which log-probs of sampled tokens that engine and trainer compute in float32 differ at most, on average."""
HELD_OUT = 25
"""Tasks on which that is measured."""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def small_smollm2(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Llama of two layers and random weights with the demos' tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    return tiny_llama(tokenizer, tmp_path_factory.mktemp("models") / "small", head_dim=16, positions=4096)


def with_few_held_out(name: str, folder: Path, *, held_out: int = 4, model: Path | None = None, **rollout: int) -> Path:
    """Copies the demo `name`; the copy is evaluated on so many tasks, its rollouts have these sizes, and it saves no
    training state, which takes as long as a step. `model` takes the place of its own."""
    (folder / "data").mkdir(parents=True)
    for file in (f"{name}.py", "smollm2.py", *(f"data/{shots.name}" for shots in EXAMPLES.glob(f"data/{name}_shots*"))):
        (folder / file).write_bytes((EXAMPLES / file).read_bytes())
    rows = (EXAMPLES / "data" / f"{name}_test.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(rows[:: len(rows) // held_out][:held_out]))
    settings = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    settings["eval"]["dataset"] = str(folder / "few.jsonl")
    settings["rollout"] |= rollout
    settings["ckpt"]["state_minutes"] = None
    if model is not None:
        settings["actor"]["model_name_or_path"] = str(model)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    return folder / f"{name}.py"


def words(steps: int, output: Path) -> list[str]:
    return ["--steps", str(steps), "--output-dir", str(output)]


@pytest.mark.demo
@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_learns(run_script: Run, tmp_path: Path) -> None:
    """That a tiny model earns what is rewarded is shown in tests/e2e/test_findings.py."""
    run_script(str(with_few_held_out("sums", tmp_path, held_out=HELD_OUT)), *words(STEPS, tmp_path / "run"))
    lines = logged(tmp_path / "run")
    mismatch = [line["policy/mismatch_abs"] for line in lines if "policy/mismatch_abs" in line]
    assert len(mismatch) == STEPS
    assert max(mismatch) < MISMATCH
    before, *_, after = (line for line in lines if "eval/pass@1" in line)
    assert 100 * (after["eval/pass@1"] - before["eval/pass@1"]) >= POINTS
    # Replies come to end by themselves; how many do after so few steps depends on how a processor rounds.
    assert after["eval/truncated_share"] < before["eval/truncated_share"]
    for name in ("report.html", "curves.png", "model/model.safetensors", "samples.jsonl"):
        assert (tmp_path / "run" / name).stat().st_size > 0


def test_the_demo_is_evaluated_several_times_on_its_way() -> None:
    settings = yaml.safe_load((EXAMPLES / "sums.yaml").read_text())
    assert settings["train"]["max_steps"] // settings["eval"]["steps"] >= 3


def word_problems(folder: Path) -> Path:
    return with_few_held_out("word_problems", folder, batch_size=4, n_samples_per_prompt=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sums", "word_problems", "products"])
def test_the_demos_run(name: str, small_smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the smallest form of each in this process, with a model that knows nothing."""
    sizes = {"batch_size": 1, "n_samples_per_prompt": 2, "max_new_tokens": 8}
    script = with_few_held_out(name, tmp_path, held_out=1, model=small_smollm2, **sizes)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [str(script), *words(1, tmp_path / "run")])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "smollm2", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    del sys.modules["smollm2"]  # the copy's
    assert ended.value.code == 0
    before, trained, after = logged(tmp_path / "run")
    assert trained["rollout/samples"] == 2
    assert before.keys() == after.keys()


@pytest.mark.demo
@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_of_word_problems_has_gsm8ks_form_and_trains(run_script: Run, tmp_path: Path) -> None:
    script = word_problems(tmp_path)
    few = (tmp_path / "few.jsonl").read_text().splitlines()
    assert {frozenset(json.loads(row)) for row in few} == {frozenset({"question", "answer"})}
    assert all(re.search(r"\n#### \d+$", json.loads(row)["answer"]) for row in few)
    run_script(str(script), *words(1, tmp_path / "run"))
    before, trained, after = logged(tmp_path / "run")
    assert 0 < trained["reward/mean"] < 0.5
    assert trained["policy/grad_norm"] > 0
    assert trained["rollout/truncated_share"] < 0.5  # replies end with their line
    assert before.keys() == after.keys()


@pytest.mark.demo
@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_of_word_problems_repeats(run_script: Run, tmp_path: Path) -> None:
    """As runs of small models do, which `make ci` compares."""
    script, runs = word_problems(tmp_path), [tmp_path / name for name in ("first", "again")]
    for run in runs:
        run_script(str(script), *words(1, run))
    first, again = ([curve(line) for line in logged(run)] for run in runs)
    assert first == again
    models = (run / "model" / "model.safetensors" for run in runs)
    assert filecmp.cmp(*models, shallow=False), "the next step would sample by other weights"


def test_word_problems_are_held_out_by_calculation() -> None:
    def calculations(name: str) -> set[str]:
        rows = (EXAMPLES / "data" / f"word_problems_{name}.jsonl").read_text().splitlines()
        return {json.loads(row)["answer"].split(" =")[0] for row in rows}

    assert not calculations("train") & calculations("test")


@pytest.mark.demo
@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_agents_demo_trains_on_its_tool_and_calls_it(run_script: Run, tmp_path: Path) -> None:
    """Runs a quarter of its first step, for it takes longer to learn than a test should."""
    script = with_few_held_out("products", tmp_path, held_out=1, batch_size=2, n_samples_per_prompt=4)
    printed = run_script(str(script), *words(1, tmp_path / "run"))
    before, trained, after = logged(tmp_path / "run")
    assert trained["reward/tool_calls"] > 0.3
    assert trained["reward/branches"] == 1
    assert trained["policy/grad_norm"] > 0
    assert before.keys() == after.keys()
    assert "     tool  3504\n" in printed


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_of_fine_tuning_learns_within_three_small_steps(run_script: Run, tmp_path: Path) -> None:
    flags = {"ckpt.output_dir": tmp_path / "run", "ckpt.state_minutes": None, "data.cache_dir": tmp_path / "cache"}
    flags |= {"train.max_steps": 3, "train.batch_size": 4, "eval.max_samples": 4, "eval.steps": -1}
    run_script("examples/sft.py", *(word for name, value in flags.items() for word in (f"--{name}", str(value))))
    before, after = (line for line in logged(tmp_path / "run") if "eval/loss" in line)
    assert after["eval/loss"] < before["eval/loss"] - 0.5
    assert after["eval/accuracy"] > before["eval/accuracy"] + 0.1
    assert (tmp_path / "run" / "report.html").stat().st_size > 0


def curve(line: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in line.items() if not key.startswith(("time/", "memory/"))}
