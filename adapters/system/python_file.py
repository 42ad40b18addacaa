"""Loads a Python file that a user names."""

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from rollgrad.application.foreign import foreign_code
from rollgrad.domain.errors import ConfigurationError

USER_MODULE = "rollgrad_user_"
"""Begins the names of modules that are made of users' files, which no import finds."""
DIGITS = 8
"""Digits of the hash of a file's place that tell its module from those of other files of its name."""


def load_python_file(path: str, *, flag: str) -> ModuleType:
    """Loads a file as a module; `flag` is the setting that names it, for errors.

    Raises:
        ConfigurationError: there is no such file, it is not Python, or it cannot be imported.
    """
    file = Path(path)
    try:
        there = file.is_file()
    except OSError:  # such as a name that is too long
        there = False
    if not there:
        raise ConfigurationError(f"{flag} is {path!r}, but there is no such file.")
    # Files of one name in two folders are two modules: classes find their own module by its name.
    name = f"{USER_MODULE}{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:DIGITS]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{flag} is {path!r}: it must be a Python file (.py).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with foreign_code(lambda words: ConfigurationError(f"{flag} {path} cannot be imported: {words}"), located=True):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
