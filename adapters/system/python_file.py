"""Loads Python that a user names: a file, or a module that can be imported.

Such code imports what lies beside it, and in the working directory, as it would if Python had started it: both are
places where modules are looked for, after all others, so that a file there hides no package.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from rollgrad.application.foreign import foreign_code
from rollgrad.application.settings.function_path import is_module_name
from rollgrad.domain.errors import ConfigurationError

USER_MODULE = "rollgrad_user_"
"""Begins the names of modules that are made of users' files, which no import finds."""
DIGITS = 8
"""Digits of the hash of a file's place that tell its module from those of other files of its name."""


def load_python(place: str, *, flag: str) -> ModuleType:
    """Loads a file, or imports a module by its name (`my_lib.rewards`); `flag` is the setting that names it, for
    errors.

    Raises:
        ConfigurationError: there is neither, it is not Python, or it cannot be imported.
    """
    if not is_module_name(place):
        return load_python_file(place, flag=flag)
    _look_in(Path.cwd())
    with foreign_code(lambda words: ConfigurationError(f"{flag} {place} cannot be imported: {words}"), located=True):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports one that is not
            parent, _, name = place.rpartition(".")
            meant = f" (did you mean {parent}:{name}?)" if hasattr(sys.modules.get(parent), name) else ""
            raise ConfigurationError(
                f"{flag} is {place!r}, but there is no such file and no module of this name{meant}: name a file (.py), "
                "or a module that Python finds from here (see PYTHONPATH)."
            ) from error


def module_file(name: str) -> Path | None:
    """Returns the file that an import of a module would read, found without running it, nor the packages that it is in;
    None where there is none, or only such an import finds it (in a namespace package within another)."""
    _look_in(Path.cwd())
    spec, parts = None, name.split(".")
    with suppress(ImportError, KeyError, ValueError):
        for count in range(1, len(parts) + 1):
            inside = None if spec is None else spec.submodule_search_locations
            if count > 1 and inside is None:  # a module, in which nothing else can be
                return None
            spec = _found(".".join(parts[:count]), inside)
        if spec is not None and spec.has_location and spec.origin is not None:
            return Path(spec.origin)
    return None


def _found(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    """Returns where a module is, as the system's finders say, of which each imports no package for it."""
    found = (finder.find_spec(name, places) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in found if spec is not None), None)


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
        raise ConfigurationError(f"{flag} is {path!r}, but there is no such file: name one that is there.")
    # Files of one name in two folders are two modules: classes find their own module by its name.
    name = f"{USER_MODULE}{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:DIGITS]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{flag} is {path!r}: it must be a Python file (.py).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _look_in(file.resolve().parent, Path.cwd())
    try:
        with foreign_code(lambda words: ConfigurationError(f"{flag} {path} cannot be imported: {words}"), located=True):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _look_in(*folders: Path) -> None:
    """Adds folders to those where Python looks for modules, for good: functions import when they are called, too."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)
