"""Names of directories and files that mean the same in every process of a cluster, whose working directories are those
of Ray's nodes."""

import copy
from pathlib import Path
from typing import Any

from attrs import evolve, fields, has

READ = ("model_name_or_path", "extension_path", "chat_template")
"""Settings of any section that may name a directory or a file, which processes of models read."""


def absolute(name: str) -> str:
    """Returns the absolute path of what exists here by this name; any other name, such as that of a model on the hub,
    as it is."""
    try:
        path = Path(name).expanduser()
        return str(path.absolute()) if path.exists() else name
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
