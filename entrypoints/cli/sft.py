"""`rollgrad train sft`: supervised fine-tuning."""

from collections.abc import Sequence

from attrs import define

from rollgrad.application.settings.dpo import DPORun
from rollgrad.application.settings.rules.examples import sft_errors
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.errors import RollgradError, raise_together
from rollgrad.domain.settings import setting
from rollgrad.entrypoints.cli.parsing import TrainFlags, parse_run


@define(kw_only=True, slots=False)
class ExampleFlags(TrainFlags):
    """Flags of commands that train on examples."""

    dry_run: bool = setting(
        False,
        "Check all that the run would refuse before its first step: settings, files and data; show the settings, the "
        "report of the data and a row, and leave.",
    )


@define(kw_only=True)
class SFTArguments(ExampleFlags, SFTRun):
    """Fine-tunes a model on conversations, prompts with completions, or texts. Every setting below is also a key of the
    YAML file."""


def parse_sft(arguments: Sequence[str]) -> tuple[SFTArguments, SFTRun, list[RollgradError]]:
    """Returns flags, settings, and all that is wrong with them.

    Raises:
        ConfigurationError: a flag or its value is wrong, or the file is none.
    """
    parsed, run, unread = parse_run(SFTArguments, SFTRun, "train sft", arguments)
    return parsed, run, [*unread, *sft_errors(run)]


def rehearse_sft(run: SFTRun | DPORun, errors: Sequence[RollgradError]) -> None:
    """`--dry_run`: prepares the data, held-out ones too, shows their reports and a row, and says all that is wrong.

    Raises:
        RollgradError: settings, files or data are wrong.
    """
    import sys

    from rollgrad.entrypoints.config_io import dump_config
    from rollgrad.entrypoints.data_show import show_held_out, show_rows
    from rollgrad.entrypoints.dry_run import example_file_problems
    from rollgrad.entrypoints.run_directory import output_problem

    sys.stdout.write(dump_config(run))
    if run.actor.adam.lr is None:
        sys.stdout.write(f"# actor.adam.lr: {run.actor.peak_lr:g} by default\n")
    raise_together([*errors, *example_file_problems(run)])
    problem = output_problem(run.ckpt)
    if problem is not None:
        from rollgrad.domain.errors import CheckpointError

        raise CheckpointError(problem)
    show_rows(run, count=1)
    show_held_out(run)
