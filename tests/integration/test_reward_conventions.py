"""Reward functions as users of TRL and verl have them, and a language model as judge, from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollgrad.entrypoints.cli.main import main
from tests.example_runs import logged
from tests.fakes.reward_server import JsonServer

ASKED = [{"role": "user", "content": "What is 3 + 4?"}]
TRL = (
    "accuracy.py:accuracy_reward",
    """
def accuracy_reward(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    assert kwargs["prompts"][0][-1]["content"] == "What is 3 + 4?"
    assert kwargs["trainer_state"].global_step in (0, 1)
    kwargs["log_metric"]("asked", 1.0)
    return [1.0 if truth == "7" else None for content, truth in zip(contents, solution)]
""",
    [{"prompt": ASKED, "solution": "7"}, {"prompt": ASKED, "solution": "7"}],
    {"reward/mean": 1.0, "reward/asked": 1.0},
)
VERL = (
    "gsm8k.py",
    """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "openai/gsm8k" and ground_truth == "7" and extra_info["split"] == "train"
    return {"score": 0.5, "acc": True, "pred": solution_str[:3]}
""",
    [
        {
            "data_source": "openai/gsm8k",
            "prompt": ASKED,
            "reward_model": {"style": "rule", "ground_truth": "7"},
            "extra_info": {"split": "train", "index": 0},
        }
    ],
    {"reward/mean": 0.5, "reward/acc": 1.0},
)
STEPS = (
    "steps.py",
    """
async def reward_func(queries, prompts, easy, hard, step):
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts))
    return [(low + high) * (step + 1) for low, high in zip(easy, hard)]
""",
    [{"prompt": ASKED, "easy": 1, "hard": 2}],
    {"reward/mean": 6.0},
)
"""Two label columns, and in the second step a doubled reward."""


def flags(model: Path, folder: Path, rows: list[dict[str, Any]], *more: str) -> list[str]:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        *("train", "rl", "--actor.model_name_or_path", str(model), "--actor.dtype", "float32"),
        *("--algo.advantage.estimator", "group_norm", "--data.prompt_dataset", str(folder / "rows.jsonl")),
        *("--data.input_key", "prompt", "--rollout.batch_size", "1", "--rollout.n_samples_per_prompt", "2"),
        *("--rollout.max_new_tokens", "6", "--train.max_steps", "2", "--logger.no_console", "--reward.timeout", "120"),
        *("--ckpt.output_dir", str(folder / "out"), *more),
    ]


def latest(folder: Path) -> dict[str, Any]:
    return logged(folder / "out")[-1]


@pytest.mark.parametrize("case", [TRL, VERL, STEPS], ids=["trl", "verl", "columns and step"])
def test_a_file_of_each_convention_trains(case: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    name, source, rows, wanted = case
    (tmp_path / name.partition(":")[0]).write_text(source)
    arguments = flags(tiny_model_dir, tmp_path, rows, "--reward.function_path", str(tmp_path / name))
    assert main(arguments) == 0
    found = latest(tmp_path)
    assert {key: found[key] for key in wanted} == wanted


def test_an_unknown_parameter_ends_the_run_with_one_sentence(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where failed episodes are tolerated: no other would fare better."""
    (tmp_path / "reward.py").write_text("def reward_func(completions, answer):\n    return [0.0]\n")
    arguments = flags(tiny_model_dir, tmp_path, TRL[2], "--reward.function_path", str(tmp_path / "reward.py"))
    assert main([*arguments, "--rollout.max_failures", "9"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "reward_func has the parameter 'answer'" in error
    assert "(datasource, prompt, solution)" in error


def test_a_language_model_judges(tiny_model_dir: Path, tmp_path: Path) -> None:
    def judge(path: str, body: Any) -> tuple[int, Any]:
        assert body["model"] == "grader"
        return 200, {"choices": [{"message": {"content": "Grade: 8/10"}}]}

    server = JsonServer(judge)
    (tmp_path / "judge.txt").write_text("{prompt} | {response} | {solution}")
    settings = {"url": f"{server.url}/v1", "model": "grader", "prompt": str(tmp_path / "judge.txt")}
    more = [word for key, value in settings.items() for word in (f"--reward.judge_{key}", value)]
    try:
        assert main(flags(tiny_model_dir, tmp_path, TRL[2], *more, "--reward.judge_range", "0", "10")) == 0
    finally:
        server.close()
    assert latest(tmp_path)["reward/mean"] == 8.0
    assert len(server.bodies) == 4
    asked = [body["messages"][0]["content"] for body in server.bodies]
    assert all(text.startswith("What is 3 + 4? | ") and text.endswith(" | 7") for text in asked)


def test_queries_over_http_have_special_tokens_and_no_end_that_nobody_sampled(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """The query of a reply that was cut off has no end; the prompt's special tokens are there."""
    server = JsonServer(lambda path, body: (200, {"rewards": [0.0] * len(body["query"])}))
    try:
        assert main(flags(tiny_model_dir, tmp_path, TRL[2], "--reward.remote_url", server.url)) == 0
    finally:
        server.close()
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    queries = [query for body in server.bodies for query in body["query"]]
    assert len(queries) == 4
    assert all(query.startswith("<|im_start|>") for query in queries)
    assert all(json.loads(line)["stop_reason"] == "length" for line in lines)
    assert not any(query.endswith("<|im_end|>") for query in queries)
