"""`rollgrad eval`: models on held-out prompts, side by side."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from attrs import define, evolve

from rollgrad.application.settings.rules import evaluation_errors
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError, raise_together
from rollgrad.domain.settings import setting
from rollgrad.entrypoints.cli.help import asks_for_help, show_help
from rollgrad.entrypoints.cli.logs import configure_logging
from rollgrad.entrypoints.cli.output import results_only_on_stdout, show_metrics
from rollgrad.entrypoints.cli.parsing import RunFlags, dry_run_setting, parse_run
from rollgrad.entrypoints.cli.training import few_collections, show_config
from rollgrad.entrypoints.composition.rl.extensions import spelling_errors


@define(kw_only=True, slots=False)
class EvalFlags(RunFlags):
    """Flags of commands that evaluate."""

    dry_run: bool = dry_run_setting("evaluation", "held-out prompts, the reward")
    json: bool = setting(False, "Print JSON instead of a table.")
    output: Path | None = setting(
        None,
        "File of the replies with their scores, JSON lines, each written when its prompt has been played. Prompts that "
        "it has already are not played again.",
    )


@define(kw_only=True)
class EvalArguments(EvalFlags, RLConfig):
    """Evaluates actor.model_name_or_path, or each MODEL, on eval.dataset. It reads the settings of a training run."""


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
        return show_config(runs[0], errors)
    if parsed.dry_run:
        with few_collections():
            from rollgrad.entrypoints.sampling_rehearsal import rehearse_evaluation

            rehearse_evaluation(runs, parsed.output, errors)
        return 0
    from rollgrad.entrypoints.dry_run import eval_file_problems

    raise_together([*errors, *(problem for run in runs for problem in eval_file_problems(run).values())])
    metrics: dict[str, dict[str, float]] = {}
    try:
        with results_only_on_stdout():
            from rollgrad.entrypoints.library import evaluate_models

            for name, measured in evaluate_models(runs, output=parsed.output):
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
