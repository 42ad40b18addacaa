"""The command line: `COMMANDS` lists what follows `rollgrad`.

Exit status: 0 done, 1 a defect (with its traceback), 2 an error that one sentence explains, 130 interrupted. Torch is
imported by the commands only, so that help and refusals come at once.
"""

import contextlib
import difflib
import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro
from attrs import Factory, define

import rollgrad
from rollgrad.application.config import RLConfig
from rollgrad.application.validation import evaluation_errors, setting_errors
from rollgrad.domain.errors import ConfigurationError, RollgradError, problem_lines, raise_together
from rollgrad.entrypoints.chat import ChatArguments, chat
from rollgrad.entrypoints.config_io import dump_config, nearest, read_config, setting_names
from rollgrad.entrypoints.extensions import extension_errors
from rollgrad.entrypoints.serve_agent import ServeAgentArguments, serve_agent
from rollgrad.entrypoints.serve_reward import ServeRewardArguments, serve_reward_model

if TYPE_CHECKING:
    from rollgrad.entrypoints.library import TrainResult

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Settings = Annotated[RLConfig, tyro.conf.arg(name="")]


@define(kw_only=True)
class TrainArguments:
    """Trains a model by reinforcement learning. Every setting below is also a key of the YAML file."""

    config: Path | None = None
    """YAML file with settings; flags override it."""
    print_config: Switch = False
    """Print all settings as YAML that --config reads, and leave."""
    dry_run: Switch = False
    """Check all that the run would refuse: settings, files, prompts, reward and memory; show the memory plan, the
    counts and a prompt, and leave."""
    run: Settings = Factory(RLConfig)


@define(kw_only=True)
class EvalArguments:
    """Evaluates actor.model_name_or_path on eval.dataset. It reads the settings of a training run."""

    config: Path | None = None
    """YAML file with settings; flags override it."""
    print_config: Switch = False
    """Print all settings as YAML that --config reads, and leave."""
    json: Switch = False
    """Print JSON instead of a table."""
    run: Settings = Factory(RLConfig)


@define(kw_only=True)
class DoctorArguments:
    """Shows what this machine offers a run, and whether the optional packages work."""

    json: Switch = False
    """Print JSON instead of tables."""


