"""The commands of the command line: `COMMANDS` lists what comes after `rollgrad`.

Exit status: 0 done, 1 a defect (with its traceback), 2 an error that one sentence explains, 130 interrupted (128 + its
number by another signal: 143 by SIGTERM), 141 the reader of the output has closed it. Torch is imported by the commands
only, so that help and refusals come at once.
"""

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

import rollgrad
from rollgrad.adapters.system.exits import telling_exits
from rollgrad.application.foreign import first_line, lacks_memory
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError, OutOfMemory, RollgradError, problem_lines
from rollgrad.entrypoints.cli.chat import ChatArguments, chat
from rollgrad.entrypoints.cli.data import DataShowArguments, show_data
from rollgrad.entrypoints.cli.evaluation import evaluate
from rollgrad.entrypoints.cli.exit_status import EXIT_CLOSED, EXIT_DEFECT, EXIT_ERROR, SIGNAL_STATUS
from rollgrad.entrypoints.cli.generation import GenerateArguments, ScoreArguments, generate, score
from rollgrad.entrypoints.cli.help import HELP_FLAGS, asks_for_help, show_flags, show_help
from rollgrad.entrypoints.cli.logs import configure_logging as configure_logging
from rollgrad.entrypoints.cli.loop import LOOPS, run_loop
from rollgrad.entrypoints.cli.merge_lora import MergeLoraArguments, merge
from rollgrad.entrypoints.cli.offline import TRAINERS
from rollgrad.entrypoints.cli.parsing import DoctorArguments, parse
from rollgrad.entrypoints.cli.replay import ReplayArguments, replay_run
from rollgrad.entrypoints.cli.rescore import RescoreArguments, rescore_run
from rollgrad.entrypoints.cli.runs import (
    ExportArguments,
    InspectArguments,
    ReportArguments,
    export_rollouts,
    inspect_run,
    report_of_run,
)
from rollgrad.entrypoints.cli.serve_agent import ServeAgentArguments, serve_agent
from rollgrad.entrypoints.cli.serve_reward import ServeRewardArguments, serve_reward_model
from rollgrad.entrypoints.cli.serve_tinker import ServeTinkerArguments, serve_tinker
from rollgrad.entrypoints.cli.training import run_offline, run_rl, train_offline, train_rl
from rollgrad.entrypoints.cli.translated import problems, show_translation
from rollgrad.entrypoints.cli.ui import UIArguments, serve_runs
from rollgrad.entrypoints.names.suggestions import unknown_command
from rollgrad.entrypoints.redaction import OutputClosedError, redacted_output
from rollgrad.entrypoints.terminal_text import without_commands
from rollgrad.entrypoints.translation.draft import TranslatedCommand, TranslatedRun

LESS_MEMORY = (
    " Choose a smaller model, --actor.dtype bfloat16, --actor.lora.rank or, in a cluster, more processes; the "
    "--dry_run of a training says what takes how much."
)
"""Advice where memory ran out before anything was trained, behind a sentence that says so."""


def run_command(words: list[str]) -> int:
    """Runs the command of these words; returns the exit status."""
    with redacted_output(words), telling_exits(_tell_exit):
        try:
            try:
                return _status(words)
            finally:  # also when a parser ends the process: nobody catches an error of the interpreter's own flush
                sys.stdout.flush()
        except OutputClosedError:
            return EXIT_CLOSED


def _tell_exit(words: str) -> None:
    sys.stderr.write(f"error: {words}\n")
    sys.stderr.flush()


def _status(words: list[str]) -> int:
    try:
        return _dispatch(words)
    except OutputClosedError:
        raise
    except Exception as error:
        known = problem_lines(error) if isinstance(error, RollgradError) else []
        # `OutOfMemory` says itself what would need less.
        hungry = lacks_memory(error) and not isinstance(error, OutOfMemory)
        if not (known or hungry) or os.environ.get("ROLLGRAD_DEBUG") == "1":
            traceback.print_exc()  # here: its message may contain a secret, which only this command's streams hide
        if not (known or hungry):
            return EXIT_DEFECT
        lines = known or [f"There is too little memory ({first_line(error)})."]
        if hungry:
            lines[-1] += LESS_MEMORY
        sys.stderr.writelines(f"error: {without_commands(line)}\n" for line in lines)
        return EXIT_ERROR


