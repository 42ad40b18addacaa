"""A learning rate that leaves nothing of the model ends the run with a sentence, and what was saved before stays."""

import json
from pathlib import Path

import pytest

from rollgrad.entrypoints.cli.main import main

PAIR = {"prompt": "What is 3 plus 4?", "chosen": "seven", "rejected": "eight"}
LEARNED = ["--data.dataset", "rows.jsonl", "--train.batch_size", "2"]
TRAINERS: dict[str, list[str]] = {
    "rl": [
        *("--data.prompt_dataset", "rows.jsonl", "--data.input_key", "prompt", "--reward.function_path", "reward.py"),
        *("--rollout.batch_size", "2", "--rollout.n_samples_per_prompt", "2", "--rollout.max_new_tokens", "4"),
        *("--algo.advantage.estimator", "reinforce"),
    ],
    "sft": [*LEARNED, "--data.input_key", "prompt", "--data.output_key", "chosen"],
    "dpo": LEARNED,
    "rm": LEARNED,
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_weights_that_explode_in_the_last_step_are_named_and_not_saved(
    trainer: str,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(f"{json.dumps(PAIR)}\n" * 2)
    Path("reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [sum(map(ord, query)) % 7 for query in queries]\n"
    )
    words = ["train", trainer, "--actor.model_name_or_path", str(tiny_model_dir), "--actor.adam.lr", "1e30"]
    assert main([*words, *TRAINERS[trainer], "--train.max_steps", "1", "--ckpt.output_dir", "out"]) == 2
    said = capsys.readouterr().err
    assert "Optimizer step 1 has made weights NaN, infinite or so large" in said
    assert not Path("out/model").exists()
    assert not [*Path("out").glob("training_state_*")]
    assert json.loads(Path("out/run.json").read_text())["status"] == "failed"
