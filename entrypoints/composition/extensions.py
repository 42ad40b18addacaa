"""Estimators and policy losses from a user's file, and the canonical names of all that a configuration names."""

from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.spelling import canonical_names
from rollgrad.domain.errors import RollgradError


def load_extension(config: RLConfig) -> None:
    """Runs the file of `algo.extension_path`, if one is set, whose decorators add to the known algorithms; then
    replaces other spellings in the configuration (`estimator grpo`) by the canonical names, in place.

    Raises:
        ConfigurationError: there is no such file, it cannot be imported, or a value is none of its setting's.
    """
    if config.algo.extension_path is not None:
        from rollgrad.adapters.system.python_file import load_python_file

        load_python_file(config.algo.extension_path, flag="--algo.extension_path")
    canonical_names(config)


def extension_errors(config: RLConfig) -> list[RollgradError]:
    """`load_extension`, with what it raises in a list."""
    try:
        load_extension(config)
    except RollgradError as error:
        return [error]
    return []
