"""Estimators and policy losses from a user's file, and the canonical names of all that a configuration names."""

from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.spelling import canonical_names
from rollgrad.domain.errors import RollgradError, raise_together
from rollgrad.entrypoints.config_io import load_extension_file
from rollgrad.entrypoints.kinds import settle


def load_extension(config: RLConfig) -> None:
    """Runs the file of `algo.extension_path`, if one is set, whose decorators add to the known algorithms; then
    replaces other spellings in the configuration (`estimator grpo`) by the canonical names, in place.

    Raises:
        ConfigurationError: there is no such file, it cannot be imported, or a value is none of its setting's, or of
            another type.
    """
    settle(config)
    raise_together(load_extension_file(config.algo.extension_path))
    canonical_names(config)


def spelling_errors(config: RLConfig) -> list[RollgradError]:
    """Replaces other spellings by the canonical names, in place; returns what cannot be understood."""
    try:
        canonical_names(config)
    except RollgradError as error:
        return [error]
    return []
