"""Tables of the flags of another tool's programs: the kind of each flag's values, and what it becomes here."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from attrs import Factory, frozen


class Kind(Enum):
    """Kind of a flag's value."""

    SWITCH = auto()
    INTEGER = auto()
    NUMBER = auto()
    TEXT = auto()
    WORDS = auto()
    PAIR = auto()
    BOUNDS = auto()
    """A pair, or the upper bound alone."""
    PROBABILITIES = auto()
    """Numbers with commas between."""


@frozen
class Flag:
    """A flag of another tool.

    It has either `to` or `reason`; one with neither is translated together with others.
    """

    kind: Kind
    to: str | None = None
    """Setting with the same meaning."""
    reason: str | None = None
    """Why there is no such setting."""
    idle: tuple[str, ...] = ()
    """Values that ask for nothing."""
    default: Any = None
    """Default value of the other tool, where the setting's own differs from it."""
    always: bool = False
    """Whether it asks for what every run does."""


@frozen(kw_only=True)
class Program:
    """A program of another tool."""

    name: str
    """Name in messages."""
    flags: Mapping[str, Flag]
    names: Mapping[str, tuple[str, ...]]
    """Every spelling of a flag on its command line, and the names in `flags` that it stands for."""
    implied: Mapping[str, tuple[str, str]] = Factory(dict)
    """Switches that stand for the value of a flag."""