def with_settings(
    name: str, kind: type[attrs.AttrsInstance], work: Callable[[Sequence[str]], object], arguments: Sequence[str]
) -> int:
    """Runs a command that reads the settings of a run: `work` parses them, and `kind` is their class."""
    if asks_for_help(arguments):
        return show_help(name, kind, arguments)
    configure_logging()
    work(arguments)
    return 0


def with_flags(name: str, work: Callable[[Any], object], arguments: Sequence[str]) -> int:
    """Runs a command with a few flags, which `work` takes."""
    parsed = parse(FLAGS[name](), name, arguments)
    configure_logging()
    work(parsed)
    return 0


def loop(name: str, arguments: Sequence[str]) -> int:
    """`rollgrad loop rs` and the other loops."""
    if asks_for_help(arguments):
        return show_help(f"loop {name}", LOOPS[name].arguments, arguments)
    configure_logging()
    stopped_by = run_loop(name, arguments)
    return SIGNAL_STATUS + stopped_by if stopped_by else 0


def openrlhf(arguments: Sequence[str]) -> int:
    """`rollgrad openrlhf`."""
    from rollgrad.entrypoints.openrlhf.command import USAGE, translate_command

    return _translate(arguments, USAGE, translate_command)


def trl(arguments: Sequence[str]) -> int:
    """`rollgrad trl`."""
    from rollgrad.entrypoints.trl.command import USAGE, translate_command

    return _translate(arguments, USAGE, translate_command)


def verl(arguments: Sequence[str]) -> int:
    """`rollgrad verl`."""
    from rollgrad.entrypoints.verl.command import USAGE, translate_command

    return _translate(arguments, USAGE, translate_command)


def _translate(
    arguments: Sequence[str],
    usage: str,
    translate: Callable[[Sequence[str]], "TranslatedRun | TranslatedCommand"],
) -> int:
    """Prints what another tool's command becomes here, or with --run runs it."""
    words = [word for word in arguments if word != "--run"]
    if not words or {words[0], words[-1]} & {*HELP_FLAGS}:
        sys.stdout.write(usage)
        return 0
    translated = translate(words)
    sys.stderr.writelines(f"{note}\n" for note in translated.notes)
    if len(words) == len(arguments):
        show_translation(translated)
        return 0
    if isinstance(translated, TranslatedCommand):
        return _dispatch(translated.words)
    if isinstance(translated.run, RLConfig):
        return run_rl(translated.run)
    configure_logging()
    return run_offline(translated.command.removeprefix("train "), translated.run, problems(translated))


def doctor(arguments: Sequence[str]) -> int:
    """`rollgrad doctor`."""
    parsed = parse(DoctorArguments(), "doctor", arguments)
    from rollgrad.entrypoints.cli.doctor import run_doctor

    return run_doctor(deep=parsed.deep, as_json=parsed.json)


def ui(arguments: Sequence[str]) -> int:
    """`rollgrad ui`."""
    configure_logging()
    serve_runs(arguments)
    return 0


Command = Callable[[Sequence[str]], int]

