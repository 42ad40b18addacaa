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
    """A flag of another tool: its kind and either `to`, the setting with the same meaning, or `reason`, why there is
    none. Neither: it is translated together with others. `idle`: values that ask for nothing. `default`: the other
    tool's default value, where the setting's own differs from it."""

    kind: Kind
    to: str | None = None
    reason: str | None = None
    idle: tuple[str, ...] = ()
    default: Any = None
    always: bool = False
    """Whether it asks for what every run does."""


@frozen(kw_only=True)
class Program:
    """A program of another tool. `name`: its name in messages. `flags`: its flags. `names`: every spelling of a flag on
    its command line, and the names in `flags` that it stands for. `implied`: switches that stand for the value of a
    flag."""

    name: str
    flags: Mapping[str, Flag]
    names: Mapping[str, tuple[str, ...]]
    implied: Mapping[str, tuple[str, str]] = Factory(dict)
