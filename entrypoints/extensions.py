"""Estimators and policy losses from a user's file."""

from rollgrad.application.config import RLConfig
from rollgrad.domain.errors import RollgradError


def load_extension(config: RLConfig) -> None:
    """Runs the file of `algo.extension_path`, if one is set, whose decorators add to the known algorithms.

    Raises:
        ConfigurationError: there is no such file, or it cannot be imported.
    """
    if config.algo.extension_path is not None:
        from rollgrad.adapters.system.python_file import load_python_file

        load_python_file(config.algo.extension_path, flag="--algo.extension_path")


def extension_errors(config: RLConfig) -> list[RollgradError]:
    """`load_extension`, with what it raises in a list."""
    try:
        load_extension(config)
    except RollgradError as error:
        return [error]
    return []
