import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.application.settings.sections.reward import Verifier
from rollgrad.application.settings.sft import SFTRun
from rollgrad.application.settings.validation import leaves
from rollgrad.domain.errors import CheckpointError, ConfigurationError, DataError, OutOfMemory, WorkerError
from rollgrad.entrypoints.cli import commands
from rollgrad.entrypoints.cli.commands import COMMANDS
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.output import show_metrics
from rollgrad.entrypoints.config_io import dump_config, setting_names, structure_config
from rollgrad.entrypoints.dry_run import example_file_problems, file_problems, reading


def printed_config(capsys: pytest.CaptureFixture[str], *arguments: str) -> RLConfig:
    main(["train", "rl", "--print_config", *arguments])
    return structure_config(yaml.safe_load(capsys.readouterr().out))


def test_print_config_without_flags_is_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed_config(capsys) == RLConfig()


def test_a_table_of_metrics_cuts_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Names are folded in it where they are too long, and its title is not."""
    title = "models/a_model on data/" + "a_long_name/" * 20
    model, metric = "models/" + "x" * 60, "eval/" + "y" * 60 + "/pass@1_stderr"
    show_metrics(title, {model: {metric: 0.25}})
    first, *table = capsys.readouterr().out.splitlines()
    assert first == title
    assert {letter: "".join(table).count(letter) for letter in "xy"} == {"x": 60, "y": 60}
    assert "…" not in "".join(table)


def test_standard_errors_are_beside_what_they_are_of(capsys: pytest.CaptureFixture[str]) -> None:
    """A difference of two of them or more has a mark, and one without an error has none."""
    first = {"eval/pass@1": 0.25, "eval/mean@2": 0.5, "eval/pass@1_stderr": 0.0625, "eval/mean_stderr": 0.123}
    better = {"eval/pass@1_difference": 0.125, "eval/pass@1_difference_stderr": 0.0625}
    same = {"eval/pass@1_difference": 0.0, "eval/pass@1_difference_stderr": 0.0}
    chance = {"eval/mean_difference": -0.125, "eval/mean_difference_stderr": 0.07, "eval/x_stderr": 3.0}
    show_metrics(
        "held-out", {"a": first, "b": first | better | chance, "c": {"eval/pass@1_difference": 0.5}, "d": same}
    )
    lines = capsys.readouterr().out.splitlines()
    assert [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")] == [
        ["eval/pass@1", "0.25 ± 0.062", "0.25 ± 0.062", "", ""],
        ["eval/mean@2", "0.5 ± 0.12", "0.5 ± 0.12", "", ""],
        ["eval/pass@1_difference", "", "+0.125 ± 0.062 *", "+0.5", "+0 ± 0"],
        ["eval/mean_difference", "", "-0.125 ± 0.07", "", ""],
        ["eval/x_stderr", "", "3", "", ""],
    ]
    assert lines[-1] == "* a difference of two standard errors or more, which is seldom chance"


@pytest.mark.parametrize("width", [60, 80, None])
def test_names_of_metrics_are_whole_in_a_table_of_many_models(
    width: int | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal there are as many tables as it needs, and in a file one."""
    for name, value in {"COLUMNS": width, "FORCE_COLOR": width, "NO_COLOR": width, "TERM": width and "xterm"}.items():
        monkeypatch.setenv(name, str(value)) if value else monkeypatch.delenv(name, raising=False)
    metrics = {"eval/pass@1": 0.1875, "eval/pass@1_stderr": 0.01, "eval/word_problems_test/pass@1": 0.25}
    models = [f"runs/{'of_a_long_name/' * count}model" for count in range(4)]
    show_metrics("held-out", dict.fromkeys(models, metrics))
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("│")]
    assert all("│ eval/pass@1 " in line or "│ eval/word_problems_test/pass@1 │" in line for line in rows)
    assert sum(line.count("0.1875 ± 0.01") for line in rows) == len(models)
    assert len(rows) / 2 == {60: 4, 80: 2, None: 1}[width], "tables"
    assert width is None or max(map(len, rows)) <= width


