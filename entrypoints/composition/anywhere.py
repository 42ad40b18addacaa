"""Names of directories and files that mean the same in every process of a cluster, whose working directories are those
of Ray's nodes."""

import copy
from pathlib import Path
from typing import Any

from attrs import evolve, fields, has

from rollgrad.application.settings.function_path import FunctionPath

READ = ("model_name_or_path", "extension_path", "chat_template", "lr_scheduler_path", "optim_path")
"""Settings of any section that may name a directory or a file, which processes of models read."""


def absolute(name: str) -> str:
    """Returns the absolute path of what exists here by this name; any other name, such as that of a model on the hub,
    as it is."""
    try:
        place = FunctionPath.parse(name)  # FILE:NAME of a function
        path = Path(place.file).expanduser()
        if not path.exists():
            return name
        return f"{path.absolute()}:{place.name}" if place.name else str(path.absolute())
    except (OSError, RuntimeError):  # a chat template itself, which is too long for a name, or begins like a home
        return name


def with_absolute_paths(config: Any) -> Any:
    """Returns a run's settings, in which what processes of models read is named by absolute paths."""
    changed = copy.copy(config)
    for field in fields(type(config)):
        section = getattr(config, field.name)
        given = {name: getattr(section, name, None) for name in READ} if has(type(section)) else {}
        if found := {name: absolute(value) for name, value in given.items() if value}:
            setattr(changed, field.name, evolve(section, **found))
    return changed
