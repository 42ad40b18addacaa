"""`rollgrad rescore`: the rewards of a run's rollouts anew."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml
from attrs import define, evolve

from rollgrad.adapters.checkpoints.names import CONFIG_FILE
from rollgrad.application.settings.rules.generation import scoring_errors
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.algo import AlgoConfig
from rollgrad.domain.errors import ConfigurationError, DataError, raise_together
from rollgrad.entrypoints.cli.output import results_only_on_stdout
from rollgrad.entrypoints.cli.parsing import RunFlags, parse_run
from rollgrad.entrypoints.composition.rl.extensions import spelling_errors
from rollgrad.entrypoints.run_directory import OTHER_CONFIG_FILE, is_run, no_run


@define(kw_only=True)
class RescoreArguments(RunFlags, RLConfig):
    """Judges the rollouts of a run again, without training: rollgrad rescore RUN --reward.function_path new.py. The
    settings are the run's own; where a flag of the section reward is given, it replaces the run's whole section."""


def rescore_run(arguments: Sequence[str]) -> None:
    """`rollgrad rescore`: the file with old and new rewards is the one line on stdout.

    Raises:
        RollgradError: a word is wrong, there is no run, or its rollouts cannot be judged.
    """
    words = list(arguments)
    named = words.pop(0) if words and not words[0].startswith("-") else None
    if named is None:
        raise ConfigurationError(
            "rescore takes the directory of a run and a reward: rollgrad rescore runs/first --reward.verifier math."
        )
    run = Path(named)
    with tempfile.TemporaryDirectory(prefix="rollgrad-rescore-") as directory:
        if not any(word.partition("=")[0] == "--config" for word in words):
            words = ["--config", str(own_settings(run, Path(directory), without_reward=_sets_reward(words))), *words]
        _, config, unread = parse_run(RescoreArguments, RLConfig, "rescore", words)
    errors = [*unread, *spelling_errors(config), *scoring_errors(evolve(config, algo=AlgoConfig()))]
    raise_together(errors)
    with results_only_on_stdout():
        from rollgrad.entrypoints.rescoring import rescore

        found = rescore(run, config)
    for reason in found.unread:
        sys.stderr.write(f"warning: {reason}\n")
    for reason, count in found.left_out.most_common():
        sys.stderr.write(f"left out: {count} {reason}\n")
    told = {
        "same": "with the same reward",
        "sign_changed": "on another side of their group's mean",
        "rank_changed": "with another rank in their group",
        "failed": "without a new reward",
    }
    counts = ", ".join(f"{found.summary[name]} {text}" for name, text in told.items())
    sys.stderr.write(f"{found.summary['rows']} rollouts: {counts}\n")
    sys.stdout.write(f"{found.path}\n")


def _sets_reward(words: Sequence[str]) -> bool:
    return any(word.lstrip("-").startswith("reward.") for word in words)


def own_settings(run: Path, directory: Path, *, without_reward: bool = False) -> Path:
    """Returns a file in `directory` with a run's settings, by default all.

    Raises:
        DataError: the run has none, or they cannot be read.
    """
    paths = [run / name for name in (OTHER_CONFIG_FILE, CONFIG_FILE) if (run / name).is_file()]
    if not paths and not is_run(run):
        raise no_run(run)
    if not paths:
        raise DataError(f"{run / CONFIG_FILE} is missing, which has the run's settings: name another with --config.")
    try:
        settings = yaml.safe_load(paths[0].read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{paths[0]} cannot be read: name another file of settings with --config.") from error
    if without_reward and isinstance(settings, dict):
        settings.pop("reward", None)
    copy = directory / CONFIG_FILE
    copy.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return copy
