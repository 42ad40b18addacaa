"""Checks that hold for any run, whatever sections it composes: ranges and conditions of single settings, then its
rules.

Importable without torch. The rules of a reinforcement-learning run are in `rules`.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

import attrs

from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.settings import Condition, Range, SettingMetadata

Run = TypeVar("Run", bound=attrs.AttrsInstance)


def broken_rules(
    run: Run, rules: Callable[[Run], Iterable[Iterator[str]]], conditions_of: tuple[str, ...] = ("",)
) -> list[ConfigurationError]:
    """Returns what is wrong with single settings of any run, and then, as if those had their defaults, with
    combinations of them.

    Args:
        run: the settings.
        rules: gives the problems that each rule finds in a run, a sentence each.
        conditions_of: beginnings of the names of settings whose conditions are checked; all by default.
    """
    singles = range_problems(run)
    problems = list(singles.values())
    rest = with_defaults(run, singles)
    unmet = condition_problems(rest)
    problems += [problem for name, problem in unmet.items() if name.startswith(conditions_of)]
    for rule in rules(rest):
        try:
            for problem in rule:
                problems.append(problem)
        except ConfigurationError as error:  # an algorithm of a name that nobody knows: other rules say the same
            problems.append(str(error))
    return [ConfigurationError(problem) for problem in dict.fromkeys(problems)]


def range_problems(config: attrs.AttrsInstance) -> dict[str, str]:
    """Returns the single settings of a run that are out of range, by name, each with the reason."""
    problems: dict[str, str] = {}
    for key, value, metadata in leaves(config):
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            problems[key] = f"{key} is {value}, but it must be finite: change --{key}."
            continue
        allowed = metadata.range
        if allowed is not None and value is not None and not _holds(allowed, value):
            problems[key] = f"{key} is {value!r}, but it must be {allowed.rule}: change --{key}."
    return problems


def _holds(allowed: Range, value: Any) -> bool:
    try:
        return allowed.holds(value)
    except TypeError:  # from Python a setting may be anything, such as the text "4" for a number
        return False


def condition_problems(run: attrs.AttrsInstance) -> dict[str, str]:
    """Returns the settings of a run that were changed where they mean nothing: their names, and why."""

    def unmet(
        section: Any, default: Any, at: str, above: tuple[tuple[Condition, Any, str], ...]
    ) -> Iterator[tuple[str, str]]:
        for field in attrs.fields(type(section)):
            name, value, unchanged = f"{at}{field.name}", getattr(section, field.name), getattr(default, field.name)
            conditions = (*above, *((condition, section, at) for condition in SettingMetadata.of(field).only_if))
            if attrs.has(type(value)):
                yield from unmet(value, unchanged, f"{name}.", conditions)
            elif value != unchanged:
                for condition, here, where in conditions:
                    if not condition.holds(here, run):
                        yield name, condition.problem(name, value, here, run, where)
                        break

    return dict(unmet(run, type(run)(), "", ()))


def with_defaults(config: Run, keys: Iterable[str]) -> Run:
    """Returns a copy of a run in which the settings `keys` have their defaults."""
    result, default = copy.deepcopy(config), type(config)()
    for key in keys:
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(result), name, attrgetter(key)(default))
    return result


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, SettingMetadata]]:
    """Yields every setting of a run: its dotted name, its value, and what its field says."""
    for field in attrs.fields(type(section)):
        value = getattr(section, field.name)
        if attrs.has(type(value)):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value, SettingMetadata.of(field)
