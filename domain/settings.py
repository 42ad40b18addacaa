"""One setting is one field: its type, default, text, range, and the condition under which it means anything.

The classes whose fields are made by `setting` and `section` are the configuration itself: flags, `--help`, YAML and
checks are read from them.
"""

from collections.abc import Callable
from typing import Any

from attrs import Attribute, Factory, field, frozen


@frozen
class Range:
    """Values that a setting may take on its own: a test, and the rule in words, as in "it must be at least 1"."""

    holds: Callable[[Any], bool]
    rule: str


COUNT = Range(lambda value: value >= 1, "at least 1")
NOT_NEGATIVE = Range(lambda value: value >= 0, "at least 0")
POSITIVE = Range(lambda value: value > 0, "greater than 0")
SHARE = Range(lambda value: 0 <= value <= 1, "from 0 to 1")
SOME_SHARE = Range(lambda value: 0 < value <= 1, "greater than 0 and at most 1")
BELOW_ONE = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
PERIOD = Range(lambda value: value == -1 or value >= 1, "-1 or at least 1")
INTERVAL = Range(lambda value: value[0] < value[1], "two numbers, the lower one first")


@frozen
class Told:
    """What a field says of itself besides its type and default."""

    doc: str
    range: Range | None = None

    @classmethod
    def by(cls, attribute: "Attribute[Any]") -> "Told":
        """Returns what a field of a class of settings says.

        Raises:
            TypeError: it was not made by `setting` or `section`.
        """
        told = attribute.metadata.get(cls)
        if not isinstance(told, cls):
            raise TypeError(f"{attribute.name} is no setting: make its field by setting(default, doc) or section().")
        return told


def setting(
    default: Any, doc: str, range: Range | None = None, *, converter: Callable[[Any], Any] | None = None
) -> Any:
    """Returns the field of a setting.

    Args:
        default: value where nothing is set.
        doc: text that `--help` shows, beginning with a sentence that can stand alone.
        range: values that it may take; None allows all of its type. A setting that is None always passes.
        converter: makes the value of what is assigned.

    >>> from attrs import define
    >>> @define(kw_only=True)
    ... class Gate:
    ...     tau: float = setting(1.0, "Temperature of the gate.", POSITIVE)
    >>> Gate().tau
    1.0
    """
    return field(default=default, converter=converter, metadata={Told: Told(doc, range)})


def section(kind: Callable[[], Any], doc: str) -> Any:
    """Returns the field of a section of settings, which `kind` makes."""
    return field(default=Factory(kind), metadata={Told: Told(doc)})
