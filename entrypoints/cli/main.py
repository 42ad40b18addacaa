"""The command line: `COMMANDS` lists the commands after `rollgrad`.

Exit status: 0 done, 1 a defect (with its traceback), 2 an error that one sentence explains, 130 interrupted (143 by
SIGTERM, 129 by SIGHUP), 141 the reader of the output has closed it. Torch is imported by the commands only, so that
help and refusals come at once.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import rollgrad
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.rules import evaluation_errors, setting_errors
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError, RollgradError, problem_lines, raise_together
from rollgrad.entrypoints.cli.chat import ChatArguments, chat
from rollgrad.entrypoints.cli.data import DataShowArguments, show_data
from rollgrad.entrypoints.cli.generation import GenerateArguments, ScoreArguments, generate, score
from rollgrad.entrypoints.cli.help import HELP_FLAGS, asks_for_help, show_help
from rollgrad.entrypoints.cli.loop import LOOPS, run_loop
from rollgrad.entrypoints.cli.merge_lora import MergeLoraArguments, merge
from rollgrad.entrypoints.cli.offline import TRAINERS, parse_offline, rehearse_offline
from rollgrad.entrypoints.cli.parsing import (
    DoctorArguments,
    EvalArguments,
    TrainArguments,
    parse,
    parse_run,
)
from rollgrad.entrypoints.cli.runs import export_rollouts, inspect_run
from rollgrad.entrypoints.cli.serve_agent import ServeAgentArguments, serve_agent
from rollgrad.entrypoints.cli.serve_reward import ServeRewardArguments, serve_reward_model
from rollgrad.entrypoints.cli.translated import problems, show_translation
from rollgrad.entrypoints.composition.extensions import spelling_errors
from rollgrad.entrypoints.config_io import dump_config
from rollgrad.entrypoints.names.suggestions import unknown_command
from rollgrad.entrypoints.redaction import OutputClosedError, print_settings, redacted_output
from rollgrad.entrypoints.translation.draft import TranslatedCommand, TranslatedRun

if TYPE_CHECKING:
    from rollgrad.entrypoints.library import TrainResult

EXIT_DEFECT = 1
EXIT_ERROR = 2
SIGNAL_STATUS = 128
"""Number added to a signal's number, as in shells' exit codes of killed processes."""
EXIT_INTERRUPTED = SIGNAL_STATUS + signal.SIGINT
EXIT_CLOSED = SIGNAL_STATUS + signal.SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (default: that of this process); returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with redacted_output(words):
        try:
            try:
                return _status(words)
            finally:  # also when a parser ends the process: nobody catches an error of the interpreter's own flush
                sys.stdout.flush()
        except OutputClosedError:
            return EXIT_CLOSED


def _status(words: list[str]) -> int:
    try:
        return _dispatch(words)
    except RollgradError as error:
        if os.environ.get("ROLLGRAD_DEBUG") == "1":
            traceback.print_exc()
        sys.stderr.writelines(f"error: {line}\n" for line in problem_lines(error))
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OutputClosedError:
        raise
    except Exception:  # its message may contain a secret, which only this command's streams hide
        traceback.print_exc()
        return EXIT_DEFECT


def _results_only_on_stdout() -> contextlib.AbstractContextManager[object]:
    """Sends to stderr what libraries (DeepSpeed, on import) and reward functions print."""
    return contextlib.redirect_stdout(sys.stderr)


def configure_logging() -> None:
    """Sends structlog's events to stderr: coloured on a terminal, else one key=value line each."""
    import structlog

    renderer: structlog.typing.Processor
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    else:
        renderer = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"])
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # looked up anew: while a progress bar is shown, it stands for stderr, and prints lines above itself
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


def train_rl(arguments: Sequence[str]) -> int:
    """`rollgrad train rl`."""
    if asks_for_help(arguments):
        return show_help("train rl", TrainArguments, arguments)
    parsed, config, unread = parse_run(TrainArguments, RLConfig, "train rl", arguments)
    if parsed.print_config:
        return _print_config(config, [*unread, *spelling_errors(config), *setting_errors(config)])
    return _train(config, unread, dry_run=parsed.dry_run)


def _print_config(config: RLConfig, errors: Sequence[RollgradError]) -> int:
    print_settings(dump_config(config))
    raise_together(errors)
    return 0


