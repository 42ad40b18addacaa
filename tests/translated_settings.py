"""Settings of a translated command by their dotted names."""

from operator import attrgetter
from typing import Any

from rollgrad.entrypoints.config_io import setting_names
from rollgrad.entrypoints.translation.draft import TranslatedRun


def settings_of(result: TranslatedRun) -> dict[str, Any]:
    return {name: attrgetter(name)(result.run) for name in setting_names(type(result.run))}


def holds(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return {name: found[name] for name in expected} == expected
