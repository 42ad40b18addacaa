"""`rollgrad train rl`, the trainers over examples, and `rollgrad eval`: what each command does with its settings."""

import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile

from attrs import evolve

from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.rules import evaluation_errors, setting_errors
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError, RollgradError, raise_together
from rollgrad.entrypoints.cli.exit_status import SIGNAL_STATUS
from rollgrad.entrypoints.cli.help import asks_for_help, show_help
from rollgrad.entrypoints.cli.logs import configure_logging
from rollgrad.entrypoints.cli.offline import TRAINERS, parse_offline
from rollgrad.entrypoints.cli.output import results_only_on_stdout, show_metrics, show_result
from rollgrad.entrypoints.cli.parsing import EvalArguments, TrainArguments, parse_run
from rollgrad.entrypoints.composition.extensions import spelling_errors
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
        return _print_config(config, [*unread, *spelling_errors(config), *setting_errors(config)])
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


def _print_config(config: RLConfig | OfflineRun, errors: Sequence[RollgradError]) -> int:
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
        return _print_config(run, errors)
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


def evaluate(arguments: Sequence[str]) -> int:
    """`rollgrad eval`."""
    if asks_for_help(arguments):
        return show_help("eval", EvalArguments, arguments)
    configure_logging()
    models = list(takewhile(_may_be_model, arguments))
    parsed, config, unread = parse_run(EvalArguments, RLConfig, "eval", arguments[len(models) :])
    named = models or [config.actor.model_name_or_path]
    runs = [evolve(config, actor=evolve(config.actor, model_name_or_path=model)) for model in named]
    errors = [*unread, *spelling_errors(config), *evaluation_errors(runs[0])]
    if twice := [model for model, count in Counter(named).items() if count > 1]:
        errors.append(ConfigurationError(f"Models are named twice: {', '.join(twice)}. Name each of them once."))
    if parsed.print_config:
        return _print_config(runs[0], errors)
    if parsed.dry_run:
        with few_collections():
            from rollgrad.entrypoints.sampling_rehearsal import rehearse_evaluation

            rehearse_evaluation(runs, errors)
        return 0
    from rollgrad.entrypoints.dry_run import eval_file_problems

    raise_together([*errors, *(problem for run in runs for problem in eval_file_problems(run).values())])
    metrics: dict[str, dict[str, float]] = {}
    try:
        with results_only_on_stdout():
            from rollgrad.entrypoints.library import evaluate_models

            for name, measured in evaluate_models(runs):
                metrics[name] = measured
    finally:  # an error of one model, or an interruption, leaves the results of those before it
        if metrics:
            _show_evaluations(named, str(config.eval.dataset), metrics, as_json=parsed.json)
    return 0


def _show_evaluations(
    named: Sequence[str], dataset: str, metrics: Mapping[str, Mapping[str, float]], *, as_json: bool
) -> None:
    """Prints the metrics of the models that were evaluated, of all that were `named`."""
    if as_json:
        told = metrics if len(named) > 1 else metrics[named[0]]
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    elif len(named) > 1:
        show_metrics(dataset, metrics)
    else:
        show_metrics(f"{named[0]} on {dataset}", {"value": metrics[named[0]]})


def _may_be_model(word: str) -> bool:
    """Returns whether a word before the first flag may name a model: it is no file of settings, and no override as
    other tools have them."""
    return not word.startswith("-") and "=" not in word and not word.endswith((".yaml", ".yml"))
