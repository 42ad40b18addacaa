"""`rollgrad generate` and `rollgrad score`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, evolve

from rollgrad.application.settings.rules.generation import generation_errors, scoring_errors
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.algo import AlgoConfig
from rollgrad.domain.errors import ConfigurationError, RollgradError, raise_together
from rollgrad.domain.settings import setting
from rollgrad.entrypoints.cli.output import results_only_on_stdout
from rollgrad.entrypoints.cli.parsing import RunFlags, dry_run_setting, parse_run
from rollgrad.entrypoints.composition.rl.extensions import spelling_errors
from rollgrad.entrypoints.config_io import dump_config
from rollgrad.entrypoints.redaction import print_settings

if TYPE_CHECKING:
    from rollgrad.entrypoints.generation import Replies


@define(kw_only=True, slots=False)
class GenerateFlags(RunFlags):
    """Flags of `rollgrad generate`."""

    output: Path | None = setting(
        None, "File of the replies, JSON lines; required. The replies that it has already are not sampled again."
    )
    dry_run: bool = dry_run_setting("command", "prompts")
    logprobs: bool = setting(False, "Write the log-probs of the tokens, too.")
    retry_failed: bool = setting(False, "Sample the replies again that failed.")


@define(kw_only=True, slots=False)
class ScoreFlags(RunFlags):
    """Flags of `rollgrad score`."""

    input: Path | None = setting(None, "File of replies, as `rollgrad generate` writes it; required.")
    output: Path | None = setting(
        None, "File of the replies with their rewards; required. Those that it has already are not judged again."
    )
    dry_run: bool = dry_run_setting("command", "replies, the reward")
    retry_failed: bool = setting(
        False,
        "Judge the replies again that could not be judged, also by a reward function that has changed since; others "
        "keep their rewards.",
    )


@define(kw_only=True)
class GenerateArguments(GenerateFlags, RLConfig):
    """Samples replies to the prompts of data.prompt_dataset into a file. It reads the settings of a training run."""


@define(kw_only=True)
class ScoreArguments(ScoreFlags, RLConfig):
    """Judges the replies in a file by the reward of a training run, whose settings it reads."""


def generate(arguments: Sequence[str]) -> None:
    """`rollgrad generate`.

    Raises:
        RollgradError: a flag, a setting, a file or the data are wrong.
    """
    parsed, config, unread = parse_run(GenerateArguments, RLConfig, "generate", arguments)
    errors = [*unread, *spelling_errors(config), *generation_errors(config)]
    if parsed.print_config:
        print_settings(dump_config(config))
        raise_together(errors)
        return
    from rollgrad.entrypoints.dry_run import generation_file_problems

    errors += _named("--output", parsed.output)
    if parsed.dry_run:
        from rollgrad.entrypoints.sampling_rehearsal import rehearse_generation

        rehearse_generation(config, parsed.output, errors)
        return
    raise_together([*errors, *generation_file_problems(config)])
    assert parsed.output is not None
    with results_only_on_stdout():
        from rollgrad.entrypoints import generation

        replies = generation.generate(config, parsed.output, logprobs=parsed.logprobs, retry_failed=parsed.retry_failed)
    _tell(replies, parsed.output, "sampled")


def score(arguments: Sequence[str]) -> None:
    """`rollgrad score`.

    Raises:
        RollgradError: a flag, a setting, a file or the data are wrong.
    """
    parsed, config, unread = parse_run(ScoreArguments, RLConfig, "score", arguments)
    errors = [*unread, *spelling_errors(config), *scoring_errors(evolve(config, algo=AlgoConfig()))]
    if parsed.print_config:
        print_settings(dump_config(config))
        raise_together(errors)
        return
    from rollgrad.entrypoints.dry_run import scoring_file_problems

    errors += [*_named("--input", parsed.input), *_named("--output", parsed.output)]
    if parsed.dry_run:
        from rollgrad.entrypoints.sampling_rehearsal import rehearse_scoring

        rehearse_scoring(config, parsed.input, parsed.output, errors)
        return
    raise_together([*errors, *scoring_file_problems(config)])
    assert parsed.input is not None
    assert parsed.output is not None
    with results_only_on_stdout():
        from rollgrad.entrypoints import generation

        replies = generation.score(config, parsed.input, parsed.output, retry_failed=parsed.retry_failed)
    _tell(replies, parsed.output, "judged")


def _tell(replies: "Replies", out: Path, done: str) -> None:
    failed = f", {replies.failed} of them failed: --retry_failed tries them again" if replies.failed else ""
    sys.stderr.write(f"{replies.made} replies {done}, {replies.rows} in all{failed}\n")
    sys.stdout.write(f"{out}\n")


def _named(flag: str, path: Path | None) -> list[RollgradError]:
    return [] if path else [ConfigurationError(f"No file is named: set {flag}.")]
