"""`--dry_run` of commands that train nothing."""

import json
from pathlib import Path

import pytest

from rollgrad.entrypoints.cli.main import main

REWARD = "def reward_func(queries, prompts, labels): return [0.25 for _ in queries]\n"


@pytest.fixture
def here(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"input": f"What is {number} plus 1?", "label": str(number + 1)} for number in range(3)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("reward.py").write_text(REWARD)
    Path("model").symlink_to(tiny_model_dir)
    return tmp_path


MODEL = ["--actor.model_name_or_path", "model", "--dry_run"]
REWARDED = ["--reward.function_path", "reward.py", "--data.label_key", "label"]
SHORT = ["--rollout.max_new_tokens", "8"]
PROMPTS = ["--data.prompt_dataset", "rows.jsonl", *SHORT]


def test_eval_says_what_it_would_sample(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = ["--eval.dataset", "rows.jsonl", "--eval.n_samples_per_prompt", "2", "--eval.temperature", "1"]
    (here / "replies.jsonl").write_text("as an evaluation that ended early leaves it")
    assert main(["eval", "model", "./model", *MODEL, *REWARDED, *SHORT, *samples, "--output", "replies.jsonl"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Nothing that a dry run checks would stop this run.")
    assert "eval.dataset: 3 prompts; 6 replies of each of 2 models, 2 to each." in told
    assert "replies.jsonl is there: what it has already is left alone." in told
    assert "A prompt, as the model sees it" in told
    assert "The reward of the reply '1' (the label alone) is 0.25." in told


def test_a_prompt_that_an_environment_may_begin_otherwise_is_shown_as_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "agent.py").write_text(
        "from rollgrad.application.episodes.tool_environment import ToolEnvironment\n\n\n"
        "class Environment(ToolEnvironment):\n    def __init__(self):\n        super().__init__([])\n"
    )
    agent = ["--train.agent_func_path", "agent.py", "--rollout.max_episode_tokens", "60"]
    assert main(["eval", "model", *MODEL, *REWARDED, *SHORT, *agent, "--eval.dataset", "rows.jsonl"]) == 0
    told = capsys.readouterr().out
    assert "A prompt, which agent.py may begin otherwise, with tools for example (" in told
    assert "as the model sees it" not in told


def test_several_rewards_are_asked_apart_and_together(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ["--reward.function_path", "reward.py", "--reward.verifier", "last_number", "--data.label_key", "label"]
    weights = ["--reward.weights", "reward", "2", "last_number", "1"]
    assert main(["eval", "model", *MODEL, *both, *weights, *SHORT, "--eval.dataset", "rows.jsonl"]) == 0
    told = capsys.readouterr().out
    for name, value in (("reward", "0.25"), ("last_number", "1"), ("all together", "1.5")):
        assert f"The reward ({name}) of the reply '1' (the label alone) is {value}." in told
    Path("reward.py").write_text(REWARD.replace("[0.25 for _ in queries]", "{'rewards': {'a': [0.25]}}"))
    assert main(["eval", "model", *MODEL, *both, *weights, *SHORT, "--eval.dataset", "rows.jsonl"]) == 2
    assert "The rewards are a, last_number, but reward.weights names reward, last_number" in capsys.readouterr().err


def test_a_model_is_evaluated_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--eval.dataset", "rows.jsonl", "--eval.max_samples", "0"]
    assert main(["eval", "model", "other", "model", *MODEL, *REWARDED, *SHORT, *flags]) == 2
    told = capsys.readouterr().err
    assert "Models are named twice: model. Name each of them once." in told
    assert "eval.max_samples is 0" in told


def test_generate_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {*here.iterdir()}
    assert main(["generate", *MODEL, *PROMPTS, "--rollout.n_samples_per_prompt", "4", "--output", "out.jsonl"]) == 0
    told = capsys.readouterr().out
    assert "data.prompt_dataset: 3 prompts; 12 replies, 4 to each." in told
    assert {*here.iterdir()} == before
    Path("out.jsonl").write_text("")
    assert main(["generate", *MODEL, *PROMPTS, "--output", "out.jsonl"]) == 0
    assert "out.jsonl is there: what it has already is left alone." in capsys.readouterr().out


def test_lengths_are_checked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *MODEL, *PROMPTS, "--output", "out.jsonl", "--rollout.max_new_tokens", "600"]) == 2
    assert "but the model has 512 positions" in capsys.readouterr().err


def test_a_wrong_mixture_is_told_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data.prompt_dataset", "rows.jsonl,rows.jsonl", "--data.prompt_probs", "0", "1", *SHORT]
    assert main(["generate", *MODEL, *words, "--output", "out.jsonl"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("prompt_probs is (0.0, 1.0)") == 1
    assert "data.prompt_dataset: 6 prompts" in captured.out  # which are read all the same


def test_score_reads_the_replies(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replies = [{"row": row, "sample": s, "prompt": "a", "completion": "b"} for row in range(2) for s in range(3)]
    Path("replies.jsonl").write_text("".join(json.dumps(reply) + "\n" for reply in replies))
    files = ["--input", "replies.jsonl", "--output", "scored.jsonl"]
    assert main(["score", *MODEL, *REWARDED, *files]) == 0
    assert "replies.jsonl: 6 replies to 2 prompts." in capsys.readouterr().out
    assert not Path("scored.jsonl").exists()
    Path("replies.jsonl").write_text("{}\n")
    Path("reward.py").write_text("undefined")
    assert main(["score", *MODEL, *REWARDED, *files[:3], "replies.jsonl"]) == 2
    problems = capsys.readouterr().err
    assert "replies.jsonl" in problems
    assert "which is the file that is read: choose another --output" in problems
    assert "reward.py cannot be imported: NameError" in problems


def test_a_loop_says_what_an_iteration_samples(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MODEL, *REWARDED, *PROMPTS, "--rollout.n_samples_per_prompt", "2", "--ckpt.output_dir", "loop"]
    assert main(["loop", "rs", *words]) == 0
    told = capsys.readouterr().out
    assert "data.prompt_dataset: 3 prompts; 6 replies, 2 to each." in told
    assert "(the label alone) is 0.25." in told
    assert "What it trains on is sampled first" in told
    assert not Path("loop").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "--eval.dataset", "gone.jsonl"],
        ["generate", "--data.prompt_dataset", "gone.jsonl", "--output", "o.jsonl"],
        ["loop", "rs", "--data.prompt_dataset", "gone.jsonl", "--ckpt.output_dir", "loop"],
    ],
    ids=["eval", "generate", "loop"],
)
def test_all_problems_are_told_at_once(command: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged = [] if command[0] == "generate" else ["--reward.function_path", "gone.py"]
    wrong = ["--actor.model_name_or_path", "./gone", "--rollout.max_new_tokens", "0", "--dry_run"]
    assert main([*command, *wrong, *judged]) == 2
    told = capsys.readouterr().err
    assert "rollout.max_new_tokens is 0" in told
    assert "actor.model_name_or_path is './gone'" in told
    assert "'gone.jsonl', which does not exist" in told
    if judged:
        assert "reward.function_path is 'gone.py', which is no file" in told
