"""`--help` of the commands that read settings, and output that nobody reads to its end."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

import pytest

from rollgrad.application.settings.rules import evaluation_errors, setting_errors
from rollgrad.application.settings.rules.examples import UNREAD, sft_errors
from rollgrad.application.settings.rules.generation import generation_errors, scoring_errors
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sft import SFTRun
from rollgrad.entrypoints.cli.commands import FLAGS
from rollgrad.entrypoints.cli.data import DataShowArguments
from rollgrad.entrypoints.cli.essentials import ESSENTIALS
from rollgrad.entrypoints.cli.evaluation import EvalArguments
from rollgrad.entrypoints.cli.generation import GenerateArguments, ScoreArguments
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.offline import SFTArguments
from rollgrad.entrypoints.cli.output import show_metrics
from rollgrad.entrypoints.cli.parsing import TrainArguments, flag_kinds, parse_run
from rollgrad.entrypoints.config_io import setting_names
from rollgrad.entrypoints.redaction import OutputClosedError, redacted_output

SECTIONS = sorted({name.rpartition(".")[0] for name in setting_names()})
KINDS = {"train rl": TrainArguments, "eval": EvalArguments, "generate": GenerateArguments, "score": ScoreArguments}
CHECKS = {
    "train rl": setting_errors,
    "eval": evaluation_errors,
    "generate": generation_errors,
    "score": scoring_errors,
}
SFT_KINDS = {"train sft": SFTArguments, "data show": DataShowArguments}


def helped(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> str:
    assert main([*command.split(), "--help", *words]) == 0
    return capsys.readouterr().out


def shown(text: str) -> list[str]:
    return re.findall(r"^  --(\S+) ", text, re.MULTILINE)


@pytest.mark.parametrize("command", KINDS)
def test_the_essentials_come_first(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys, command)
    essentials = [name for names in ESSENTIALS[command][1].values() for name in names]
    assert len(essentials) <= 30
    assert [name for name in shown(text) if "." in name] == essentials
    assert set(essentials) <= set(setting_names())
    assert len(text.splitlines()) < 140
    for section in {name.partition(".")[0] for name in setting_names()}:
        assert re.search(rf"^  {section} +\S", text, re.MULTILINE)
    assert f"rollgrad {command} --help SECTION" in text


def test_defaults_are_those_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys, "train rl", "all")
    assert "--actor.adam.lr NUMBER (default: 1e-06)" in text
    assert "--critic.adam.lr NUMBER (default: 9e-06)" in text
    assert "--data.apply_chat_template [True|False] (default: True)" in text
    assert "--actor.adam.betas NUMBER NUMBER (default: 0.9 0.95)" in text


@pytest.mark.parametrize("command", KINDS)
def test_the_example_is_one_that_runs(command: str) -> None:
    words = shlex.split(ESSENTIALS[command][0].replace("\\\n", " "))
    assert words[: 1 + len(command.split())] == ["rollgrad", *command.split()]
    _, config, unread = parse_run(KINDS[command], RLConfig, command, words[1 + len(command.split()) :])
    assert [*unread, *CHECKS[command](config)] == []


@pytest.mark.parametrize("command", SFT_KINDS)
def test_commands_over_examples_show_their_own_settings(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(ESSENTIALS[command][0].replace("\\\n", " "))
    run = parse_run(SFT_KINDS[command], SFTRun, command, words[1 + len(command.split()) :])[1]
    assert sft_errors(run) == []
    text = helped(capsys, command, "all")
    assert set(setting_names(SFTRun)) - UNREAD.keys() <= set(shown(text))
    assert "default: 1e-5, with adapters (lora.rank above 0) 2e-4" in " ".join(text.split())
    assert "--rollout" not in text


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_shows_its_settings_and_no_others(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {name for name in setting_names() if name.startswith(f"{section}.")}
    for written in (section, f"--{section}", section.replace("_", "-")):
        text = helped(capsys, "train rl", written)
        assert set(shown(text)) == expected
    assert set(shown(helped(capsys, "eval", section))) == expected


@pytest.mark.parametrize("command", KINDS)
def test_all_shows_every_setting_with_its_docstring(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys, command, "all")
    assert sorted(shown(text)) == sorted(flag_kinds(KINDS[command]))
    assert not re.search(r"^  --\S+ .*\n(?!      \S)", text, re.MULTILINE)


def test_a_setting_may_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(helped(capsys, "train rl", "rollout.top_p")) == ["rollout.top_p"]
    assert main(["train", "rl", "--train.seed", "3", "--help=rollout.top-p"]) == 0
    assert shown(capsys.readouterr().out) == ["rollout.top_p"]


@pytest.mark.parametrize(
    ("topic", "message"),
    [
        ("rolout", "'rolout' is neither a section nor a setting: the sections are actor, critic, ref, algo, rollout,"),
        ("beta", "did you mean --algo.kl.init_coef?"),
    ],
)
def test_an_unknown_section_names_the_sections(topic: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "rl", "--help", topic]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", FLAGS)
def test_commands_with_flags_of_their_own_show_all_of_them(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = helped(capsys, command)
    assert text.startswith(f"usage: rollgrad {command} ")
    assert shown(text) == list(flag_kinds(FLAGS[command]))
    assert not re.search(r"^  --\S+ .*\n(?!      \S)", text, re.MULTILINE)  # each has its docstring
    assert max(map(len, text.splitlines())) <= 80
    assert "None" not in text
    assert "***" not in text


@pytest.mark.parametrize("command", ["export", "inspect", "report", "ui", "replay", "rescore"])
def test_usage_shows_the_words_without_a_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.match(
        rf"usage: rollgrad {command} \S*(RUN|DIR)", helped(capsys, command).replace("messages ", "messages")
    )


HEAVY = {"torch", "transformers", "datasets", "numpy", "vllm", "ray", "deepspeed", "dependency_injector"}
FOR_RUNS = {"tyro", "structlog", "asyncio"}
"""Modules that take tens of milliseconds each, and that help does without."""


@pytest.mark.parametrize(
    ("commands", "absent"),
    [
        (("--help", "train rl --help", "train rl --help all", "chat --help"), HEAVY | FOR_RUNS),
        (("eval --help", "train rl", "doctor", "doctor --json"), HEAVY),
    ],
)
def test_help_refusals_and_the_doctor_import_nothing_heavy(commands: Sequence[str], absent: set[str]) -> None:
    script = (
        "import contextlib, sys\n"
        "from rollgrad.entrypoints.cli.main import main\n"
        f"for words in {commands}:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(words.split())\n"
        f"    if heavy := sys.modules.keys() & {sorted(absent)}:\n"
        "        sys.exit(f'{words} imports {heavy}')\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


BUFFERED = {**os.environ, "PYTHONUNBUFFERED": ""}
"""Environment of a process whose output reaches the pipe as late as Python lets it."""


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "train rl --help all",
        "train rl --print_config",
        "doctor",
        *(pytest.param(words, marks=pytest.mark.wide) for words in ("--version", "train rl --help", "chat --help")),
    ],
)
def test_nobody_reads_the_output(arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # before the command starts: however fast it is, nobody reads
    command = [sys.executable, "-m", "rollgrad", *arguments.split()]
    try:
        result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, env=BUFFERED)
    finally:
        os.close(writer)
    assert result.stderr == ""
    assert result.returncode == 141


def test_nobody_reads_the_errors() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rollgrad.entrypoints.cli.main", "train", "rl", "--nothing"]
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, timeout=120, env=BUFFERED)
    finally:
        os.close(writer)
    assert (result.stdout, result.returncode) == (b"", 141)


def test_tables_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich would end the process with status 1."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with redacted_output([]), pytest.raises(OutputClosedError):
            show_metrics("Evaluation", {"before": {"eval/pass@1": 0.5}})


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_closed_output_is_no_error(closed: str) -> None:
    program = (
        "import os, sys\n"
        "from rollgrad.entrypoints.cli import commands, output\n"
        "def prints(words):\n"
        "    with output.results_only_on_stdout():\n"
        "        os.system('echo noise')\n"
        "    print('result')\n"
        "    return 7\n"
        "commands._dispatch = prints\n"
        "sys.exit(commands.run_command([]))\n"
    )
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} {closed}"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert (result.stdout, result.stderr, result.returncode) == ("", "" if "2" in closed else "noise\n", 7)


def test_help_of_commands_over_examples_speaks_of_no_rollouts(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train sft", "train dpo", "train rm", "train prm"):
        text = helped(capsys, command, "all")
        assert not UNREAD.keys() & set(shown(text))
        for words in ("reward and memory", "Rollouts", "critic", "vLLM", "embedded engine"):
            assert words not in " ".join(text.split()), (command, words)


def test_a_sentence_does_not_end_at_authors(capsys: pytest.CaptureFixture[str]) -> None:
    assert "(Eisenstein et al. 2023" in " ".join(helped(capsys, "train rm").split())
