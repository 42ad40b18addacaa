"""A run that cannot learn says so at the step where it is known, and in its last lines."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollgrad.entrypoints.cli.main import main

Run = Callable[..., tuple[list[str], str]]


ENDING = ("--rollout.max_new_tokens", "60", "--rollout.stop_strings", "a", "e", "i", "o")
"""Flags by which replies of a random model end by themselves, after four tokens."""


@pytest.fixture
def run(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs five steps with a reward; returns the lines on stderr, and stdout."""
    monkeypatch.chdir(tmp_path)
    rows = [{"input": f"What is {a} plus {a}?", "label": str(2 * a)} for a in range(1, 9)]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["train", "rl", "--actor.model_name_or_path", str(tiny_model_dir)]
    command += ["--data.prompt_dataset", "prompts.jsonl", "--data.label_key", "label"]
    command += ["--reward.function_path", "reward.py", "--rollout.batch_size", "4"]
    command += ["--rollout.n_samples_per_prompt", "2", "--train.max_steps", "5", "--ckpt.output_dir", "out"]
    command += ["--reward.timeout", "300"]

    def run(reward: str, *flags: str) -> tuple[list[str], str]:
        Path("reward.py").write_text(f"def reward_func(queries, prompts, labels):\n    return {reward}\n")
        assert main([*command, *flags]) == 0
        printed = capsys.readouterr()
        return printed.err.splitlines(), printed.out

    return run


def test_a_constant_reward_is_said_at_the_third_step_and_at_the_end(run: Run) -> None:
    lines, printed = run(
        "[0.0 for query in queries]",
        "--algo.advantage.estimator",
        "rloo",
        *ENDING,
    )
    said = [number for number, line in enumerate(lines) if "level=warning" in line]
    assert len(said) == 1
    assert "The reward was 0 for every reply of 3 rollouts in a row (8 replies each)" in lines[said[0]]
    assert "--data.label_key" in lines[said[0]]
    assert lines[said[0] - 1].startswith("step 3/5")
    assert lines[said[0] + 1].startswith("step 4/5")
    assert lines[-2] == "warning: Nothing was learned: the gradient was 0 in all 5 updates."
    assert lines[-1].startswith("warning: steps 1 to 5: The reward was 0 for every reply")
    assert printed == "out/report.html\n"


def test_replies_that_are_all_cut_are_said(run: Run) -> None:
    lines, _ = run(
        "[len(set(query)) / 100 for query in queries]",
        "--algo.advantage.estimator",
        "rloo",
        "--rollout.max_new_tokens",
        "2",
        "--train.seed",
        "3",
    )
    (said,) = (line for line in lines if "level=warning" in line)
    assert "--rollout.max_new_tokens, which is 2" in said
    assert not any("Nothing was learned" in line for line in lines)


def test_a_run_that_learns_says_nothing(run: Run) -> None:
    lines, _ = run(
        "[len(set(query)) / 100 for query in queries]",
        "--algo.advantage.estimator",
        "rloo",
        *ENDING,
    )
    assert [line for line in lines if "warning" in line] == []


LEARNS = ("--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "8", "--actor.adam.lr", "0.003")
LEARNS = (*LEARNS, "--rollout.max_new_tokens", "6", "--actor.dtype", "float32", "--train.seed", "1")
VOWELS = "set('aeiou') & set(query[len(prompt):])"


@pytest.mark.parametrize(("weight", "outweighs"), [("50", True), pytest.param("0.1", False, marks=pytest.mark.wide)])
def test_a_kl_term_is_said_that_leaves_nothing_of_the_reward(weight: str, outweighs: bool, run: Run) -> None:
    kl = ("--algo.kl.init_coef", weight, "--algo.kl.use_loss", "--algo.kl.estimator", "k3")
    reward = f"[float(bool({VOWELS})) for query, prompt in zip(queries, prompts)]"
    lines, _ = run(reward, *LEARNS, *kl, "--train.max_steps", "8")
    said = [line for line in lines if "finding=kl_outweighs" in line]
    assert len(said) == outweighs
    assert all("whose weight is 50, outweighed the reward" in line for line in said)


@pytest.mark.parametrize("wanted", [pytest.param(True, marks=pytest.mark.wide), False])
def test_evaluations_are_said_that_fall_while_the_reward_of_training_rises(wanted: bool, run: Run) -> None:
    """The evaluation wants the opposite of what training rewards, or the same."""
    rows = [{"input": f"Tell {n}.", "label": str(n)} for n in range(32)]
    Path("held_out.jsonl").write_text("\n".join(map(json.dumps, rows)))
    held = ("--eval.dataset", "held_out.jsonl", "--eval.steps", "4", "--eval.temperature", "1")
    reward = f"[float(bool({VOWELS}) == ({wanted} or 'What' in prompt)) for query, prompt in zip(queries, prompts)]"
    lines, _ = run(reward, *LEARNS, *held, "--train.max_steps", "20")
    said = [line for line in lines if "finding=evaluation_falls" in line]
    assert len(said) == (not wanted)
    assert all("while the reward of training rose" in line for line in said)