Arguments = TypeVar("Arguments")
RunArguments = TypeVar("RunArguments", TrainArguments, EvalArguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (default: that of this process); returns the exit status."""
    try:
        return _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except RollgradError as error:
        if os.environ.get("ROLLGRAD_DEBUG") == "1":
            traceback.print_exc()
        sys.stderr.writelines(f"error: {line}\n" for line in problem_lines(error))
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def train_rl(arguments: Sequence[str]) -> int:
    """`rollgrad train rl`."""
    parsed, unread = _parse_run(TrainArguments, "train rl", arguments)
    config = parsed.run
    if parsed.print_config:
        sys.stdout.write(dump_config(config))
        raise_together([*unread, *extension_errors(config), *setting_errors(config)])
        return 0
    return _train(config, unread, dry_run=parsed.dry_run)


def _train(config: RLConfig, unread: Sequence[RollgradError] = (), *, dry_run: bool = False) -> int:
    """Trains, unless something is wrong; `unread` is what is wrong with the settings' file."""
    from rollgrad.entrypoints.dry_run import file_problems

    errors = [*unread, *extension_errors(config), *setting_errors(config)]
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
    _show_result(config, result)
    return EXIT_INTERRUPTED if result.interrupted else 0


def evaluate(arguments: Sequence[str]) -> int:
    """`rollgrad eval`."""
    parsed, unread = _parse_run(EvalArguments, "eval", arguments)
    config = parsed.run
    errors = [*unread, *extension_errors(config), *evaluation_errors(config)]
    if parsed.print_config:
        sys.stdout.write(dump_config(config))
        raise_together(errors)
        return 0
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


def openrlhf(arguments: Sequence[str]) -> int:
    """`rollgrad openrlhf`."""
    from rollgrad.entrypoints.openrlhf import USAGE, changed_settings, check, translated_config

    words = [word for word in arguments if word != "--run"]
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    config, notes = translated_config(words)
    sys.stderr.writelines(f"{note}\n" for note in notes)
    if len(words) < len(arguments):
        return _train(config)
    refusal = check(config)
    if refusal:
        sys.stderr.write(f"rollgrad train rl will refuse this: {refusal}\n")
    sys.stdout.write(changed_settings(config))
    return 0


def doctor(arguments: Sequence[str]) -> int:
    """`rollgrad doctor`."""
    parsed = _parse(DoctorArguments(), "doctor", arguments)
    from rollgrad.entrypoints.doctor import run_doctor

    return run_doctor(as_json=parsed.json)


def serve_reward(arguments: Sequence[str]) -> int:
    """`rollgrad serve reward`."""
    parsed = _parse(ServeRewardArguments(), "serve reward", arguments)
    configure_logging()
    serve_reward_model(parsed)
    return 0


def serve_agents(arguments: Sequence[str]) -> int:
    """`rollgrad serve agent`."""
    parsed = _parse(ServeAgentArguments(), "serve agent", arguments)
    configure_logging()
    serve_agent(parsed)
    return 0


def talk(arguments: Sequence[str]) -> int:
    """`rollgrad chat`."""
    parsed = _parse(ChatArguments(), "chat", arguments)
    configure_logging()
    chat(parsed)
    return 0


COMMANDS: Mapping[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train rl": (train_rl, "train a model by reinforcement learning"),
    "eval": (evaluate, "evaluate a model on held-out prompts"),
    "openrlhf": (openrlhf, "translate an OpenRLHF command line, and run it"),
    "chat": (talk, "talk to a model in the terminal, with its tools"),
    "serve agent": (serve_agents, "serve a model with its tools to OpenAI and Anthropic clients"),
    "serve reward": (serve_reward, "serve a reward model over HTTP"),
    "doctor": (doctor, "show what this machine offers, and whether the installation works"),
}

USAGE = "\n".join(
    (
        "usage: rollgrad COMMAND [OPTIONS]",
        "",
        *(f"  rollgrad {name:<12} {purpose}" for name, (_, purpose) in COMMANDS.items()),
        "",
        "  rollgrad COMMAND --help   all options of a command",
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
    given = " ".join(word for word in arguments[:2] if not word.startswith("-")) or arguments[0]
    similar = difflib.get_close_matches(given, COMMANDS, n=1, cutoff=0.5)
    known = f"did you mean rollgrad {similar[0]}?" if similar else f"the commands are {', '.join(COMMANDS)}."
    raise ConfigurationError(f"{given} is not a command; {known}")


def _parse_run(
    kind: type[RunArguments], command: str, arguments: Sequence[str]
) -> tuple[RunArguments, list[ConfigurationError]]:
    """Flags over the file that --config names over the defaults, and what of the file cannot be read."""
    path = _flag_value("--config", arguments)
    settings, unread = read_config(path, preset=_flag_value("--algo.preset", arguments))
    parsed = _parse(kind(config=None if path is None else Path(path), run=settings), command, arguments)
    parsed.run.algo.preset = None  # expanded above
    return parsed, unread


def _parse(default: Arguments, command: str, arguments: Sequence[str]) -> Arguments:
    kind = type(default)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            parsed, unknown = tyro.cli(
                kind,
                prog=f"rollgrad {command}",
                args=arguments,
                default=default,
                return_unknown_args=True,
                use_underscores=True,
                config=(tyro.conf.EnumChoicesFromValues,),
            )
    except SystemExit as stop:
        if stop.code:
            raise ConfigurationError(_sentence(box.getvalue())) from stop
        raise
    if unknown:
        raise ConfigurationError(_unknown_argument(kind, command, unknown))
    return parsed


def _flag_value(flag: str, arguments: Sequence[str]) -> str | None:
    """What a flag is given that decides the others' defaults."""
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
        if argument == flag and index + 1 < len(arguments):
            return arguments[index + 1]
    return None


def _sentence(box: str) -> str:
    """The message in the box that tyro draws: between the title and the first rule, without the list of attempts."""
    lines = [line.strip("│ ") for line in box.splitlines()[1:]]
    message: list[str] = []
    for line in lines:
        if not line.strip("─╰╯") or line.startswith("Got errors"):
            break
        message.append(line)
    return " ".join(message)


def _unknown_argument(
    kind: type[Any],
    command: str,
    unknown: Sequence[str],
) -> str:
    flag = next((argument for argument in unknown if argument.startswith("-")), None)
    if flag is None:
        return f"{unknown[0]!r} belongs to no flag: see rollgrad {command} --help."
    name = flag.lstrip("-").partition("=")[0].replace("-", "_")
    known = list(setting_names(kind))
    if "run" in known:
        known = [*known[: known.index("run")], *setting_names()]
    suggestion = nearest(name, known)
    hint = f"did you mean --{suggestion}?" if suggestion else f"see rollgrad {command} --help."
    return f"{flag} is not a flag; {hint}"


def _show_result(config: RLConfig, result: "TrainResult") -> None:
    columns = {name: metrics for name, metrics in (("before", result.before), ("after", result.after)) if metrics}
    if columns and config.logger.console:
        _show_metrics("Evaluation", columns)
    if result.interrupted:
        sys.stderr.write(f"interrupted after {result.steps} rollouts; what was trained is in {result.output_dir}\n")
    sys.stdout.write(f"{result.report or result.output_dir}\n")


def _show_metrics(title: str, columns: Mapping[str, Mapping[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("metric", *columns, title=title)
    for name in dict.fromkeys(name for metrics in columns.values() for name in metrics):
        table.add_row(name, *(f"{metrics[name]:.4g}" if name in metrics else "" for metrics in columns.values()))
    Console(highlight=False, markup=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
