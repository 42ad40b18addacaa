"""`examples/pipeline.py` in its smallest form: what one stage saves, the next one begins with."""

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rollgrad
from rollgrad.domain.episodes.rewards import RewardInput
from tests.judged_replies import judged_replies

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import pipeline

    yield pipeline
    for name in ("pipeline", "smollm2"):
        sys.modules.pop(name, None)


def judged(model: Path, replies: list[RewardInput]) -> list[float]:
    """The raw scores of replies by transformers' own class."""
    from transformers import AutoModelForSequenceClassification

    classifier = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return [float(classifier(torch.tensor([reply.token_ids])).logits) for reply in replies]


def test_each_stage_begins_with_what_the_one_before_made(
    pipeline: ModuleType,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    replies = judged_replies(monkeypatch)
    options = pipeline.Options(
        model=tiny_model_dir,
        output_dir=run,
        sft_steps=1,
        rm_steps=2,
        ppo_steps=1,
        held_out=3,
        image=tmp_path / "curves.png",
    )
    pipeline.main(options)
    printed = capsys.readouterr().out
    assert re.findall(r"(before|SFT|PPO) +│ +\d+%", printed) == ["before", "SFT", "PPO"]
    assert re.search(r"reward model: \d+% of held-out pairs in order", printed)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    # PPO's rewards are the reward model's scores, centred and scaled by what training it wrote down.
    config = json.loads((run / "rm" / "model" / "config.json").read_text())
    samples = [json.loads(line) for line in (run / "ppo" / "samples.jsonl").read_text().splitlines()]
    assert samples
    scores = judged(run / "rm" / "model", [reply for reply, _ in replies])
    assert [score for _, score in replies] == pytest.approx(
        [(score - config["mean"]) / config["std"] for score in scores], abs=0.1
    )
    assert {round(sample["reward"], 4) for sample in samples} <= {round(score, 4) for _, score in replies}
    # The critic began as the reward model, body and head, and its own model is saved beside the policy.
    critic = run / "ppo" / "model" / "critic"
    body, began = load_file(critic / "model.safetensors"), load_file(run / "rm" / "model" / "model.safetensors")
    head = load_file(critic / "value_head.safetensors")["value_head.weight"]
    assert (head - began["score.weight"]).abs().max() < 1e-3 < began["score.weight"].abs().max()
    assert all((body[name] - began[f"model.{name}"]).abs().max() < 1e-3 for name in body)
    assert any(not torch.equal(body[name], began[f"model.{name}"]) for name in body)


def test_a_stage_that_was_interrupted_ends_the_pipeline(
    pipeline: ModuleType, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(options: Any) -> rollgrad.TrainResult:
        return rollgrad.TrainResult(output_dir=tmp_path, steps=1, interrupted=True, stopped_by=signal.SIGTERM)

    begun: list[Path] = []
    monkeypatch.setattr(pipeline, "accuracy", lambda *_: 0.0)
    monkeypatch.setattr(pipeline, "fine_tune", interrupted)
    monkeypatch.setattr(pipeline, "train_judge", lambda _, policy: begun.append(policy))
    with pytest.raises(SystemExit) as ended:
        pipeline.main(pipeline.Options(model=tiny_model_dir, output_dir=tmp_path))
    assert ended.value.code == 128 + signal.SIGTERM
    assert not begun
