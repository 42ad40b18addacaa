"""Settings of a run, as its directory has them. Importable without torch."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

TRAINERS = ("dpo", "kto", "kd", "prm", "rm")
"""Trainers over examples whose settings have a section of their name."""


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the settings of a YAML file by their dotted names; none of a file that cannot be read."""
    try:
        return _flat(yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return {}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {}
    found: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        found |= _flat(item, f"{name}.") if isinstance(item, dict) and item else {name: _json(item)}
    return found


def _json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str | dict) else str(value)


def trainer_of(settings: Mapping[str, Any]) -> str | None:
    """Returns the command after `rollgrad train` whose settings these are."""
    sections = {name.partition(".")[0] for name in settings}
    if not sections:
        return None
    return "rl" if "rollout" in sections else next((name for name in TRAINERS if name in sections), "sft")
