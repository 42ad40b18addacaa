"""`rollgrad train kd` as a user runs it, with a real (tiny) model and teacher."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rollgrad
from rollgrad.adapters.models.torch.heads.distillation import Teacher
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.references import TorchTeacher
from rollgrad.application.settings.kd import (
    DistillationConfig,
    KDRun,
    TeacherConfig,
)
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.application.settings.sections.ckpt import Resume
from rollgrad.application.settings.sections.examples import (
    ExampleEvalConfig,
)
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.errors import CheckpointError, ConfigurationError, EngineError
from rollgrad.domain.ports.models import Predictions
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.composition.offline import kd
from tests.e2e.test_dpo import ROOT
from tests.example_runs import Stopping, logged, small, weights, written
from tests.fakes.teacher_server import TeacherServer
from tests.moved_models import moved_copy

ROWS, BATCH, STEPS = 12, 4, 6


@pytest.fixture
def teacher(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """The tiny model with other weights."""
    return moved_copy(tiny_model_dir, tmp_path / "teacher")


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    rows = [{"prompt": f"What is {a} plus {a}?", "completion": f"The answer is {2 * a}."} for a in range(ROWS)]
    return written(tmp_path / "examples.jsonl", rows)


def settings(model: Path, teacher: Path, data: Path, output: Path, **kd: Any) -> KDRun:
    run = KDRun(teacher=TeacherConfig(model_name_or_path=str(teacher)), kd=DistillationConfig(**kd))
    return small(run, model, data, output, lr=5e-3, batch_size=BATCH)


@pytest.mark.parametrize(("beta", "top_k"), [(0.0, None), (0.5, None), (1.0, None), (0.0, 8)])
def test_a_student_comes_nearer_to_its_teacher(
    tiny_model_dir: Path, teacher: Path, examples: Path, tmp_path: Path, beta: float, top_k: int | None
) -> None:
    run = settings(tiny_model_dir, teacher, examples, tmp_path / "run", beta=beta, top_k=top_k, weight=1.0)
    run.eval = ExampleEvalConfig(dataset=str(examples), max_samples=5)
    result = rollgrad.train_kd(run)
    assert result.steps == STEPS
    trained = [row for row in logged(tmp_path / "run") if "train/loss" in row]
    assert [row["train/loss"] for row in trained] == pytest.approx([row["train/divergence"] for row in trained])
    assert 0 < result.after["eval/divergence"] < 0.7 * result.before["eval/divergence"]
    assert {name.removeprefix("eval/") for name in result.after} == set(KDRun().evaluated())


def test_the_loss_is_the_mixture(tiny_model_dir: Path, teacher: Path, examples: Path, tmp_path: Path) -> None:
    found = []
    for budget in (60, 16384):
        run = settings(tiny_model_dir, teacher, examples, tmp_path / str(budget), weight=0.3, temperature=2.0)
        run.train.max_tokens_per_micro_batch, run.train.max_steps, run.train.num_epochs = budget, 2, 1
        rollgrad.train_kd(run)
        rows = [row for row in logged(tmp_path / str(budget)) if "train/loss" in row]
        for row in rows:
            mixture = 0.7 * row["train/nll"] + 0.3 * 4 * row["train/divergence"]
            assert row["train/loss"] == pytest.approx(mixture, rel=1e-5)
        found.append([[row[f"train/{name}"] for name in ("loss", "divergence", "grad_norm")] for row in rows])
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_a_run_that_ended_early_goes_on_as_if_it_had_not(
    tiny_model_dir: Path, teacher: Path, examples: Path, tmp_path: Path
) -> None:
    whole = rollgrad.train_kd(settings(tiny_model_dir, teacher, examples, tmp_path / "whole"))
    run = settings(tiny_model_dir, teacher, examples, tmp_path / "run")
    with pytest.raises(CheckpointError, match="disk is full"):
        rollgrad.train_kd(run, sink=Stopping(after=4))
    run.ckpt.resume = Resume.ALWAYS
    result = rollgrad.train_kd(run)
    assert all(torch.equal(a, weights(result.output_dir)[name]) for name, a in weights(whole.output_dir).items())


def test_a_model_that_is_its_own_teacher_begins_with_no_divergence(
    tiny_model_dir: Path, examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = settings(tiny_model_dir, tiny_model_dir, examples, tmp_path / "run")
    run.actor.lora, run.train.max_steps, run.train.num_epochs = LoraConfig(rank=4), 1, 1
    run.train.max_tokens_per_micro_batch = budget = 60
    score, sizes = TorchPolicy.score, list[int]()

    def counted(self: TorchPolicy, batch: PackedBatch) -> Any:
        sizes.append(batch.token_count)
        return score(self, batch)

    monkeypatch.setattr(TorchPolicy, "score", counted)
    rollgrad.train_kd(run)
    assert sizes
    assert max(sizes) <= budget < sum(sizes)
    (first,) = [row for row in logged(tmp_path / "run") if "train/loss" in row]
    assert first["train/divergence"] == pytest.approx(0, abs=1e-6)
    made = Teacher.__init__

    def broken(self: Teacher, model: Any, *arguments: Any) -> None:
        made(self, model, *arguments)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)

    monkeypatch.setattr(Teacher, "__init__", broken)
    run.ckpt.output_dir = str(tmp_path / "broken")
    with pytest.raises(ConfigurationError, match=r"its own teacher, but they differ by .*--actor.dtype.*dropout"):
        rollgrad.train_kd(run)


def test_a_teacher_of_shorter_texts_is_refused(
    tiny_model_dir: Path, teacher: Path, examples: Path, tmp_path: Path
) -> None:
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 60}))
    run = settings(tiny_model_dir, teacher, examples, tmp_path / "run")
    run.train.max_steps, run.train.num_epochs = 1, 1
    with pytest.raises(ConfigurationError, match=r"has 60 positions, but examples may have \d+ tokens.*max_tokens 60"):
        rollgrad.train_kd(run)
    run.data.max_tokens = 60
    rollgrad.train_kd(run)


def test_a_teacher_of_another_vocabulary_is_refused(
    tiny_model_dir: Path, teacher: Path, examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = teacher / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=r"another vocabulary than the actor: 2 tokens differ, such as"):
        rollgrad.train_kd(settings(tiny_model_dir, teacher, examples, tmp_path / "run"))
    words = ["--actor.model_name_or_path", str(tiny_model_dir), "--teacher.model_name_or_path", str(teacher)]
    assert main(["train", "kd", *words, "--data.dataset", str(examples), "--dry_run"]) == 2
    assert "another vocabulary than the actor" in " ".join(capsys.readouterr().err.split())


def test_the_command_line(
    tiny_model_dir: Path, teacher: Path, examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "kd", "--actor.model_name_or_path", str(tiny_model_dir), "--data.dataset", str(examples)]
    output = ["--ckpt.output_dir", str(tmp_path / "run"), "--train.batch_size", "2", "--actor.dtype", "float32"]
    taught = ["--teacher.model_name_or_path", str(teacher)]
    assert main([*words, *output, *taught, "--train.max_steps", "1", "--kd.top_k", "4", "--kd.beta", "1"]) == 0
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert "gradient is biased" in " ".join(capsys.readouterr().err.split())
    assert main([*words, *taught, "--dry_run", "--ckpt.output_dir", str(tmp_path / "other")]) == 0
    assert "⟦The answer is 0.<|im_end|>⟧" in capsys.readouterr().out
    assert main([*words, "--kd.weight", "0", "--kd.beta", "1.5", "--kd.cache"]) == 2
    errors = capsys.readouterr().err.splitlines()
    named = [line.split()[1] for line in errors if line.startswith("error:")]
    assert named == ["kd.weight", "kd.beta", "No", "kd.cache"]
    assert main([*words, "--teacher.model_name_or_path", str(tmp_path / "none"), "--dry_run"]) == 2
    assert "--teacher.model_name_or_path" in capsys.readouterr().err


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens of each pass of a teacher whose predictions are kept."""
    calls: list[int] = []
    predict = TorchTeacher.predict

    def counted(self: TorchTeacher, batch: PackedBatch) -> Predictions:
        calls.append(batch.token_count)
        return predict(self, batch)

    monkeypatch.setattr(TorchTeacher, "predict", counted)
    return calls


