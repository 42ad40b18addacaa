"""Modules that users import by former names: still found, with a warning that says the new one."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

MOVED = {
    "rollgrad.application.config": "rollgrad.application.settings.run",
    "rollgrad.domain.batch": "rollgrad.domain.batches.packed",
    "rollgrad.domain.catalogue": "rollgrad.domain.algorithms.catalogue",
    "rollgrad.domain.estimators": "rollgrad.domain.algorithms.estimators",
    "rollgrad.domain.losses": "rollgrad.domain.algorithms.losses",
    "rollgrad.domain.messages": "rollgrad.domain.episodes.messages",
    "rollgrad.domain.prompts": "rollgrad.domain.episodes.prompts",
    "rollgrad.domain.rewards": "rollgrad.domain.episodes.rewards",
    "rollgrad.domain.sampling": "rollgrad.domain.episodes.generation",
    "rollgrad.domain.trajectory": "rollgrad.domain.episodes.trajectory",
}
"""Former name to today's: what the documents told users to import, and what ports take and return."""


class FormerNames:
    """Finds and loads the modules of `MOVED` and those below them, before all other finders, which would load a second
    copy. The base classes of `importlib.abc` are left out: they take longer to import than all of this package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a specification for a former name, None for any other."""
        if not todays_name(fullname):
            return None
        return spec_from_loader(fullname, self)  # type: ignore[arg-type] # lacks load_module, which Python asks no more

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves the empty module, which is replaced, to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module that the name stands for now in its place, so that both names give the same classes."""
        former = module.__name__
        name = todays_name(former)
        assert name is not None
        warnings.warn(f"{former} is now {name}: import it from there.", FutureWarning, stacklevel=2)
        sys.modules[former] = import_module(name)


def todays_name(former: str) -> str | None:
    """Returns the name that a module of a former name has now, None if there was none.

    >>> todays_name("rollgrad.domain.estimators.types")
    'rollgrad.domain.algorithms.estimators.types'
    """
    parts = former.split(".")
    package = ".".join(parts[:3])
    return ".".join((MOVED[package], *parts[3:])) if package in MOVED else None


def install() -> None:
    """Adds the finder once."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerNames())
