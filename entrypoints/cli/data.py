"""`rollgrad data show`."""

from collections.abc import Sequence

from attrs import define

from rollgrad.application.settings.rules.examples import sft_errors
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.errors import ConfigurationError, raise_together
from rollgrad.domain.settings import NOT_NEGATIVE, setting
from rollgrad.entrypoints.cli.parsing import RunFlags, parse_run
from rollgrad.entrypoints.config_io import dump_config
from rollgrad.entrypoints.redaction import print_settings


@define(kw_only=True)
class DataShowArguments(RunFlags, SFTRun):
    """Shows rows as a model is trained on them, with the trained tokens coloured, and the report of the data. It reads
    the settings of `train sft`."""

    n: int = setting(3, "Rows to show.", NOT_NEGATIVE)


def show_data(arguments: Sequence[str]) -> None:
    """Shows rows and the report, or with --print_config the settings.

    Raises:
        RollgradError: a flag, a file or the data are wrong.
    """
    parsed, run, unread = parse_run(DataShowArguments, SFTRun, "data show", arguments)
    if parsed.print_config:
        print_settings(dump_config(run))
    if parsed.n < 0:
        unread.append(ConfigurationError(f"n is {parsed.n}, but it must be at least 0: change --n."))
    raise_together([*unread, *sft_errors(run)])
    if parsed.print_config:
        return
    from rollgrad.entrypoints.data_show import show_rows

    show_rows(run, count=parsed.n)
