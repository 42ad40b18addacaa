"""`--help` of the commands that read a run's settings (the essential ones, a section, or all), and of those with a few
flags of their own.

Written from the fields of the settings, without torch and tyro, so that it comes at once.
"""

import ast
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import attrs
from attrs import evolve, frozen

from rollgrad.application.settings import loop_rules
from rollgrad.application.settings.rules import examples as example_rules
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.settings import FREE, SettingMetadata
from rollgrad.entrypoints.cli.essentials import ESSENTIALS
from rollgrad.entrypoints.cli.parsing import with_extension
from rollgrad.entrypoints.names.suggestions import unknown_flag

HELP_FLAGS = ("-h", "--help")
MOST_COLUMNS = 110
ALL = "all"

PLACES: Mapping[str, str] = {
    **dict.fromkeys(("replay", "rescore", "inspect", "report"), "RUN "),
    "export": "pairs|sft|messages RUN ",
    "ui": "[DIR] ",
    "eval": "[MODEL ...] ",
}
"""Words that a command takes without a flag, with a space after them."""

OF_EXAMPLES = ("train sft", "train dpo", "train kto", "train kd", "train rm", "train prm", "data show")


@frozen
class Setting:
    """A setting of a command: its dotted name, type, default and docstring."""

    name: str
    kind: Any
    default: Any
    doc: str


@frozen
class Section:
    """A section of settings, its docstring, and those of its settings that stand in no section within it."""

    name: str
    doc: str
    settings: tuple[Setting, ...]


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Returns whether one of the words is --help."""
    return any(word.partition("=")[0] in HELP_FLAGS for word in arguments)


def show_help(command: str, kind: type[attrs.AttrsInstance], arguments: Sequence[str]) -> int:
    """Prints what follows --help: a section, a setting, all; the essential settings where nothing does.

    Raises:
        ConfigurationError: there is no such section.
    """
    sections = list(_sections(with_extension(kind, arguments)(), ""))
    unread = example_rules.UNREAD if command in OF_EXAMPLES else loop_rules.UNREAD
    hidden = unread if command in OF_EXAMPLES or command.startswith("loop ") else ()
    sections = [evolve(its, settings=tuple(s for s in its.settings if s.name not in hidden)) for its in sections]
    topic = _topic(arguments)
    if topic is None:
        lines = _essentials(command, kind, sections)
    elif topic == ALL:
        lines = [line for section in sections for line in (*_section(section), "")]
    else:
        lines = _about(topic, command, sections)
    sys.stdout.write("\n".join(line.rstrip() for line in lines).rstrip() + "\n")
    return 0


def show_flags(command: str, kind: type[attrs.AttrsInstance]) -> int:
    """Prints the --help of a command whose flags are the fields of `kind`, with a docstring below each."""
    docs = {name: doc for base in reversed(kind.__mro__[:-1]) for name, doc in _field_docs(base).items()}
    lines = [f"usage: rollgrad {command} {PLACES.get(command, '')}[OPTIONS]"]
    for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n"):
        lines += ["", *_wrapped(paragraph, "")]
    lines.append("")
    for field in attrs.fields(kind):
        lines += _setting(Setting(field.name, field.type, field.default, docs[field.name]), brief=False)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _field_docs(kind: type) -> dict[str, str]:
    """Returns the docstrings that stand below the fields of a class, by their names."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _topic(arguments: Sequence[str]) -> str | None:
    index = next(index for index, word in enumerate(arguments) if word.partition("=")[0] in HELP_FLAGS)
    _, equals, value = arguments[index].partition("=")
    following = value if equals else next(iter(arguments[index + 1 :]), "")
    return following.lstrip("-").replace("-", "_") or None


