"""Checks that hold for any run, whatever sections it composes: ranges of single settings first, then its rules.

Importable without torch. The rules of a reinforcement-learning run are in `rules`.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

import attrs

from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.settings import Told

Run = TypeVar("Run", bound=attrs.AttrsInstance)


def broken_rules(run: Run, rules: Callable[[Run], Iterable[Iterator[str]]]) -> list[ConfigurationError]:
    """Returns what is wrong with single settings of any run, and then, as if those had their defaults, with
    combinations of them.

    `rules`: gives the problems that each rule finds in a run, a sentence each.
    """
    singles = range_problems(run)
    problems = list(singles.values())
    for rule in rules(with_defaults(run, singles)):
        try:
            for problem in rule:
                problems.append(problem)
        except ConfigurationError as error:  # an algorithm of a name that nobody knows: other rules say the same
            problems.append(str(error))
    return [ConfigurationError(problem) for problem in dict.fromkeys(problems)]


def range_problems(config: attrs.AttrsInstance) -> dict[str, str]:
    """Which single settings of a run are out of range: their names, and why."""
    problems: dict[str, str] = {}
    for key, value, told in leaves(config):
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            problems[key] = f"{key} is {value}, but it must be finite: change --{key}."
            continue
        allowed = told.range
        if allowed is not None and value is not None and not allowed.holds(value):
            problems[key] = f"{key} is {value!r}, but it must be {allowed.rule}: change --{key}."
    return problems


def with_defaults(config: Run, keys: Iterable[str]) -> Run:
    """Returns a copy of a run in which the settings `keys` have their defaults."""
    result, default = copy.deepcopy(config), type(config)()
    for key in keys:
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(result), name, attrgetter(key)(default))
    return result


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Told]]:
    """Yields every setting of a run: its dotted name, its value, and what its field says."""
    for field in attrs.fields(type(section)):
        value = getattr(section, field.name)
        if attrs.has(type(value)):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value, Told.by(field)
