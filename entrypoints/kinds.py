"""Types of settings: what a value of a file or of Python has to be, as what it counts, and how that is said."""

import os
from collections.abc import Iterator, Mapping
from enum import StrEnum
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import attrs
import cattrs

from rollgrad.application.settings.spelling import choice, choice_kind, choice_problems
from rollgrad.domain.errors import ConfigurationError, raise_together


def settle(run: attrs.AttrsInstance) -> None:
    """Makes what Python assigned to the settings of any run what a file would have given, in place: a path becomes a
    text, a list a tuple, and another spelling of a choice the canonical one.

    Raises:
        ConfigurationError: values are of a wrong type, or no choices of their settings; one sentence for each. Or these
            are no settings.

    >>> from pathlib import Path
    >>> from rollgrad.application.settings.run import RLConfig
    >>> config = RLConfig()
    >>> config.data.prompt_dataset = Path("sums.jsonl")
    >>> settle(config)
    >>> config.data.prompt_dataset
    'sums.jsonl'
    """
    if not attrs.has(type(run)):
        raise ConfigurationError(
            f"The settings are a {type(run).__name__}, but an object holds them: rollgrad.load_config('FILE.yaml') "
            "reads it from a file, and rollgrad.RLConfig(), rollgrad.SFTRun() and their like make one with the "
            "defaults."
        )
    raise_together([ConfigurationError(problem) for problem in [*_type_problems(run, ""), *choice_problems(run)]])


def _type_problems(section: Any, prefix: str) -> Iterator[str]:
    """Replaces values; yields a sentence for each that is of a wrong type."""
    for field in attrs.fields(type(section)):
        value, name = getattr(section, field.name), f"{prefix}{field.name}"
        if attrs.has(type(value)):
            yield from _type_problems(value, f"{name}.")
        elif attrs.has(field.type):
            yield f"{name} is {value!r}, but it must be a section of settings: set {name}.NAME for each of its own."
        elif choice_kind(field.type) is None:
            try:
                setattr(section, field.name, CONVERTER.structure(_plain(value), field.type))
            except Exception:  # as in a file: cattrs wraps what the hooks raise in groups of its own
                yield f"{name} is {value!r}, but it must be {described(field.type)}: {_way_out(name, value)}."


def _plain(value: Any) -> Any:
    """Returns what a file would have in the place of a path, of a text of another class, or of a whole number that
    numpy made."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str):
        return str(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _way_out(name: str, value: Any) -> str:
    items = value if isinstance(value, list | tuple) else [value]
    if any(map(callable, items)):
        return f"name the file or the module with the code in --{name}, or give it to the call as docs/library.md says"
    return f"change --{name}"


def described(kind: Any) -> str:
    """Returns a type in words."""
    if isinstance(kind, UnionType):
        return " or ".join(described(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        length = "" if parts[-1] is Ellipsis else f"{len(parts)} "
        return f"a list of {length}{_PLURALS[parts[0]]}"
    if get_origin(kind) is dict:
        return f"a section of `name: {'number' if get_args(kind)[1] is float else 'value'}` lines"
    if issubclass(kind, StrEnum):
        return "one of " + ", ".join(kind)
    return _WORDS[kind]


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", NoneType: "null"}
_PLURALS = {float: "numbers", str: "texts"}


def _strict(kind: type) -> Any:
    def structure(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(value)
        return value

    return structure


def _number(value: Any, _: Any) -> float:
    """Converts a number. YAML reads 1e-6, which has no dot, as text, so text of a number is accepted."""
    if isinstance(value, bool):
        raise TypeError(value)
    return float(value)


def _optional(value: Any, kind: Any) -> Any:
    kinds = [part for part in get_args(kind) if part is not NoneType]
    if value is None and len(kinds) < len(get_args(kind)):
        return None
    if len(kinds) == 1:
        return CONVERTER.structure(value, kinds[0])
    if type(value) not in kinds:
        raise TypeError(value)
    return value


def _tuple(value: Any, kind: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(value)
    parts = get_args(kind)
    kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
    return tuple(CONVERTER.structure(item, part) for item, part in zip(value, kinds, strict=True))


def _mapping(value: Any, kind: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(value)
    key_kind, value_kind = get_args(kind)
    return {CONVERTER.structure(key, key_kind): CONVERTER.structure(item, value_kind) for key, item in value.items()}


def _is_mapping(kind: Any) -> bool:
    return get_origin(kind) is dict


def _is_optional(kind: Any) -> bool:
    return isinstance(kind, UnionType)


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


CONVERTER = cattrs.Converter()
for _kind in (bool, int, str):
    CONVERTER.register_structure_hook(_kind, _strict(_kind))
CONVERTER.register_structure_hook(float, _number)
CONVERTER.register_structure_hook_func(_is_optional, _optional)
CONVERTER.register_structure_hook_func(_is_tuple, _tuple)
CONVERTER.register_structure_hook_func(_is_mapping, _mapping)
CONVERTER.register_structure_hook(StrEnum, lambda value, kind: choice(kind, value))
CONVERTER.register_unstructure_hook(StrEnum, lambda member: member.value)
