"""One setting is one field: its type, default, text, range, and the condition under which it means anything.

The classes whose fields are made by `setting` and `section` are the configuration itself: flags, `--help`, YAML and
checks are read from them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import Attribute, Factory, define, field, frozen

FREE = dict[str, Any] | None
"""Type of a setting that holds settings of a library, by its own names and nested as it nests them."""


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
DIRECTORY = Range(
    lambda place: bool(place) and not place.startswith("~") and "://" not in place and "\0" not in place,
    "a directory of this machine, without a ~ that only a shell replaces (mount a store there, or copy the run when it "
    "has ended)",
)
SEED = Range(lambda value: 0 <= value < 2**42, "from 0 to 4398046511103")
"""A seed that can be multiplied by the stride of epochs within 64 bits."""
INTERVAL = Range(lambda value: value[0] < value[1], "two numbers, the lower one first")


@frozen
class Condition:
    """Condition under which a setting means anything; a setting that is changed where it means nothing is refused."""

    holds: Callable[[Any, Any], bool]
    """Test of the section that has the setting, and of the whole run."""
    why: str
    """Why the setting means nothing elsewhere. Values are read as `{here.rank}` and `{run.rollout.engine}`."""
    fix: str
    """Setting to use instead; values as in `why`, and `{at}` is the section's dotted name with its dot."""

    def problem(self, name: str, value: Any, here: Any, run: Any, at: str) -> str:
        """Returns the sentence about the setting `name` of a section `here`, which lies at `at`."""
        shown = repr(value) if type(value) is str else str(value)
        why, fix = (text.format(at=at, here=here, run=run) for text in (self.why, self.fix))
        return f"{name} is {shown}, but {why}: {fix}, or leave --{name} out."


@frozen
class SettingMetadata:
    """Metadata of a setting's field, besides its type and default."""

    doc: str
    range: Range | None = None
    brought: Callable[[], Mapping[str, type]] | None = None
    only_if: tuple[Condition, ...] = ()

    @classmethod
    def of(cls, attribute: "Attribute[Any]") -> "SettingMetadata":
        """Returns the metadata of a field of a class of settings.

        Raises:
            TypeError: it was not made by `setting` or `section`.
        """
        found = attribute.metadata.get(cls)
        if not isinstance(found, cls):
            raise TypeError(f"{attribute.name} is no setting: make its field by setting(default, doc) or section().")
        return found


def setting(
    default: Any,
    doc: str,
    range: Range | None = None,
    *,
    only_if: Condition | tuple[Condition, ...] = (),
    converter: Callable[[Any], Any] | None = None,
) -> Any:
    """Returns the field of a setting.

    Args:
        default: value where nothing is set.
        doc: text that `--help` shows, beginning with a sentence that can stand alone.
        range: values that it may take; None allows all of its type. A setting that is None always passes.
        only_if: conditions without which it means nothing; the first that does not hold is named.
        converter: makes the value of what is assigned.

    >>> from attrs import define
    >>> @define(kw_only=True)
    ... class Gate:
    ...     tau: float = setting(1.0, "Temperature of the gate.", POSITIVE)
    >>> Gate().tau
    1.0
    """
    return field(
        default=default,
        converter=converter,
        metadata={SettingMetadata: SettingMetadata(doc, range, only_if=_all(only_if))},
    )


def own_first(_: type, fields: Sequence["Attribute[Any]"]) -> list["Attribute[Any]"]:
    """Orders the fields of a class: its own before those of the class that it derives from, for `define`."""
    return sorted(fields, key=lambda its: bool(its.inherited))  # type: ignore[attr-defined]


@define(kw_only=True)
class OwnSettings:
    """A section of sections that are not known beforehand, such as the settings that policy losses bring."""

    def __getattr__(self, name: str) -> Any:
        """Says of settings that nothing has brought yet how they come."""
        raise AttributeError(
            f"Nothing has brought settings called {name!r}: import the module of the loss or estimator that brings "
            "them, or name it with algo.extension_path in a file, before rollgrad.load_config."
        )


def section(
    kind: Callable[[], Any],
    doc: str,
    brought: Callable[[], Mapping[str, type]] | None = None,
    *,
    only_if: Condition | tuple[Condition, ...] = (),
) -> Any:
    """Returns the field of a section of settings, which `kind` makes.

    `brought`: returns the sections within it that are known by now, by name, for `OwnSettings`. `only_if`: conditions
    of all its settings, tested on the section or run that has it.
    """
    return field(
        default=Factory(kind), metadata={SettingMetadata: SettingMetadata(doc, brought=brought, only_if=_all(only_if))}
    )


def _all(conditions: Condition | tuple[Condition, ...]) -> tuple[Condition, ...]:
    return (conditions,) if isinstance(conditions, Condition) else conditions
