"""`rollgrad train dpo`: learning from preference pairs."""

from collections.abc import Sequence

from attrs import define

from rollgrad.application.settings.dpo import DPORun, dpo_errors
from rollgrad.domain.errors import RollgradError
from rollgrad.entrypoints.cli.parsing import parse_run
from rollgrad.entrypoints.cli.sft import ExampleFlags


@define(kw_only=True)
class DPOArguments(ExampleFlags, DPORun):
    """Trains a model on preference pairs, by DPO or another loss of pairs. Every setting below is also a key of the
    YAML file."""


def parse_dpo(arguments: Sequence[str]) -> tuple[DPOArguments, DPORun, list[RollgradError]]:
    """Returns flags, settings, and all that is wrong with them.

    Raises:
        ConfigurationError: a flag or its value is wrong, or the file is none.
    """
    parsed, run, unread = parse_run(DPOArguments, DPORun, "train dpo", arguments)
    return parsed, run, [*unread, *dpo_errors(run)]
