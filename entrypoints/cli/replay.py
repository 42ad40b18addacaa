"""`rollgrad replay`: one update of a run again."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attrs import define

from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError, raise_together
from rollgrad.domain.settings import setting
from rollgrad.entrypoints.cli.output import results_only_on_stdout
from rollgrad.entrypoints.cli.parsing import RunFlags, parse_run
from rollgrad.entrypoints.cli.rescore import own_settings
from rollgrad.entrypoints.composition.rl.extensions import spelling_errors


@define(kw_only=True, slots=False)
class ReplayFlags(RunFlags):
    """Flags of `rollgrad replay`."""

    step: int | None = setting(None, "Number of the update, from 1; required.")


@define(kw_only=True)
class ReplayArguments(ReplayFlags, RLConfig):
    """Takes one update of a run again, from its kept rollouts and the weights before it, and prints its metrics beside
    those that were logged: rollgrad replay RUN --step 1. The settings are the run's own, which flags override. Nothing
    is written."""


def replay_run(arguments: Sequence[str]) -> None:
    """`rollgrad replay`: a line a metric on stdout, with its name, what was logged, and what it is now.

    Raises:
        RollgradError: a word is wrong, or rollouts or weights are not there.
    """
    words = list(arguments)
    named = words.pop(0) if words and not words[0].startswith("-") else None
    if named is None:
        raise ConfigurationError("replay takes the directory of a run: rollgrad replay runs/first --step 1.")
    run = Path(named)
    with tempfile.TemporaryDirectory(prefix="rollgrad-replay-") as directory:
        if not any(word.partition("=")[0] == "--config" for word in words):
            words = ["--config", str(own_settings(run, Path(directory))), *words]
        parsed, config, unread = parse_run(ReplayArguments, RLConfig, "replay", words)
    errors = [*unread, *spelling_errors(config)]
    if parsed.step is None:
        errors.append(ConfigurationError("No update is named: set --step to its number, from 1."))
    raise_together(errors)
    assert parsed.step is not None
    with results_only_on_stdout():
        from rollgrad.entrypoints.replay import replay

        found = replay(run, config, parsed.step)
    sys.stderr.write(f"update {parsed.step} from the weights of {found.weights}\n")
    width = max(map(len, found.metrics), default=0)
    sys.stdout.write(f"{'':{width}}  {'logged':>14} {'replayed':>14}\n")
    for name, (logged, replayed) in found.metrics.items():
        sys.stdout.write(f"{name:{width}}  {logged:14.7g} {replayed:14.7g}\n")
