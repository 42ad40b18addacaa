"""Every trainer over examples with Muon, with averages of weights, and with adapters on quantised weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollgrad.entrypoints.cli.main import main
from tests.example_runs import logged
from tests.moved_models import moved_copy

ROWS, BETA = 4, 0.25
ANSWERS = [{"prompt": f"What is {a} plus {a}?", "completion": f"The answer is {2 * a}."} for a in range(ROWS)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "I do not know."} for row in ANSWERS]
LABELS = [{**row, "label": number % 2} for number, row in enumerate(ANSWERS)]
STEPS = [
    {"prompt": "How many?", "completions": ["One.", f"So {a}."], "labels": [True, a % 2 == 0]} for a in range(ROWS)
]
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "sft": ANSWERS,
    "dpo": PAIRS,
    "kto": LABELS,
    "rm": PAIRS,
    "prm": STEPS,
    "kd": ANSWERS,
}


@pytest.fixture
def words(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the command that trains a model on its examples in the directory `out`."""
    monkeypatch.chdir(tmp_path)

    def made(trainer: str) -> list[str]:
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EXAMPLES[trainer]))
        words = ["train", trainer, "--actor.model_name_or_path", str(tiny_model_dir), "--data.dataset", "rows.jsonl"]
        words += ["--train.batch_size", str(ROWS), "--ckpt.output_dir", "out", "--actor.lr_warmup_ratio", "0"]
        if trainer == "kd":
            teacher = tmp_path / "teacher"
            path = teacher if teacher.exists() else moved_copy(tiny_model_dir, teacher)
            words += ["--teacher.model_name_or_path", str(path)]
        return words

    return made


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a model's body, under whatever name its class has them."""
    named = {name.removeprefix("model."): tensor for name, tensor in load_file(path / "model.safetensors").items()}
    return {name: tensor for name, tensor in named.items() if name.startswith(("layers.", "embed_tokens."))}


@pytest.mark.parametrize("trainer", EXAMPLES)
def test_muon_and_averages(words: Any, trainer: str, tiny_model_dir: Path) -> None:
    """One step: Muon turns all directions of a matrix alike, and the average is of the weights before and after."""
    more = ["--actor.dtype", "float32", "--train.max_steps", "1", "--actor.optim", "muon", "--actor.muon.lr", "0.01"]
    assert main([*words(trainer), *more, "--train.enable_ema", "--train.ema_beta", str(BETA)]) == 0
    before, after, average = map(weights, (tiny_model_dir, Path("out", "model"), Path("out", "model", "ema")))
    assert before.keys() == after.keys() == average.keys()
    for name, start in before.items():
        torch.testing.assert_close(average[name], BETA * start + (1 - BETA) * after[name], rtol=1e-4, atol=1e-6)
    moved = after["layers.0.mlp.gate_proj.weight"] - before["layers.0.mlp.gate_proj.weight"]
    sizes = torch.linalg.svdvals(moved.float())
    assert sizes[7] > 0.8 * sizes[0] > 0, "the gradient of few tokens has few directions"


@pytest.mark.parametrize("trainer", EXAMPLES)
def test_adapters_on_quantised_weights(words: Any, trainer: str) -> None:
    """They learn, their average is kept, and a run continues from its training state."""
    more = ["--actor.lora.rank", "4", "--actor.lora.load_in_4bit", "--train.enable_ema", "--actor.adam.lr", "0.01"]
    more += ["--ckpt.state_steps", "1"]
    assert main([*words(trainer), *more, "--train.max_steps", "3"]) == 0
    assert main([*words(trainer), *more, "--train.max_steps", "4", "--ckpt.resume", "always"]) == 0
    steps = [row for row in logged(Path("out")) if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    trained, average = weights(Path("out", "model")), weights(Path("out", "model", "ema"))
    assert any(not torch.equal(trained[name], average[name]) for name in trained)