def _train(config: RLConfig, unread: Sequence[RollgradError] = (), *, dry_run: bool = False) -> int:
    """Trains, unless there is a problem; `unread` are the problems of the settings' file."""
    from rollgrad.entrypoints.dry_run import file_problems

    errors = [*unread, *spelling_errors(config), *setting_errors(config)]
    if dry_run:
        from rollgrad.entrypoints.rehearsal import rehearse

        configure_logging()
        rehearse(config, errors)
        return 0
    raise_together([*errors, *file_problems(config).values()])
    with _results_only_on_stdout():
        from rollgrad.entrypoints.library import train

        configure_logging()
        result = train(config)
    _show_result(config.ckpt.output_dir, result, console=config.logger.console)
    return SIGNAL_STATUS + result.stopped_by if result.stopped_by else 0


def train_offline(name: str, arguments: Sequence[str]) -> int:
    """`rollgrad train sft` and the other trainers over examples."""
    if asks_for_help(arguments):
        return show_help(f"train {name}", TRAINERS[name].arguments, arguments)
    parsed, run, errors = parse_offline(name, arguments)
    if parsed.print_config:
        print_settings(dump_config(run))
        raise_together(errors)
        return 0
    configure_logging()
    if parsed.dry_run:
        rehearse_offline(run, errors)
        return 0
    return _train_examples(name, run, errors)


def _train_examples(name: str, run: OfflineRun, errors: Sequence[RollgradError]) -> int:
    """Trains, unless there is a problem; `errors` are those of the settings."""
    from rollgrad.entrypoints.dry_run import example_file_problems

    raise_together([*errors, *example_file_problems(run)])
    with _results_only_on_stdout():
        from rollgrad.entrypoints import offline

        result = getattr(offline, f"train_{name}")(run)
    _show_result(run.ckpt.output_dir, result, console=run.logger.console)
    return SIGNAL_STATUS + result.stopped_by if result.stopped_by else 0


def data_show(arguments: Sequence[str]) -> int:
    """`rollgrad data show`."""
    if asks_for_help(arguments):
        return show_help("data show", DataShowArguments, arguments)
    configure_logging()
    show_data(arguments)
    return 0


def evaluate(arguments: Sequence[str]) -> int:
    """`rollgrad eval`."""
    if asks_for_help(arguments):
        return show_help("eval", EvalArguments, arguments)
    parsed, config, unread = parse_run(EvalArguments, RLConfig, "eval", arguments)
    errors = [*unread, *spelling_errors(config), *evaluation_errors(config)]
    if parsed.print_config:
        return _print_config(config, errors)
    from rollgrad.entrypoints.dry_run import eval_file_problems

    raise_together([*errors, *eval_file_problems(config).values()])
    with _results_only_on_stdout():
        from rollgrad.entrypoints.library import evaluate as evaluate_model

        configure_logging()
        metrics = evaluate_model(config)
    if parsed.json:
        sys.stdout.write(json.dumps(metrics, indent=2) + "\n")
    else:
        _show_metrics(f"{config.actor.model_name_or_path} on {config.eval.dataset}", {"value": metrics})
    return 0


def generate_replies(arguments: Sequence[str]) -> int:
    """`rollgrad generate`."""
    if asks_for_help(arguments):
        return show_help("generate", GenerateArguments, arguments)
    configure_logging()
    generate(arguments)
    return 0


def score_replies(arguments: Sequence[str]) -> int:
    """`rollgrad score`."""
    if asks_for_help(arguments):
        return show_help("score", ScoreArguments, arguments)
    configure_logging()
    score(arguments)
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


def _translate(
    arguments: Sequence[str],
    usage: str,
    translate: Callable[[Sequence[str]], "TranslatedRun | TranslatedCommand"],
) -> int:
    """Prints what another tool's command becomes here, or with --run runs it."""
    words = [word for word in arguments if word != "--run"]
    if not words or words[0] in HELP_FLAGS:
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
        return _train(translated.run)
    configure_logging()
    return _train_examples(translated.command.removeprefix("train "), translated.run, problems(translated))


def merge_lora(arguments: Sequence[str]) -> int:
    """`rollgrad merge-lora`."""
    merge(parse(MergeLoraArguments(), "merge-lora", arguments))
    return 0


