"""Distillation and process reward models of a tiny model that sees images, and rows with images by URL."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import rollgrad
from rollgrad.adapters.chat.image_files import opened
from rollgrad.application.settings.kd import KDRun
from rollgrad.application.settings.prm import PRMRun
from rollgrad.application.settings.sections.images import FetchImages
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.cli.main import main
from tests.example_runs import logged, small, weights, written
from tests.fakes.image_server import RED, ImageServer
from tests.fakes.images import processor as processor_of
from tests.image_runs import enter_picture_folder
from tests.moved_models import moved_copy
from tests.tiny_vision import picture, save_tiny_vlm

ROWS: list[dict[str, Any]] = [
    {"prompt": "What is <image>?", "images": ["red.png"], "completion": "red"},
    {"prompt": "Are they alike?", "images": ["blue.png", "red.png"], "completion": "no"},
    {"prompt": "What is 1 plus 1?", "images": [], "completion": "2"},
]
SOLUTIONS: list[dict[str, Any]] = [
    {"prompt": "What is <image>?", "images": ["red.png"], "completions": ["I look.", "It is red."], "labels": [1, 1]},
    {"prompt": "Alike?", "images": ["blue.png", "red.png"], "completions": ["Yes."], "labels": [0]},
    {"prompt": "What is 1 plus 1?", "images": None, "completions": ["1.", "So 3."], "labels": [1, 0]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen2.5-VL with its processor."""
    return Path(save_tiny_vlm("qwen2_5_vl", tmp_path_factory.mktemp("model")))


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter_picture_folder(tmp_path, monkeypatch)


def logprobs_of(path: Path, row: dict[str, Any], reply: str) -> tuple[Tensor, int, int]:
    """Returns what transformers' own class predicts of a row with `reply`: log-probs [T, V], and where the reply begins
    and ends among the tokens."""
    from transformers import AutoModelForImageTextToText

    processor = processor_of(str(path))
    images = [opened(Path(name).read_bytes()) for name in row["images"] or []]
    before, _, behind = str(row["prompt"]).rpartition("<image>")
    content = [{"type": "text", "text": before}, *({"type": "image"} for _ in images), {"type": "text", "text": behind}]
    asked = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    prompt, whole = (
        processor(text=[text], images=images or None, return_tensors="pt") for text in (asked, asked + reply)
    )
    own = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs_TV = own(**whole).logits[0].log_softmax(-1)
    return logprobs_TV, prompt["input_ids"].shape[1], whole["input_ids"].shape[1]


def distilled(model: Path, teacher: Path, output: str, **kd: Any) -> KDRun:
    run = small(KDRun(), model, written(Path("rows.jsonl"), ROWS), Path(output), lr=1e-2, batch_size=len(ROWS))
    run.teacher.model_name_or_path, run.data.image_key, run.kd.weight = str(teacher), "images", 1.0
    for name, value in kd.items():
        setattr(run.kd, name, value)
    return run


def test_a_student_learns_from_a_teacher_that_sees_the_images(workspace: Path, model: Path) -> None:
    teacher = moved_copy(model, workspace / "teacher")
    rollgrad.train_kd(distilled(model, teacher, "out"))
    first, second = (row["train/divergence"] for row in logged(workspace / "out") if "train/loss" in row)
    gaps = []
    for row in ROWS:
        reply = f"{row['completion']}<|im_end|>"
        (own_TV, start, stop), (its_TV, *_) = (logprobs_of(path, row, reply) for path in (model, teacher))
        gap_T = (its_TV.exp() * (its_TV - own_TV)).sum(-1)
        gaps += gap_T[start - 1 : stop - 1].tolist()
    assert first == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    assert second < first
    before, after = load_file(model / "model.safetensors"), weights(workspace / "out")
    assert any("visual" in name and not before[name].equal(after[name]) for name in before)


def test_kept_predictions_are_of_the_images_that_the_teacher_saw(workspace: Path, model: Path) -> None:
    teacher = moved_copy(model, workspace / "teacher")
    rollgrad.train_kd(distilled(model, teacher, "live", top_k=8))
    rollgrad.train_kd(distilled(model, teacher, "kept", top_k=8, cache=True))
    live, kept = (
        [row["train/loss"] for row in logged(workspace / name) if "train/loss" in row] for name in ("live", "kept")
    )
    assert kept == pytest.approx(live, rel=1e-3)
    Path("red.png").write_bytes(picture((0, 200, 0)))  # under the same name: the predictions are computed anew
    rollgrad.train_kd(distilled(model, teacher, "other", top_k=8, cache=True))
    assert logged(workspace / "other")[0]["train/loss"] != pytest.approx(live[0], rel=1e-3)