GROUPS: Mapping[str, Mapping[str, tuple[Command, str]]] = {
    "Train and evaluate": {
        "train rl": (train_rl, "train a model by reinforcement learning"),
        **{f"train {name}": (partial(train_offline, name), trainer.purpose) for name, trainer in TRAINERS.items()},
        **{f"loop {name}": (partial(loop, name), its.purpose) for name, its in LOOPS.items()},
        "eval": (evaluate, "evaluate a model on held-out prompts"),
    },
    "Data and replies in files": {
        "data show": (
            partial(with_settings, "data show", DataShowArguments, show_data),
            "show rows with the tokens that are trained",
        ),
        "generate": (
            partial(with_settings, "generate", GenerateArguments, generate),
            "sample replies to a dataset's prompts into a file",
        ),
        "score": (partial(with_settings, "score", ScoreArguments, score), "judge the replies in a file by a reward"),
    },
    "Look at runs": {
        "ui": (ui, "show runs in a browser: curves, findings, and every rollout token by token"),
        "inspect": (inspect_run, "show how a run goes or ended, and what keeps it from learning"),
        "report": (report_of_run, "write the page of a run into one file that opens by a double click"),
        "export": (export_rollouts, "write a run's rollouts as rows for train sft, train dpo and train rm"),
        "rescore": (
            partial(with_settings, "rescore", RescoreArguments, rescore_run),
            "judge a run's rollouts by another reward, without training",
        ),
        "replay": (
            partial(with_settings, "replay", ReplayArguments, replay_run),
            "take an update of a run again, from its rollouts",
        ),
    },
    "Use a model": {
        "chat": (partial(with_flags, "chat", chat), "talk to a model in the terminal, with its tools"),
        "serve agent": (
            partial(with_flags, "serve agent", serve_agent),
            "serve a model with its tools to OpenAI and Anthropic clients",
        ),
        "serve reward": (partial(with_flags, "serve reward", serve_reward_model), "serve a reward model over HTTP"),
        "serve tinker": (
            partial(with_flags, "serve tinker", serve_tinker),
            "serve training and sampling to programs of the Tinker API",
        ),
        "merge-lora": (partial(with_flags, "merge-lora", merge), "merge LoRA adapters into their model"),
    },
    "Come from another tool": {
        "openrlhf": (openrlhf, "translate an OpenRLHF command line, and run it"),
        "trl": (trl, "translate a command of TRL, and run it"),
        "verl": (verl, "translate a command line of verl, and run it"),
    },
    "This machine": {
        "doctor": (doctor, "show what this machine offers, and whether the installation works"),
    },
}
COMMANDS: Mapping[str, tuple[Command, str]] = {
    name: command for group in GROUPS.values() for name, command in group.items()
}

FLAGS: Mapping[str, type[attrs.AttrsInstance]] = {
    "ui": UIArguments,
    "inspect": InspectArguments,
    "report": ReportArguments,
    "export": ExportArguments,
    "chat": ChatArguments,
    "serve agent": ServeAgentArguments,
    "serve reward": ServeRewardArguments,
    "serve tinker": ServeTinkerArguments,
    "merge-lora": MergeLoraArguments,
    "doctor": DoctorArguments,
}
"""Commands that read no settings of a run, and the classes of their flags."""

WIDTH = max(map(len, COMMANDS))


def usage(first: str = "") -> str:
    """Returns all commands in words, or those whose names begin with a word."""
    lines = [f"usage: rollgrad {f'{first} ' if first else ''}COMMAND [OPTIONS]"]
    for title, group in GROUPS.items():
        shown = [f"  rollgrad {name:<{WIDTH}} {group[name][1]}" for name in group if first in ("", name.split()[0])]
        lines += ["", title, *shown] if shown else []
    lines += [
        "",
        "rollgrad COMMAND --help   its options; of train rl and eval the essential ones, and how to see the others",
        "rollgrad --version        the version",
        "",
    ]
    return "\n".join(lines)


def _dispatch(arguments: list[str]) -> int:
    for name, (command, _) in COMMANDS.items():
        words = name.split()
        if arguments[: len(words)] == words:
            if name in FLAGS and asks_for_help(arguments[len(words) :]):
                return show_flags(name, FLAGS[name])
            return command(arguments[len(words) :])
    if arguments[:1] == ["--version"]:
        sys.stdout.write(f"rollgrad {rollgrad.__version__}\n")
        return 0
    if not arguments or {"-h", "--help"} & set(arguments):
        known = {name.split()[0] for name in COMMANDS}
        sys.stdout.write(usage(next((word for word in arguments if word in known), "")))
        return 0
    raise ConfigurationError(unknown_command(arguments, tuple(COMMANDS)))
