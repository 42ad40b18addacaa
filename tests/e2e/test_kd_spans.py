"""`rollgrad train kd --kd.spans`: a real (tiny) model learns from one with another tokenizer and chat template."""

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

import rollgrad
from rollgrad.adapters.models.torch.references import TorchReference
from rollgrad.application.settings.kd import DistillationConfig, KDRun, TeacherConfig
from rollgrad.application.settings.sections.examples import ExampleEvalConfig
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import TokenScores
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.composition.offline import kd_spans
from rollgrad.entrypoints.composition.offline.kd import kd_container
from tests.example_runs import logged, small, written
from tests.fakes.teacher_server import TeacherServer
from tests.tiny_models import make_other_tokenizer, tiny_llama

ROWS = 12
ROW = {
    "messages": [
        {"role": "user", "content": "What is 3 plus 4?"},
        {"role": "assistant", "content": "The answer is 7: née."},
    ]
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(make_other_tokenizer(), tmp_path_factory.mktemp("models") / "other", head_dim=16)


def settings(model: Path, teacher: Path, data: Path, output: Path, **kd: Any) -> KDRun:
    run = KDRun(
        teacher=TeacherConfig(model_name_or_path=str(teacher)), kd=DistillationConfig(spans=True, weight=1.0, **kd)
    )
    return small(run, model, data, output, lr=5e-3, batch_size=4)


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    rows = [{"prompt": f"What is {a} plus {a}?", "completion": f"The answer is {2 * a}."} for a in range(ROWS)]
    return written(tmp_path / "examples.jsonl", rows)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of sequences of each pass of the teacher."""
    calls: list[int] = []
    score = TorchReference.score

    def counted(self: TorchReference, batch: PackedBatch) -> TokenScores:
        calls.append(len(batch))
        return score(self, batch)

    monkeypatch.setattr(TorchReference, "score", counted)
    return calls


def test_a_student_comes_nearer_to_a_teacher_with_other_tokens(
    tiny_model_dir: Path, teacher: Path, examples: Path, tmp_path: Path, scored: list[int]
) -> None:
    run = settings(tiny_model_dir, teacher, examples, tmp_path / "run", temperature=100.0)
    run.eval = ExampleEvalConfig(dataset=str(examples), max_samples=5)
    result = rollgrad.train_kd(run)
    assert sum(scored) == ROWS + 5, "each example and each held-out one once"
    trained = [row for row in logged(tmp_path / "run") if "train/loss" in row]
    assert [row["train/loss"] for row in trained] == pytest.approx([100 * row["train/divergence"] for row in trained])
    assert 0 < result.after["eval/divergence"] < 0.5 * result.before["eval/divergence"]
    assert {name.removeprefix("eval/") for name in result.after} == set(KDRun().evaluated())
    run.ckpt.output_dir, run.train.max_tokens_per_micro_batch = str(tmp_path / "again"), 60
    scored.clear()
    rollgrad.train_kd(run)
    assert not scored, "kept"
    again = [row for row in logged(tmp_path / "again") if "train/loss" in row]
    for name in ("train/divergence", "train/grad_norm"):
        assert [row[name] for row in again] == pytest.approx([row[name] for row in trained], rel=2e-3)


def test_spans_have_the_probabilities_of_the_teacher_by_its_own_template(
    tiny_model_dir: Path, teacher: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(teacher)
    (prompt, whole) = (
        tokenizer.apply_chat_template(ROW["messages"][:count], add_generation_prompt=count == 1, tokenize=False)
        for count in (1, 2)
    )
    ids, given = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (whole, prompt))
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    expected = [float(logprobs[place - 1, ids[place]]) for place in range(len(given), len(ids))]

    data = written(tmp_path / "row.jsonl", [ROW])
    run = settings(tiny_model_dir, teacher, data, tmp_path / "run")
    found = kd_container(run).learned()[0].span_logprobs_A
    ends = ~found.isnan()
    assert 3 <= int(ends.sum()) < len(found)
    assert bool((found[ends] <= 0).all()), "the whole reply is compared, and its end"
    assert float(found[ends].sum()) == pytest.approx(sum(expected), abs=1e-3)
    assert float(found[-1]) == pytest.approx(expected[-1], abs=1e-4)


def test_a_model_that_is_its_own_teacher_begins_with_no_divergence(
    tiny_model_dir: Path, examples: Path, tmp_path: Path
) -> None:
    run = settings(tiny_model_dir, tiny_model_dir, examples, tmp_path / "run")
    run.train.max_steps, run.train.num_epochs = 1, 1
    rollgrad.train_kd(run)
    (first,) = [row for row in logged(tmp_path / "run") if "train/loss" in row]
    assert first["train/divergence"] == pytest.approx(0, abs=1e-6)


def test_what_is_not_compared_is_told(
    tiny_model_dir: Path,
    teacher: Path,
    examples: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reply of which the teacher's template drops something, nothing in common, and what goes not together."""
    run = settings(tiny_model_dir, teacher, examples, tmp_path / "run")
    run.train.max_steps, run.train.num_epochs = 1, 1
    with capture_logs() as logs:
        rollgrad.train_kd(run)
    assert [line["log_level"] for line in logs if "spans are compared, of" in line["event"]] == ["info", "info"]
    # The teacher's template trims it.
    kept = written(tmp_path / "kept.jsonl", [{"prompt": "2?", "completion": f"It is {a}. "} for a in range(8)])
    run.data.dataset, run.ckpt.output_dir = str(kept), str(tmp_path / "kept")
    with capture_logs() as logs:
        rollgrad.train_kd(run)
    warning, _ = [line["event"] for line in logs if "spans are compared" in line["event"]]
    assert (
        "the first 8 examples of data.dataset: the teacher's chat template writes the other replies otherwise"
        in warning
    )
    tokens = written(tmp_path / "tokens.jsonl", [{"input_ids": [7, 9, 9, 9], "labels": [-100, 9, 9, 9]}] * 4)
    run.data.dataset, run.ckpt.output_dir = str(tokens), str(tmp_path / "tokens")
    with pytest.raises(ConfigurationError, match="finds no text of the trained tokens of the first 4 examples"):
        rollgrad.train_kd(run)
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(kd_spans, "FIRST", 3)  # of which nothing is known of the fourth
        with pytest.raises(ConfigurationError, match=r"finds no text of the trained tokens of data\.dataset"):
            rollgrad.train_kd(run)
    assert any(line["event"].startswith("0 spans are compared") for line in logs)
    run.data.dataset = str(examples)
    with monkeypatch.context() as patch:
        patch.setattr(kd_spans, "load_positions", lambda name: 8)
        with pytest.raises(ConfigurationError, match="finds no text"):  # all rows are too long for the teacher
            rollgrad.train_kd(run)
    words = ["train", "kd", "--actor.model_name_or_path", str(tiny_model_dir), "--data.dataset", str(examples)]
    words += ["--teacher.model_name_or_path", str(teacher)]
    assert main([*words, "--dry_run"]) == 2
    assert "or compare spans of text: --kd.spans" in " ".join(capsys.readouterr().err.split())
    assert main([*words, "--kd.spans", "--dry_run", "--ckpt.output_dir", str(tmp_path / "dry")]) == 0
    capsys.readouterr()
    assert main([*words, "--kd.spans", "--dry_run", "--data.dataset", str(tokens)]) == 2
    assert "kd.spans finds no text" in " ".join(capsys.readouterr().err.split())
    more = ["--teacher.urls", "math", "http://one:8000", "--cluster.enable"]
    assert main([*words, "--kd.spans", "--kd.top_k", "4", "--kd.cache", "--data.stream", *more]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: kd.spans")]
    assert [line.partition("leave --")[2].split()[0] for line in errors] == [
        "kd.top_k",
        "kd.cache",
        "teacher.urls",
        "data.stream",
        "cluster.enable",
    ]


def test_a_served_teacher_says_what_one_in_the_process_does(
    tiny_model_dir: Path, teacher: Path, examples: Path, tmp_path: Path
) -> None:
    """It is asked once, and other weights under the same name are noticed."""
    own, told = (settings(tiny_model_dir, teacher, examples, tmp_path / name) for name in ("own", "told"))
    server = TeacherServer(teacher)
    told.teacher.url = server.url
    try:
        for run in (own, told):
            run.train.max_steps, run.train.num_epochs = 2, 1
            rollgrad.train_kd(run)
        divergences = [
            [row["train/divergence"] for row in logged(tmp_path / name) if "train/loss" in row]
            for name in ("own", "told")
        ]
        assert divergences[0] == pytest.approx(divergences[1], rel=5e-3)
        assert len(server.asked) == ROWS
        with torch.no_grad():
            server.model.get_input_embeddings().weight.mul_(1.5)
        told.ckpt.overwrite = True
        with pytest.raises(ConfigurationError, match="other weights than before under the same name"):
            rollgrad.train_kd(told)
    finally:
        server.close()
