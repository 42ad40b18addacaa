"""Whole runs of each trainer over examples on a GPU that is pretended: every tensor is where it has to be, and the
metrics and weights are those of the CPU."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import rollgrad
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.sections.actor import LoraConfig
from tests.example_runs import logged, small, weights, written
from tests.image_runs import enter_picture_folder
from tests.moved_models import moved_copy
from tests.pretended_gpu import pretended_gpu
from tests.tiny_vision import save_tiny_vlm

pytestmark = [pytest.mark.slow]

ROWS: list[dict[str, Any]] = [
    {"prompt": "What is <image>?", "images": ["red.png"], "completion": "red"},
    {"prompt": "Are they alike?", "images": ["blue.png", "red.png"], "completion": "no, they are not"},
    {"prompt": "What is 1 plus 1?", "images": [], "completion": "2"},
]
PAIRS = [
    {"prompt": row["prompt"], "images": row["images"], "chosen": row["completion"], "rejected": "?"} for row in ROWS
]
JUDGED = [
    {"prompt": row["prompt"], "images": row["images"], "completion": row["completion"], "label": number != 1}
    for number, row in enumerate(ROWS)
]
SOLUTIONS = [
    {"prompt": row["prompt"], "images": row["images"], "completions": ["I look.", row["completion"]], "labels": [1, 0]}
    for row in ROWS
]

LORA = LoraConfig(rank=2)

TRAINERS: Mapping[str, tuple[type[Any], Callable[[Any], Any], list[dict[str, Any]], dict[str, Any]]] = {
    "sft": (rollgrad.SFTRun, rollgrad.train_sft, ROWS, {}),
    "sft_of_adapters": (rollgrad.SFTRun, rollgrad.train_sft, ROWS, {"actor.lora": LORA}),
    "dpo": (rollgrad.DPORun, rollgrad.train_dpo, PAIRS, {}),
    "kto": (rollgrad.KTORun, rollgrad.train_kto, JUDGED, {}),
    "kd": (rollgrad.KDRun, rollgrad.train_kd, ROWS, {}),
    "kd_of_kept_predictions": (rollgrad.KDRun, rollgrad.train_kd, ROWS, {"kd.cache": True, "kd.top_k": 8}),
    "rm": (rollgrad.RMRun, rollgrad.train_rm, PAIRS, {}),
    "prm": (rollgrad.PRMRun, rollgrad.train_prm, SOLUTIONS, {}),
}
"""Settings, the function that trains, its rows, and what else is set."""

SEEING = ("sft", "dpo", "rm")
"""Those that `make ci` compares with images, the others with texts: each makes its batches in a way of its own."""


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny_vlm("qwen2_5_vl", tmp_path_factory.mktemp("model")))


def measured(path: Path) -> list[dict[str, float]]:
    """Returns what a run logs of its training and evaluations, but for times."""
    kept = ("train/loss", "train/grad_norm", "train/divergence", "train/kl", "train/reward_margin", "eval/loss")
    return [{name: row[name] for name in kept if name in row} for row in logged(path)]


@pytest.mark.parametrize(
    ("trainer", "sees"),
    [
        *(
            pytest.param(trainer, False, id=f"{trainer}-text", marks=[pytest.mark.wide] if trainer in SEEING else [])
            for trainer in TRAINERS
        ),
        *(
            pytest.param(trainer, True, id=f"{trainer}-images", marks=[] if trainer in SEEING else [pytest.mark.wide])
            for trainer in TRAINERS
        ),
    ],
)
def test_a_run_on_a_gpu_is_the_cpu_s(
    trainer: str,
    sees: bool,
    tiny_model_dir: Path,
    vision_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enter_picture_folder(tmp_path, monkeypatch)
    model = vision_model if sees else tiny_model_dir
    make_run, train, rows, more = TRAINERS[trainer]
    data = written(tmp_path / "rows.jsonl", rows if sees else [{**row, "images": None} for row in rows])
    teacher = moved_copy(model, tmp_path / "teacher")

    def trained(name: str) -> Path:
        run: OfflineRun = small(make_run(), model, data, tmp_path / name, lr=1e-3, batch_size=2)
        run.actor.adam.eps = 1e-3  # else first steps magnify what rounds otherwise where a gradient is nearly 0
        run.data.image_key = "images" if sees else None
        run.data.cache_dir = str(tmp_path / f"cache_{name}")
        run.eval.dataset, run.ckpt.state_steps = str(data), 1
        if isinstance(run, rollgrad.KDRun):
            run.teacher.model_name_or_path = str(teacher)
        for setting, value in more.items():
            section, _, key = setting.partition(".")
            setattr(getattr(run, section), key, value)
        train(run)
        return tmp_path / name

    expected = trained("cpu")
    with pretended_gpu():
        found = trained("gpu")
    assert any("train/loss" in row for row in measured(found))
    for mine, theirs in zip(measured(found), measured(expected), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    wanted = weights(expected)
    # Where there is a GPU it computes what the CPU is taken to.
    slack = 1e-3 if torch.cuda.is_available() else 1e-5
    for name, tensor in weights(found).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=slack)