def divergences(output: Path) -> list[float]:
    return [row["train/divergence"] for row in logged(output) if "train/loss" in row]


def test_kept_predictions_of_the_whole_vocabulary_are_the_teacher(
    tiny_model_dir: Path,
    teacher: Path,
    examples: Path,
    tmp_path: Path,
    predicted: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = settings(tiny_model_dir, teacher, examples, tmp_path / "live", temperature=2.0, beta=0.3)
    rollgrad.train_kd(live)
    size = json.loads((teacher / "config.json").read_text())["vocab_size"]
    run = settings(
        tiny_model_dir, teacher, examples, tmp_path / "kept", temperature=2.0, beta=0.3, top_k=size, cache=True
    )
    rollgrad.train_kd(run)
    assert len(predicted) == 1
    assert divergences(tmp_path / "kept") == pytest.approx(divergences(tmp_path / "live"), rel=5e-3, abs=1e-4)
    few = settings(tiny_model_dir, teacher, examples, tmp_path / "few", top_k=4)
    rollgrad.train_kd(few)
    few.kd.cache, few.ckpt.output_dir = True, str(tmp_path / "few_kept")
    rollgrad.train_kd(few)
    assert len(predicted) == 2, "other settings, other predictions"
    assert divergences(tmp_path / "few_kept") == pytest.approx(divergences(tmp_path / "few"), rel=5e-3, abs=1e-4)
    few.ckpt.overwrite, few.train.max_steps, few.train.num_epochs = True, 1, 1
    rollgrad.train_kd(few)
    assert len(predicted) == 2, "kept"
    monkeypatch.setattr(kd, "load_vocabulary_size", lambda name: size - 1)
    rollgrad.train_kd(few)
    assert len(predicted) == 3, "kept ids may lie beyond a smaller vocabulary"


@pytest.mark.parametrize("cache", ["kept", "lost"])
def test_a_run_with_kept_predictions_goes_on_as_if_it_had_not_ended(
    tiny_model_dir: Path,
    teacher: Path,
    examples: Path,
    tmp_path: Path,
    cache: str,
    monkeypatch: pytest.MonkeyPatch,
    predicted: list[int],
) -> None:
    whole = settings(tiny_model_dir, teacher, examples, tmp_path / "whole", top_k=4, cache=True)
    whole.eval = ExampleEvalConfig(dataset=str(examples), max_samples=3)
    made = rollgrad.train_kd(whole)
    assert len(predicted) == 2, "the examples and the held-out ones, each once"
    assert made.after["eval/divergence"] < made.before["eval/divergence"]
    run = settings(tiny_model_dir, teacher, examples, tmp_path / "run", top_k=4, cache=True)
    with pytest.raises(CheckpointError, match="disk is full"):
        rollgrad.train_kd(run, sink=Stopping(after=4))
    if cache == "lost":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    predicted.clear()
    run.ckpt.resume = Resume.ALWAYS
    result = rollgrad.train_kd(run)
    assert len(predicted) == (0 if cache == "kept" else 1)
    assert all(torch.equal(a, weights(result.output_dir)[name]) for name, a in weights(made.output_dir).items())


@pytest.fixture
def server(teacher: Path) -> Iterator[TeacherServer]:
    server = TeacherServer(teacher)
    yield server
    server.close()


def test_a_served_teacher_teaches_as_one_in_the_process(
    tiny_model_dir: Path, teacher: Path, examples: Path, tmp_path: Path, server: TeacherServer
) -> None:
    """It is asked once, also where it fails in passing; other weights under the same name are noticed."""
    kept = settings(tiny_model_dir, teacher, examples, tmp_path / "kept", top_k=8, cache=True)
    rollgrad.train_kd(kept)
    kept.teacher.url, kept.ckpt.output_dir = server.url, str(tmp_path / "served")
    server.failures = [503]
    rollgrad.train_kd(kept)
    assert len(server.asked) == ROWS + 1
    assert divergences(tmp_path / "served") == pytest.approx(divergences(tmp_path / "kept"), rel=5e-3, abs=1e-4)
    kept.ckpt.overwrite = True
    rollgrad.train_kd(kept)
    assert len(server.asked) == ROWS + 2, "one example is compared with what was kept"
    with torch.no_grad():
        server.model.get_input_embeddings().weight.mul_(1.5)
    with pytest.raises(ConfigurationError, match="other weights than before under the same name"):
        rollgrad.train_kd(kept)


def test_each_datasource_has_a_teacher_of_its_own(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two datasources together are learned as each from its own teacher alone; rows without a
    teacher, teachers without rows, and weights that have changed are refused before a step."""
    rows = [{"prompt": f"What is {a} plus {a}?", "completion": f"The answer is {2 * a}."} for a in range(ROWS)]
    named = [row | {("datasource", "data_source")[n % 3 > 0]: ("math", "code")[n % 2]} for n, row in enumerate(rows)]
    data = written(tmp_path / "named.jsonl", named)
    parts = {name: written(tmp_path / f"{name}.jsonl", named[n::2]) for n, name in enumerate(("math", "code"))}
    servers = {
        name: TeacherServer(moved_copy(tiny_model_dir, tmp_path / name, seed))
        for seed, name in enumerate(("math_teacher", "code_teacher"))
    }
    one, two = servers.values()
    urls = {"math": f"teacher@{one.url}", "code": f"teacher@{two.url}"}

    def run(output: str, rows: Path, urls: dict[str, str] | None, url: str | None = None) -> KDRun:
        run = settings(tiny_model_dir, Path("no_such_model"), rows, tmp_path / output, top_k=8, cache=True, weight=1.0)
        run.teacher.model_name_or_path, run.teacher.urls, run.teacher.url = "", urls, url
        run.train.batch_size, run.train.num_epochs, run.train.max_steps = len(rows.read_text().splitlines()), 1, 1
        return run

    try:
        both = run("both", data, urls)
        both.eval = ExampleEvalConfig(dataset=str(parts["math"]))
        rollgrad.train_kd(both)
        assert [len(server.asked) for server in servers.values()] == [ROWS // 2 * 2, ROWS // 2]
        (together,) = divergences(tmp_path / "both")
        alone, tokens = [], []
        for name, rows_of in parts.items():
            rollgrad.train_kd(run(name, rows_of, {name: urls[name]}))
            (row,) = [row for row in logged(tmp_path / name) if "train/loss" in row]
            alone.append(row["train/divergence"])
            tokens.append(row["train/trained_tokens"])
        assert together == pytest.approx(sum(a * n for a, n in zip(alone, tokens, strict=True)) / sum(tokens), rel=1e-4)
        assert alone[0] != pytest.approx(alone[1], rel=0.02)

        def refused(rows: Path, urls: dict[str, str], url: str | None = None) -> str:
            with pytest.raises(ConfigurationError) as error:
                rollgrad.train_kd(run("refused", rows, urls, url))
            return str(error.value)

        assert "Rows of 'code' have no teacher: --teacher.urls has" in refused(data, {"math": urls["math"]})
        assert "--teacher.urls names 'math', but the rows of data.dataset are of 'code'" in refused(parts["code"], urls)
        assert "No teacher is set" in refused(data, {"math": urls["math"]}, two.url)
        assert "Of 'math': teacher.urls is 'nowhere'" in refused(data, {"math": "nowhere"})
        assert "none is 'no'" in refused(data, {"math": f"no@{one.url}", "code": two.url})
        words = ["train", "kd", "--actor.model_name_or_path", str(tiny_model_dir), "--data.dataset", str(data)]
        words += ["--kd.cache", "--kd.top_k", "8", "--ckpt.output_dir", str(tmp_path / "dry"), "--dry_run"]
        assert main([*words, "--teacher.urls", "math", one.url, "maths", two.url]) == 2
        assert "Rows of 'code' have no teacher" in " ".join(capsys.readouterr().err.split())
        with torch.no_grad():
            two.model.get_input_embeddings().weight.mul_(1.5)
        both.ckpt.overwrite = True
        with pytest.raises(ConfigurationError, match=r"--teacher\.urls for 'code' has other weights than before"):
            rollgrad.train_kd(both)
    finally:
        for server in servers.values():
            server.close()


@pytest.mark.parametrize(
    ("top_k", "wrong", "sentence"),
    [
        (64, lambda places: None, "--max-logprobs 64"),
        (8, lambda places: places[-1].popitem(), "gives . tokens at a place, not 8|tells nothing of the token"),
        (8, lambda places: places[-1].update({"99999": {"logprob": 0.0, "rank": 1}}), "predicts the token 99999"),
        (8, lambda places: places.pop(), r"read \d+ tokens, but got \d+"),
        (8, lambda places: places.__setitem__(-1, None), "answers otherwise than vLLM does"),
    ],
)
def test_a_server_that_teaches_something_else_is_named(
    tiny_model_dir: Path,
    teacher: Path,
    examples: Path,
    tmp_path: Path,
    server: TeacherServer,
    top_k: int,
    wrong: Callable[[list[Any]], None],
    sentence: str,
) -> None:
    run = settings(tiny_model_dir, teacher, examples, tmp_path / "run", top_k=top_k, cache=True)
    run.teacher.url, server.changed = server.url, wrong
    with pytest.raises((ConfigurationError, EngineError), match=sentence):
        rollgrad.train_kd(run)


def test_a_served_teacher_by_another_name_is_told(
    tiny_model_dir: Path,
    teacher: Path,
    examples: Path,
    tmp_path: Path,
    server: TeacherServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The only model of a server is asked whatever its name: of another one's tokens nobody would know."""
    run = settings(tiny_model_dir, teacher, examples, tmp_path / "run", top_k=8, cache=True)
    run.teacher.url, server.models = server.url, [{"id": "teacher", "root": "/models/another"}]
    run.train.max_steps, run.train.num_epochs = 1, 1
    rollgrad.train_kd(run)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("the server of --teacher.url has 'teacher', which is taken for") == 1


def test_what_a_served_teacher_cannot_do_is_refused(tiny_model_dir: Path, examples: Path, tmp_path: Path) -> None:
    run = settings(tiny_model_dir, tiny_model_dir, examples, tmp_path / "run", temperature=2.0)
    run.teacher.url = "localhost:8000"
    with pytest.raises(ConfigurationError) as error:
        rollgrad.train_kd(run)
    for words in ("starts with http", "add --kd.cache", "probabilities at temperature 1"):
        assert words in str(error.value)


def test_the_example_in_its_smallest_form(tiny_model_dir: Path, teacher: Path, tmp_path: Path) -> None:
    """Two steps with the example's settings and problems, on models that are tiny."""
    words = ["train", "kd", "--config", str(ROOT / "examples" / "kd.yaml")]
    problems = ROOT / "examples" / "data" / "word_problems"
    data = [f"--data.dataset={problems}_train.jsonl", f"--eval.dataset={problems}_test.jsonl"]
    models = ["--actor.model_name_or_path", str(tiny_model_dir), "--teacher.model_name_or_path", str(teacher)]
    small = ["--train.max_steps", "2", "--train.batch_size", "4", "--data.max_samples", "8", "--eval.max_samples", "2"]
    more = ["--actor.dtype", "float32", "--actor.adam.lr", "1e-3", "--ckpt.output_dir", str(tmp_path / "run")]
    assert main([*words, *data, *models, *small, *more]) == 0
    held_out = [row["eval/divergence"] for row in logged(tmp_path / "run") if "eval/divergence" in row]
    assert held_out[-1] < held_out[0]
