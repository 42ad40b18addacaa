"""Which packages are installed, and whether their versions are those that rollgrad is tested with.

Read from the metadata of what is installed, rollgrad's own included: nothing is imported, and no list can grow old.
"""

import importlib.metadata
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

DISTRIBUTION = "rollgrad"


@frozen
class Package:
    """A package that rollgrad or one of its extras asks for."""

    name: str
    wanted: str
    """The versions that are asked for, as in pyproject.toml; empty for any."""
    version: str | None
    """The installed version; None without one."""

    @property
    def fits(self) -> bool:
        """Whether it is installed, in a version that is asked for."""
        return self.version is not None and SpecifierSet(self.wanted).contains(self.version, prereleases=True)

    @property
    def outside(self) -> bool:
        """Whether it is installed, in another version."""
        return self.version is not None and not self.fits


@frozen
class Requirements:
    """What an installation of rollgrad asks for, and finds."""

    python: str
    """The versions of Python."""
    required: tuple[Package, ...]
    """What every run needs."""
    extras: dict[str, tuple[Package, ...]]
    """What each extra adds."""

    def missing(self, extra: str) -> bool:
        """Whether an extra lacks a package, or has one in a version that is not asked for."""
        return not all(package.fits for package in self.extras[extra])

    @property
    def problems(self) -> Iterator[str]:
        """One sentence for each package, and for Python, in a version that rollgrad is not tested with."""
        if not SpecifierSet(self.python).contains(platform.python_version(), prereleases=True):
            yield f"Python is {platform.python_version()}, but rollgrad is tested with {self.python}."
        for package in self.required:
            if package.version is None:
                yield f"{package.name} is not installed, which every run needs: pip install rollgrad."
        seen = {package.name: package for extra in self.extras.values() for package in extra}
        for package in (seen | {package.name: package for package in self.required}).values():
            if package.outside:
                yield f"{package.name} is {package.version}, but rollgrad is tested with {package.wanted}."


def requirements(distribution: str = DISTRIBUTION) -> Requirements | None:
    """What the metadata of the installed rollgrad asks for; None where it is not installed (run from its source)."""
    try:
        metadata = importlib.metadata.metadata(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    asked = [Requirement(line) for line in metadata.get_all("Requires-Dist") or ()]
    return Requirements(
        python=metadata["Requires-Python"],
        required=tuple(_package(one) for one in asked if _applies(one, "")),
        extras={
            extra: tuple(_package(one) for one in asked if _applies(one, extra) and not _applies(one, ""))
            for extra in metadata.get_all("Provides-Extra") or ()
        },
    )


def torch_cuda() -> str | None:
    """The version of CUDA that the installed torch is built for; None for a build without CUDA, or no torch.

    From the file that torch itself reads it from, for importing torch takes seconds.
    """
    try:
        text = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _package(requirement: Requirement) -> Package:
    return Package(requirement.name, str(requirement.specifier), version(requirement.name))