def _essentials(command: str, kind: type[attrs.AttrsInstance], sections: Sequence[Section]) -> list[str]:
    settings = {setting.name: setting for section in sections for setting in section.settings}
    example, groups = ESSENTIALS[command]
    own = [setting for setting in settings.values() if "." not in setting.name]
    lines = [
        f"usage: rollgrad {command} {PLACES.get(command, '')}[--config FILE.yaml] [--SECTION.SETTING VALUE ...]",
        "",
        *_wrapped(inspect.cleandoc(kind.__doc__ or "").replace(" below", ""), ""),
        "",
        example,
        "",
        *(line for setting in own for line in _setting(setting, brief=True)),
    ]
    for title, names in groups.items():
        lines += ["", title]
        lines += [line for name in names for line in _setting(settings[name], brief=True)]
    lines += ["", f"Sections: rollgrad {command} --help SECTION shows one, --help all shows all"]
    outer = [section for section in sections if section.name and "." not in section.name]
    return lines + [f"  {section.name:<10}{_first_sentence(section.doc)}" for section in outer]


def _about(topic: str, command: str, sections: Sequence[Section]) -> list[str]:
    within = [section for section in sections if f"{section.name}.".startswith(f"{topic}.")]
    if within:
        return [line for section in within for line in (*_section(section), "")]
    settings = [setting for section in sections for setting in section.settings]
    found = next((setting for setting in settings if setting.name == topic), None)
    if found is not None:
        return list(_setting(found, brief=False))
    names = [section.name for section in sections if section.name and "." not in section.name]
    hint = unknown_flag(f"--{topic}", [setting.name for setting in settings], command).partition("; ")[2]
    more = f" As a setting: {hint}" if "--help" not in hint else ""
    raise ConfigurationError(
        f"{topic!r} is neither a section nor a setting: the sections are {', '.join(names)}, and all.{more}"
    )


def _section(section: Section) -> Iterator[str]:
    yield f"{section.name}: {section.doc}" if section.name else "Of the command itself"
    for setting in section.settings:
        yield from _setting(setting, brief=False)


def _setting(setting: Setting, *, brief: bool) -> Iterator[str]:
    yield f"  --{setting.name} {_value(setting.kind)}{_default(setting)}"
    yield from _wrapped(_first_sentence(setting.doc) if brief else setting.doc, "      ")


def _sections(config: Any, prefix: str, doc: str = "") -> Iterator[Section]:
    """Yields the sections of a configuration, those within a section after it."""
    kind: Any = type(config)
    settings, inner = [], []
    for field in attrs.fields(kind):
        name, value, its_doc = f"{prefix}{field.name}", getattr(config, field.name), SettingMetadata.of(field).doc
        if attrs.has(field.type):
            inner.append((value, f"{name}.", its_doc))
        else:
            settings.append(Setting(name, field.type, value, its_doc))
    yield Section(prefix.rstrip("."), doc, tuple(settings))
    for value, deeper, its_doc in inner:
        yield from _sections(value, deeper, its_doc)


def _value(kind: Any) -> str:
    """Returns the placeholder of a value of that type, after its flag."""
    if kind == FREE:
        return "SECTION"
    if isinstance(kind, UnionType):
        return " | ".join(_value(part) for part in get_args(kind) if part is not NoneType)
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        return f"{_value(parts[0])} ..." if parts[-1] is Ellipsis else " ".join(map(_value, parts))
    if get_origin(kind) is dict:
        return "NAME NUMBER ..." if parts[1] is float else "NAME VALUE ..."
    if issubclass(kind, StrEnum):
        return "{" + ",".join(kind) + "}"
    return _VALUES.get(kind) or str(kind.__name__).upper()


_VALUES: Mapping[Any, str] = {bool: "[True|False]", int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


def _default(setting: Setting) -> str:
    default = setting.default
    if default in ("", None, ()):
        return ""
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f" (default: {shown if shown.isprintable() else repr(shown)})"


def _first_sentence(doc: str) -> str:
    """Returns a docstring up to the first full stop that ends a sentence, which no decimal point, no file name
    and no "et al." does."""
    return re.split(r"(?<!\bal)\. ", doc)[0].rstrip(".") + "."


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(shutil.get_terminal_size().columns, MOST_COLUMNS)
    return textwrap.wrap(text, max(width, 40), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