@pytest.mark.parametrize("command", [["train", "rl"], ["eval"]])
def test_print_config_tells_what_is_wrong_with_it(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--print_config", "--actor.model_name_or_path", "m", "--rollout.top_p", "2"]) == 2
    printed = capsys.readouterr()
    assert structure_config(yaml.safe_load(printed.out)).rollout.top_p == 2.0
    errors = printed.err.splitlines()
    assert len(errors) == 2
    assert all(line.startswith("error: ") for line in errors)
    assert "rollout.top_p is 2.0" in errors[0]
    right = ["--data.prompt_dataset", "p.jsonl", "--eval.dataset", "e.jsonl", "--reward.verifier", "math"]
    assert main([*command, "--print_config", "--actor.model_name_or_path", "m", *right]) == 0
    assert capsys.readouterr().err == ""


def test_a_sixth_of_the_settings_wrong_in_one_file_is_one_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown keys, values of another type, and numbers that are not finite or out of range, in turn."""
    told: dict[str, str] = {}
    tree: dict[str, Any] = {}
    ranges = {name for name, _, its in leaves(RLConfig()) if its.range is not None}
    ranges.remove("reward.stop_properly_penalty_coef")  # any number up to 1
    for index, name in enumerate(sorted(setting_names())[::6]):
        *sections, key = name.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        bounded = name in ranges
        wrong_key = index % 3 == 0
        branch[f"{key}_" if wrong_key else key] = (
            -7.5 if wrong_key or (bounded and index % 3 == 1) else {"no": ["such"]}
        )
        told[name] = f"{name}_ is not a setting" if wrong_key else f"{name} is "
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", "rl", "--config", str(tmp_path / "run.yaml")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(told) > 30
    for name, words in told.items():
        assert any(line.startswith(f"error: {words}") for line in errors), name
    # What the file leaves out is told in the same answer.
    assert any("--actor.model_name_or_path" in line for line in errors)


def test_flags_override_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_file = RLConfig()
    in_file.train.max_steps = 7
    in_file.train.seed = 5
    in_file.reward.verifier = Verifier.MATH
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(in_file))
    for config_flags in (["--config", str(path)], [f"--config={path}"]):
        config = printed_config(capsys, *config_flags, "--train.seed", "9", "--reward.verifier", "None")
        assert (config.train.max_steps, config.train.seed, config.reward.verifier) == (7, 9, None)


def test_hyphens_and_underscores_are_one_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--train.max_steps".replace("_", "-"), "--train.max_steps"):
        assert printed_config(capsys, flag, "3").train.max_steps == 3


def test_values_of_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    config = printed_config(
        capsys,
        *("--actor.eps_clip_low_high", "0.2", "0.28"),
        *("--rollout.stop_strings", "a", "b c"),
        *("--eval.steps", "-1"),
        *("--actor.adam.lr", "2e-5"),
        "--data.no_apply_chat_template",
        "--actor.gradient_checkpointing",
    )
    assert config.actor.eps_clip_low_high == (0.2, 0.28)
    assert config.rollout.stop_strings == ("a", "b c")
    assert config.eval.steps == -1
    assert config.actor.adam.lr == 2e-5
    assert not config.data.apply_chat_template
    assert config.actor.gradient_checkpointing is Checkpointing.FULL


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["--actor.gradient_checkpointing", "True"], Checkpointing.FULL),
        (["--actor.gradient_checkpointing=false"], Checkpointing.OFF),
        (["--actor.no_gradient_checkpointing"], Checkpointing.OFF),
        (["--actor.gradient_checkpointing", "selective"], Checkpointing.SELECTIVE),
        (["--actor.gradient-checkpointing", "Full"], Checkpointing.FULL),
    ],
)
def test_gradient_checkpointing_is_a_switch_and_a_word(
    capsys: pytest.CaptureFixture[str], words: list[str], kind: Checkpointing
) -> None:
    assert printed_config(capsys, *words).actor.gradient_checkpointing is kind


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rollgrad ")
    assert main([]) == 0
    whole = capsys.readouterr().out
    assert all(f"  rollgrad {name} " in whole for name in COMMANDS)
    assert main(["train", "--help"]) == 0
    shown = {" ".join(line.split()[:3]) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert shown == {f"rollgrad {name}" for name in COMMANDS if name.startswith("train ")}


NEEDED = ["--actor.model_name_or_path", "org/m", "--data.prompt_dataset", "org/d", "--reward.verifier", "exact_match"]
"""Flags that a run cannot do without."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "rl"], "trian rl is not a command; did you mean rollgrad train rl?"),
        (
            ["serve"],
            "serve is not a command by itself; write rollgrad serve agent or rollgrad serve reward or rollgrad serve "
            "tinker.",
        ),
        (["loop", "forever"], "loop forever is not a command; those of loop are loop rs, loop iter_dpo, loop csft."),
        (["fly"], f"fly is not a command; the commands are {', '.join(COMMANDS)}."),
        (
            ["train", "rl", "--algo.advantage.estimatr", "rloo"],
            "--algo.advantage.estimatr is not a flag; did you mean --algo.advantage.estimator?",
        ),
        (["train", "rl", "--n_samples_per_prompt", "4"], "did you mean --rollout.n_samples_per_prompt?"),
        (["train", "rl", "--prnt-config"], "did you mean --print_config?"),
        (["doctor", "--jsn"], "did you mean --json?"),
        (
            ["data", "show", "--n", "-1", *("--actor.model_name_or_path", "m", "--data.dataset", "d.jsonl")],
            "n is -1, but it must be at least 0: change --n.",
        ),
        (["train", "rl", "rloo"], "'rloo' belongs to no flag"),
        (["train", "rl", "--rollout.top_p", "much"], "--rollout.top_p is 'much', but it takes a number: change"),
        (["train", "rl", "--train.max_steps"], "--train.max_steps has no value, but it takes an integer, or None"),
        (["train", "rl", "--train.seed=1.5"], "--train.seed is '1.5', but it takes an integer: change --train.seed."),
        (["train", "rl", "--actor.adam.betas", "0.9"], "is '0.9', but it takes 2 numbers with spaces between"),
        (["train", "rl", "--reward.weights", "right"], "is 'right', but it takes pairs of a name and a number"),
        (["train", "rl", "--algo.kl.against", "k9"], "invalid choice 'k9' for argument '--algo.kl.against'"),
        (["train", "rl", f"--train.seed={2**42}"], "but it must be from 0 to 4398046511103: change --train.seed"),
        (["train", "rl", "--config"], "--config"),
        (["train", "rl", "--config", "a.yaml", "--config=b.yaml"], "--config is given 2 times (b.yaml, a.yaml)"),
        (
            ["train", "rl", "--ckpt.output_dir=~/runs"],
            "is '~/runs', but it must be a directory of this machine, without",
        ),
    ],
)
def test_a_bad_command_line_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = [*arguments[:2], *NEEDED, *arguments[2:]] if arguments[:2] == ["train", "rl"] else arguments
    assert main(whole) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_an_invalid_choice_lists_the_known_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "rl", "--algo.advantage.estimator", "vtrace"]) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in ("gae", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"))


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ROLLGRAD_DEBUG", "1")
    assert main(["train", "rl"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nGPU 0"), "There is too little memory (CUDA out of memory.)."),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "There is too little memory (DefaultCPUAllocator"),
        (WorkerError("Rank 1 failed (OutOfMemoryError: CUDA)."), "Rank 1 failed (OutOfMemoryError: CUDA)."),
    ],
    ids=["gpu", "cpu", "process of a model"],
)
def test_memory_that_runs_out_while_models_load_is_told_with_what_takes_less(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> int:
        raise error

    monkeypatch.setattr(commands, "_dispatch", load)
    assert main(["eval"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {said}")
    assert told.count("\n") == 1
    assert "--actor.lora.rank" in told
    error = OutOfMemory("Step 3 ran out of memory: train less.")
    assert main(["eval"]) == 2
    assert capsys.readouterr().err == "error: Step 3 ran out of memory: train less.\n"


def files_config(tmp_path: Path) -> RLConfig:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"input": "1 + 1", "label": "2"}\n')
    (tmp_path / "reward.py").write_text("")
    config = RLConfig()
    config.actor.model_name_or_path = str(tmp_path / "model")
    config.data.prompt_dataset = str(tmp_path / "prompts.jsonl")
    config.eval.dataset = str(tmp_path / "prompts.jsonl")
    config.reward.function_path = str(tmp_path / "reward.py")
    config.ckpt.output_dir = str(tmp_path / "new" / "run")
    return config


def test_files_that_are_there_pass(tmp_path: Path) -> None:
    config = files_config(tmp_path)
    assert not file_problems(config)
    assert not (tmp_path / "new").exists()


def test_hub_names_and_generated_data_pass(tmp_path: Path) -> None:
    config = files_config(tmp_path)
    config.actor.model_name_or_path = "organisation/model"
    config.data.prompt_dataset = "organisation/dataset,reasoning_gym:basic_arithmetic"
    assert not file_problems(config)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("actor.model_name_or_path", "./missing", CheckpointError),
        ("actor.model_name_or_path", "{}", CheckpointError),
        ("actor.model_name_or_path", "{}/prompts.jsonl", CheckpointError),
        ("critic.model_name_or_path", "./missing", CheckpointError),
        ("ref.model_name_or_path", "./missing", CheckpointError),
        ("data.prompt_dataset", "{}/prompts.jsonl,missing.jsonl", DataError),
        ("eval.dataset", "./missing", DataError),
        ("reward.function_path", "{}/missing.py", ConfigurationError),
        ("ckpt.output_dir", "{}/reward.py/run", CheckpointError),
        ("ckpt.state_dir", "{}/reward.py/states", CheckpointError),
        ("logger.tensorboard_dir", "{}/reward.py", CheckpointError),
        ("ckpt.push_to_hub", "me/model", ConfigurationError),  # HF_HUB_OFFLINE is set in tests
    ],
)
def test_a_wrong_path_names_its_flag(tmp_path: Path, key: str, value: str, kind: type[Exception]) -> None:
    config = files_config(tmp_path)
    section, name = key.split(".")
    setattr(getattr(config, section), name, value.format(tmp_path))
    ((setting, problem),) = file_problems(config).items()
    assert setting == key
    assert isinstance(problem, kind)
    assert f"--{key}" in str(problem)


def test_weights_that_are_not_whole_are_told_before_anything_is_prepared(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"cut")
    run = SFTRun()
    run.actor.model_name_or_path = str(tmp_path / "model")
    run.ckpt.output_dir, run.data.dataset = str(tmp_path / "run"), "nowhere.jsonl"
    problem, rows = example_file_problems(run)
    assert "data.dataset is 'nowhere.jsonl', which does not exist" in str(rows)
    assert str(problem).startswith("actor.model_name_or_path is ")
    assert "model.safetensors is cut off" in str(problem)


def test_all_wrong_paths_are_told_at_once(tmp_path: Path) -> None:
    config = files_config(tmp_path)
    config.actor.model_name_or_path = "./missing"
    config.data.prompt_dataset = "nowhere.jsonl"
    config.eval.dataset = "./nothing"
    config.ckpt.output_dir = str(tmp_path / "reward.py" / "run")
    problems = file_problems(config)
    assert problems.keys() == {"actor.model_name_or_path", "data.prompt_dataset", "eval.dataset", "ckpt.output_dir"}
    assert all(f"--{key}" in str(problem) for key, problem in problems.items())


def test_mistakes_of_every_kind_are_one_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown key and a wrong type in the file, and on the command line an unknown flag, values that are no numbers,
    and what is out of range, means nothing, or is not allowed together."""
    (tmp_path / "run.yaml").write_text("train:\n  sed: 1\nrollout:\n  top_k: many\n")
    words = ["--config", str(tmp_path / "run.yaml"), "--rollout.batch-size", "few", "--train.max-steps=1.5"]
    words += [
        "--data.apply-chat-template",
        "maybe",
        "--eval.stps",
        "2",
        "--actor.adam.lr",
        "-1",
        "--train.ema_beta",
        "0.5",
    ]
    words += NEEDED
    assert main(["train", "rl", *words, "--critic.freezing_steps", "3", "--algo.advantage.estimator", "rloo"]) == 2
    errors = capsys.readouterr().err.splitlines()
    for named in (
        *("train.sed", "rollout.top_k", "--rollout.batch_size", "--train.max_steps", "--eval.stps", "actor.adam.lr"),
        *(
            "--data.apply_chat_template is 'maybe'",
            "train.ema_beta",
            "--critic.freezing_steps",
            "--rollout.n_samples_per_prompt to 2",
        ),
    ):
        assert sum(named in error for error in errors) == 1, (named, errors)
    assert len(errors) == 10
    assert all(error.startswith("error: ") for error in errors)
    assert not any(re.search(r"--\w+-", error) for error in errors), "flags are spelt with underscores"


def test_a_command_that_code_of_its_user_ends_has_not_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_dispatch", lambda words: os._exit(0))
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sys.stderr = open(writes, "w")  # noqa: SIM115
            main(["score"])
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writes)
    with open(reads) as stderr:
        assert stderr.read().startswith("error: os._exit in test_cli.py, line ")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_a_plan_says_that_it_does_not_count_the_pass_of_images() -> None:
    config = RLConfig()
    assert reading(config, []) == ""
    config.data.image_key = "images"
    assert reading(config, []) == "; the pass of images through their tower is not counted, in time neither"
