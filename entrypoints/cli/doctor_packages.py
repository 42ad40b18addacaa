"""Installed packages, and whether rollgrad is tested with their versions.

The facts come from the metadata of the installed packages and of rollgrad: nothing is imported, and no list can become
outdated.
"""

import importlib.metadata
import platform
from collections.abc import Iterator

from attrs import frozen
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

DISTRIBUTION = "rollgrad"


@frozen
class Package:
    """A package that rollgrad or one of its extras requires."""

    name: str
    wanted: str
    """Required versions, as in pyproject.toml; empty for any."""
    version: str | None
    """The installed version; None without one."""

    @property
    def fits(self) -> bool:
        """Whether it is installed, in a required version."""
        return self.version is not None and SpecifierSet(self.wanted).contains(self.version, prereleases=True)

    @property
    def outside(self) -> bool:
        """Whether it is installed, in another version."""
        return self.version is not None and not self.fits


@frozen
class Requirements:
    """Requirements of an installation of rollgrad, with the installed versions."""

    python: str
    """The versions of Python."""
    required: tuple[Package, ...]
    """Packages that every run needs."""
    extras: dict[str, tuple[Package, ...]]
    """Packages that each extra adds."""

    def missing(self, extra: str) -> bool:
        """Returns whether a package of an extra is missing, or has another than the required version."""
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
    """Returns the requirements in the metadata of the installed rollgrad; None if it runs from source, not
    installed."""
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


def version(package: str) -> str | None:
    """Returns the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _package(requirement: Requirement) -> Package:
    return Package(requirement.name, str(requirement.specifier), version(requirement.name))
