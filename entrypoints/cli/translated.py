"""`rollgrad openrlhf`, `rollgrad trl` and `rollgrad verl`: what is shown of a command that was translated."""

import shlex
import sys
from collections.abc import Sequence

from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.rules import setting_errors
from rollgrad.domain.errors import RollgradError, problem_lines
from rollgrad.entrypoints.cli.offline import TRAINERS
from rollgrad.entrypoints.config_io import changed_settings, yaml_text
from rollgrad.entrypoints.redaction import print_settings
from rollgrad.entrypoints.translation.draft import TranslatedCommand, TranslatedRun


def problems(translated: TranslatedRun) -> Sequence[RollgradError]:
    """Returns what a translated run breaks of the rules across its settings."""
    if isinstance(translated.run, OfflineRun):
        return TRAINERS[translated.command.removeprefix("train ")].errors(translated.run)
    return setting_errors(translated.run)


def show_translation(translated: TranslatedRun | TranslatedCommand) -> None:
    """Prints the command, or the settings and all for which the run would be refused."""
    if isinstance(translated, TranslatedCommand):
        sys.stdout.write(f"{shlex.join(['rollgrad', *translated.words])}\n")
        return
    refusals = (line for error in problems(translated) for line in problem_lines(error))
    sys.stderr.writelines(f"rollgrad {translated.command} will refuse this: {line}\n" for line in refusals)
    print_settings(f"# rollgrad {translated.command} --config FILE\n{yaml_text(changed_settings(translated.run))}")
