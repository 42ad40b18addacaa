"""`rollgrad train rl` and the trainers over examples: what each command does with its settings."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.rules import setting_errors
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import RollgradError, raise_together
from rollgrad.entrypoints.cli.exit_status import SIGNAL_STATUS
from rollgrad.entrypoints.cli.help import asks_for_help, show_help
from rollgrad.entrypoints.cli.logs import configure_logging
from rollgrad.entrypoints.cli.offline import TRAINERS, parse_offline
from rollgrad.entrypoints.cli.output import results_only_on_stdout, show_result
from rollgrad.entrypoints.cli.parsing import TrainArguments, parse_run
from rollgrad.entrypoints.composition.rl.extensions import spelling_errors
from rollgrad.entrypoints.config_io import dump_config
from rollgrad.entrypoints.redaction import print_settings
from rollgrad.entrypoints.restarts import until_finished

NEW_OBJECTS = 50_000
"""Objects that a dry run makes before Python looks for such as only refer to each other, many times the default."""


def train_rl(arguments: Sequence[str]) -> int:
    """`rollgrad train rl`."""
    if asks_for_help(arguments):
        return show_help("train rl", TrainArguments, arguments)
    configure_logging()
    parsed, config, unread = parse_run(TrainArguments, RLConfig, "train rl", arguments)
    if parsed.print_config:
        return show_config(config, [*unread, *spelling_errors(config), *setting_errors(config)])
    return run_rl(config, unread, dry_run=parsed.dry_run)


@contextmanager
def few_collections() -> Iterator[None]:
    """Has Python look less often for objects that only refer to each other: there are hardly any among what a dry run
    imports, and looking takes an eighth of its time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def show_config(config: RLConfig | OfflineRun, errors: Sequence[RollgradError]) -> int:
    """Prints all settings; returns the exit status.

    Raises:
        RollgradError: `errors`.
    """
    print_settings(dump_config(config))
    raise_together(errors)
    return 0


def run_rl(config: RLConfig, unread: Sequence[RollgradError] = (), *, dry_run: bool = False) -> int:
    """Trains, unless there is a problem; `unread` are the problems of the settings' file."""
    from rollgrad.entrypoints.dry_run import file_problems

    errors = [*unread, *spelling_errors(config), *setting_errors(config)]
    if dry_run:
        with few_collections():
            from rollgrad.entrypoints.rehearsal import rehearse

            configure_logging()
            rehearse(config, errors)
        return 0
    raise_together([*errors, *file_problems(config).values()])
    with results_only_on_stdout():
        from rollgrad.entrypoints.library import train

        configure_logging()
        result = until_finished(config, train)
    show_result(config.ckpt.output_dir, result, console=config.logger.console)
    return SIGNAL_STATUS + result.stopped_by if result.stopped_by else 0


def train_offline(name: str, arguments: Sequence[str]) -> int:
    """`rollgrad train sft` and the other trainers over examples."""
    if asks_for_help(arguments):
        return show_help(f"train {name}", TRAINERS[name].arguments, arguments)
    parsed, run, errors = parse_offline(name, arguments)
    if parsed.print_config:
        return show_config(run, errors)
    configure_logging()
    if parsed.dry_run:
        with few_collections():
            from rollgrad.entrypoints.example_rehearsal import rehearse_examples

            rehearse_examples(run, errors)
        return 0
    return run_offline(name, run, errors)


def run_offline(name: str, run: OfflineRun, errors: Sequence[RollgradError]) -> int:
    """Trains, unless there is a problem; `errors` are those of the settings."""
    from rollgrad.entrypoints.dry_run import example_file_problems

    raise_together([*errors, *example_file_problems(run)])
    with results_only_on_stdout():
        from rollgrad.entrypoints import offline

        result = until_finished(run, getattr(offline, f"train_{name}"))
    show_result(run.ckpt.output_dir, result, console=run.logger.console)
    return SIGNAL_STATUS + result.stopped_by if result.stopped_by else 0