def doctor(arguments: Sequence[str]) -> int:
    """`rollgrad doctor`."""
    parsed = parse(DoctorArguments(), "doctor", arguments)
    from rollgrad.entrypoints.cli.doctor import run_doctor

    return run_doctor(deep=parsed.deep, as_json=parsed.json)


def serve_reward(arguments: Sequence[str]) -> int:
    """`rollgrad serve reward`."""
    parsed = parse(ServeRewardArguments(), "serve reward", arguments)
    configure_logging()
    serve_reward_model(parsed)
    return 0


def serve_agents(arguments: Sequence[str]) -> int:
    """`rollgrad serve agent`."""
    parsed = parse(ServeAgentArguments(), "serve agent", arguments)
    configure_logging()
    serve_agent(parsed)
    return 0


def talk(arguments: Sequence[str]) -> int:
    """`rollgrad chat`."""
    parsed = parse(ChatArguments(), "chat", arguments)
    configure_logging()
    chat(parsed)
    return 0


COMMANDS: Mapping[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train rl": (train_rl, "train a model by reinforcement learning"),
    **{f"train {name}": (partial(train_offline, name), trainer.purpose) for name, trainer in TRAINERS.items()},
    "data show": (data_show, "show rows with the tokens that are trained"),
    "eval": (evaluate, "evaluate a model on held-out prompts"),
    "generate": (generate_replies, "sample replies to a data set's prompts into a file"),
    "score": (score_replies, "judge the replies in a file by a reward"),
    **{f"loop {name}": (partial(loop, name), its.purpose) for name, its in LOOPS.items()},
    "inspect": (inspect_run, "show how a run goes or ended, and what keeps it from learning"),
    "export": (export_rollouts, "write a run's rollouts as rows for train sft, train dpo and train rm"),
    "openrlhf": (openrlhf, "translate an OpenRLHF command line, and run it"),
    "trl": (trl, "translate a command of TRL, and run it"),
    "chat": (talk, "talk to a model in the terminal, with its tools"),
    "serve agent": (serve_agents, "serve a model with its tools to OpenAI and Anthropic clients"),
    "serve reward": (serve_reward, "serve a reward model over HTTP"),
    "merge-lora": (merge_lora, "merge LoRA adapters into their model"),
    "doctor": (doctor, "show what this machine offers, and whether the installation works"),
}

WIDTH = max(map(len, COMMANDS))

USAGE = "\n".join(
    (
        "usage: rollgrad COMMAND [OPTIONS]",
        "",
        *(f"  rollgrad {name:<{WIDTH}} {purpose}" for name, (_, purpose) in COMMANDS.items()),
        "",
        "  rollgrad COMMAND --help   its options; of train rl and eval the essential ones, and how to see the others",
        "  rollgrad --version        the version",
        "",
    )
)


def _dispatch(arguments: list[str]) -> int:
    for name, (command, _) in COMMANDS.items():
        words = name.split()
        if arguments[: len(words)] == words:
            return command(arguments[len(words) :])
    if arguments[:1] == ["--version"]:
        sys.stdout.write(f"rollgrad {rollgrad.__version__}\n")
        return 0
    if not arguments or {"-h", "--help"} & set(arguments):
        sys.stdout.write(USAGE)
        return 0
    raise ConfigurationError(unknown_command(arguments, tuple(COMMANDS)))


def _show_result(output_dir: str, result: "TrainResult", *, console: bool) -> None:
    columns = {name: metrics for name, metrics in (("before", result.before), ("after", result.after)) if metrics}
    if columns and console:
        _show_metrics("Evaluation", columns)
    named = Path(output_dir)  # as the settings have it: the result's is absolute
    if result.interrupted:
        sys.stderr.write(f"interrupted after {result.steps} steps; what was trained is in {named}\n")
    sys.stdout.write(f"{named / result.report.name if result.report else named}\n")
    sys.stdout.flush()
    sys.stderr.writelines(f"warning: {finding}\n" for finding in result.findings)


def _show_metrics(title: str, columns: Mapping[str, Mapping[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("metric", *columns, title=title)
    for name in dict.fromkeys(name for metrics in columns.values() for name in metrics):
        table.add_row(name, *(f"{metrics[name]:.4g}" if name in metrics else "" for metrics in columns.values()))
    Console(highlight=False, markup=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