def test_a_teacher_that_sees_otherwise_is_refused(
    workspace: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = moved_copy(model, workspace / "teacher")
    settings = json.loads((teacher / "processor_config.json").read_text())
    settings["image_processor"]["merge_size"] = 1
    (teacher / "processor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigurationError, match="does not see images by the actor's processor"):
        rollgrad.train_kd(distilled(model, teacher, "out"))
    words = ["train", "kd", "--actor.model_name_or_path", str(model), "--teacher.model_name_or_path", str(teacher)]
    words += ["--data.dataset", "rows.jsonl", "--data.image_key", "images"]
    assert main([*words, "--teacher.url", "http://127.0.0.1:9", "--kd.cache", "--kd.top_k", "8"]) == 2
    assert "a server is sent no images: leave --teacher.url out" in " ".join(capsys.readouterr().err.split())
    words = ["train", "prm", "--actor.model_name_or_path", str(model), "--data.dataset", "rows.jsonl"]
    assert main([*words, "--data.image_key", "images", "--data.placeholder", "#"]) == 2
    assert "leave --data.image_key out, or --data.placeholder" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_process_reward_model_learns_from_images(workspace: Path, model: Path, frozen: bool) -> None:
    """Its first loss is that of transformers' own class, at the tokens that end the steps."""
    run = small(PRMRun(), model, written(Path("rows.jsonl"), SOLUTIONS), workspace / "out", lr=1e-3, batch_size=3)
    run.data.image_key, run.actor.freeze_visual_encoder = "images", frozen
    rollgrad.train_prm(run)
    first, second = (row["train/loss"] for row in logged(workspace / "out") if "train/loss" in row)
    tokenizer = processor_of(str(model)).tokenizer
    right, wrong = (tokenizer(sign)["input_ids"][0] for sign in "+-")
    losses = []
    for row in SOLUTIONS:
        for number, label in enumerate(row["labels"]):
            steps = "".join(f"{step}\n" for step in row["completions"][: number + 1])
            logprobs_TV, *_ = logprobs_of(model, row, steps)
            losses.append(-float(logprobs_TV[-1, [right, wrong]].log_softmax(0)[0 if label else 1]))
    assert first == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert second < first
    before, after = load_file(model / "model.safetensors"), weights(workspace / "out")
    assert any("visual" in name and not before[name].equal(after[name]) for name in before) != frozen


@pytest.fixture
def server() -> Iterator[ImageServer]:
    made = ImageServer()
    yield made
    made.close()


def prompting(model: Path, rows: list[dict[str, Any]], *flags: str) -> list[str]:
    """The words of a command that samples a token for each of some rows."""
    words = ["generate", "--actor.model_name_or_path", str(model), "--data.image_key", "images"]
    words += ["--data.prompt_dataset", str(written(Path("prompts.jsonl"), rows)), "--rollout.max_new_tokens", "1"]
    return [*words, "--rollout.n_samples_per_prompt", "1", "--output", "replies.jsonl", *flags]


def test_images_by_url_are_fetched_for_prompts_where_that_is_allowed(
    workspace: Path, model: Path, server: ImageServer, capsys: pytest.CaptureFixture[str]
) -> None:
    part = {"type": "image_url", "image_url": {"url": server.at("other.png")}}
    rows: list[dict[str, Any]] = [
        {"prompt": "What is <image>?", "images": [server.at("red.png")]},
        {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}], "images": []},
    ]
    for flags, said in (([], "have those of rows fetched with"), (["public"], "127.0.0.1 has no public address")):
        assert main(prompting(model, rows, *(["--data.fetch_images", *flags] if flags else []))) == 2
        assert f"Row 1 of data.prompt_dataset cannot be used: The image {server.at('')[:20]}" in (
            told := " ".join(capsys.readouterr().err.split())
        )
        assert said in told
    assert not server.asked
    assert main(prompting(model, rows, "--data.fetch_images", "any")) == 0
    assert sorted(server.asked) == ["/other.png", "/red.png"]
    replies = [json.loads(line) for line in Path("replies.jsonl").read_text().splitlines()]
    assert [Path(row["images"][0]).read_bytes() for row in replies] == [RED, RED]
    assert main(prompting(model, [{"prompt": "?", "images": server.at("missing")}], "--data.fetch_images", "any")) == 2
    assert "Row 1 of data.prompt_dataset cannot be used" in (told := " ".join(capsys.readouterr().err.split()))
    assert "the server answered 404" in told


def test_images_by_url_are_fetched_for_examples(workspace: Path, model: Path, server: ImageServer) -> None:
    """Once for all runs; they are learned from as files are, and one that is none is dropped."""
    found = []
    for output, image in (("files", "red.png"), ("fetched", server.at("red.png")), ("again", server.at("red.png"))):
        rows = [{"prompt": "What is <image>?", "images": [image], "completion": "red"}]
        rows += [{"prompt": "<image>?", "images": [server.at("page")], "completion": "red"}] * (output == "again")
        run = small(SFTRun(), model, written(Path("rows.jsonl"), rows), Path(output), lr=1e-3, batch_size=1)
        run.data.image_key, run.data.fetch_images, run.data.max_dropped = "images", FetchImages.ANY, 0.5
        rollgrad.train_sft(run)
        found.append([row["train/loss"] for row in logged(Path(output)) if "train/loss" in row])
    assert found[0] == found[1] == found[2]
    assert server.asked == ["/red.png", "/page"]
