"""Parses the words of a command line into settings: spellings first (`spell_out`), then tyro.

Flags override the file of --config, which overrides the defaults.
"""

import contextlib
import io
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args

import attrs
from attrs import define, frozen

from rollgrad.application.settings.brought import with_brought
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.application.settings.sections.ckpt import Resume
from rollgrad.application.settings.spelling import OTHER_SPELLINGS, choice, choice_kind
from rollgrad.domain.errors import ConfigurationError, raise_together
from rollgrad.domain.settings import FREE, setting
from rollgrad.entrypoints.cli.free_settings import take_free_settings
from rollgrad.entrypoints.cli.wrong_values import wrong_value
from rollgrad.entrypoints.config_io import (
    EXTENSION,
    PRESET,
    Run,
    forget_preset,
    load_extension_file,
    merged,
    read_config,
    tell_overridden,
)
from rollgrad.entrypoints.names.suggestions import unknown_flag

Arguments = TypeVar("Arguments", bound=attrs.AttrsInstance)
RunArguments = TypeVar("RunArguments", bound="RunFlags")


@define(kw_only=True, slots=False)
class RunFlags:
    """Flags of every command that reads the settings of a run. The class of a command's arguments derives from such
    flags and from the run: `class TrainArguments(TrainFlags, RLConfig)`."""

    config: Path | None = setting(None, "YAML file with settings; flags override it.")
    print_config: bool = setting(False, "Print all settings as YAML that --config reads, and leave.")


def dry_run_setting(what: str, checked: str) -> Any:
    """Returns the flag `dry_run` of a command that trains nothing."""
    return setting(
        False,
        f"Check all that the {what} would refuse: settings, files, packages, {checked}; show what would be done, a "
        "prompt as the model sees it, and the settings that differ from the defaults, and leave.",
    )


@define(kw_only=True, slots=False)
class TrainFlags(RunFlags):
    """Flags of commands that train."""

    dry_run: bool = setting(
        False,
        "Check all that the run would refuse: settings, files, prompts, reward and memory; show the memory plan, the "
        "counts, a prompt, its reward and the settings that differ from the defaults, and leave.",
    )


@define(kw_only=True)
class TrainArguments(TrainFlags, RLConfig):
    """Trains a model by reinforcement learning. Every setting below is also a key of the YAML file."""


@define(kw_only=True)
class DoctorArguments:
    """Shows what this machine offers a run, and what can run here."""

    deep: bool = False
    """Also import the packages, each in a process of its own: minutes, where they are large."""
    json: bool = False
    """Print JSON instead of text."""


@frozen
class OptionalValue:
    """A flag that may stand alone, or be followed by one of a few words."""

    words: Mapping[str, str]
    """Words in small letters, and the value that each stands for."""
    alone: str
    """The value of `--section.flag`."""
    negated: str
    """The value of `--section.no_flag`."""


SWITCH = OptionalValue({"true": "True", "false": "False"}, alone="True", negated="False")
"""A boolean."""

RESUME = OptionalValue(
    {**{resume.value: resume.value for resume in Resume}, "true": Resume.ALWAYS.value, "false": Resume.NEVER.value},
    alone=Resume.ALWAYS.value,
    negated=Resume.NEVER.value,
)

CHECKPOINTING = OptionalValue(
    {**{kind.value: kind.value for kind in Checkpointing}, **OTHER_SPELLINGS[Checkpointing]},
    alone=Checkpointing.FULL.value,
    negated=Checkpointing.OFF.value,
)

OPTIONAL_VALUES: Mapping[str, OptionalValue] = {
    "ckpt.resume": RESUME,
    "actor.gradient_checkpointing": CHECKPOINTING,
}
"""Flags with an optional value besides the booleans, by their dotted names."""


def flag_kinds(kind: type[attrs.AttrsInstance], prefix: str = "") -> dict[str, Any]:
    """Returns the types of a command's flags, by their dotted names."""
    kinds: dict[str, Any] = {}
    for field in attrs.fields(kind):
        name = f"{prefix}{field.name}"
        kinds |= flag_kinds(field.type, f"{name}.") if attrs.has(field.type) else {name: field.type}
    return kinds


def spell_out(
    arguments: Sequence[str], kinds: Mapping[str, Any], optional_values: Mapping[str, OptionalValue] = OPTIONAL_VALUES
) -> list[str]:
    """Returns a command line in the one spelling that tyro is told: flags with underscores, `--flag True` or `--flag
    False` for booleans in any of their forms, values of enums in their canonical spelling.

    >>> kinds = {"dry_run": bool, "data.apply_chat_template": bool, "train.seed": int}
    >>> spell_out(["--dry_run", "--train.seed", "1", "--data.apply_chat_template=false"], kinds)
    ['--dry_run', 'True', '--train.seed', '1', '--data.apply_chat_template', 'False']
    >>> spell_out(["--data.no_apply_chat_template", "--dry_run", "FALSE"], kinds)
    ['--data.apply_chat_template', 'False', '--dry_run', 'False']

    Raises:
        ConfigurationError: a boolean is followed by a word that is neither True nor False.
    """
    spelled, wrong = _spelled(arguments, kinds, optional_values)
    raise_together(wrong)
    return spelled


def _spelled(
    arguments: Sequence[str], kinds: Mapping[str, Any], optional_values: Mapping[str, OptionalValue] = OPTIONAL_VALUES
) -> tuple[list[str], list[ConfigurationError]]:
    """`spell_out` without the flags that are wrong, and a sentence for each of these."""
    spelled: list[str] = []
    wrong: list[ConfigurationError] = []
    words = list(arguments)
    optionals = {name: SWITCH for name, kind in kinds.items() if kind is bool} | dict(optional_values)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            spelled.append(word)
            continue
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        positive = _positive(name, kinds)
        if name in optionals:
            optional = optionals[name]
            given = value if equals else _taken_value(words)
            chosen = optional.alone if given is None else optional.words.get(given.lower())
            if chosen is not None:
                spelled += [f"--{name}", chosen]
            else:
                known = ", ".join(dict.fromkeys(optional.words.values()))
                wrong.append(
                    ConfigurationError(f"--{name} is {given!r}, but it takes {known}, or nothing: change --{name}.")
                )
        elif positive is not None and positive in optionals:
            spelled += [f"--{positive}", optionals[positive].negated]
            if equals or _taken_value(words) is not None:
                wrong.append(ConfigurationError(f"--{name} takes no value: write --{positive} with one."))
        elif equals:
            spelled.append(f"--{name}={_canonical(value, kinds.get(name))}")
        else:
            spelled.append(f"--{name}")
            if words and not words[0].startswith("--"):
                spelled.append(_canonical(words.pop(0), kinds.get(name)))
    return spelled, wrong


def _taken_value(words: list[str]) -> str | None:
    """Removes the first word and returns it, if there is one that is no flag."""
    return words.pop(0) if words and not words[0].startswith("-") else None


def parse_run(
    kind: type[RunArguments], run: type[Run], command: str, arguments: Sequence[str]
) -> tuple[RunArguments, Run, list[ConfigurationError]]:
    """Returns the arguments of a command that reads a run's settings, these settings as far as they can be read, and
    what of the file and the flags cannot.

    Args:
        kind: class of the arguments, which derives from `run`.
        run: class of the run, a composition of sections.
        command: name of the command, for messages.
        arguments: words of the command line.

    Raises:
        ConfigurationError: there is no such file, or it is not YAML.
    """
    arguments, free, unusable = take_free_settings(arguments, flag_kinds(kind))
    words, _ = _spelled(arguments, flag_kinds(kind))
    path = _flag_value("--config", words)
    extension = _flag_value(f"--{EXTENSION}", words)
    preset = _flag_value(f"--{PRESET}", words)
    config, unread = read_config(path, preset=preset, extension=extension, run=run)
    for name, value in free.items():
        section, _, key = name.rpartition(".")
        here = attrgetter(section)(config)
        setattr(here, key, merged(getattr(here, key) or {}, value))
    kind = with_brought(kind)
    words, misspelt = _spelled(arguments, flag_kinds(kind))  # flags of the extension are known by now
    if path is not None and preset is not None:
        tell_overridden(preset, config, path, [word.removeprefix("--").partition("=")[0] for word in words])
    sections = {name: getattr(config, name) for name in attrs.fields_dict(run)}
    parsed = kind(config=None if path is None else Path(path), **sections)
    wrong = _set_named(parsed, command, words)
    settings = type(config)(**{name: getattr(parsed, name) for name in attrs.fields_dict(run)})
    forget_preset(settings)  # expanded above
    return parsed, settings, [*unread, *unusable, *misspelt, *wrong]


def with_extension(kind: type[Arguments], arguments: Sequence[str]) -> type[Arguments]:
    """Returns the class of a command's arguments with the settings that algorithms bring, those of the extension among
    them that a command line names.

    Raises:
        ConfigurationError: the extension cannot be loaded.
    """
    raise_together(load_extension_file(_flag_value(f"--{EXTENSION}", spell_out(arguments, {}))))
    return with_brought(kind)


def parse(default: Arguments, command: str, arguments: Sequence[str]) -> Arguments:
    """Returns the arguments of any other command.

    Raises:
        ConfigurationError: a flag or a value is wrong.
    """
    kinds = flag_kinds(type(default))
    of_libraries = [name for name, kind in kinds.items() if kind == FREE and "." not in name]
    arguments, free, unusable = take_free_settings(arguments, dict.fromkeys(of_libraries, FREE))
    words, misspelt = _spelled(arguments, kinds)
    parsed, wrong = _parse(_with_named_values(default, of_libraries), command, words, kinds)
    raise_together([*unusable, *misspelt, *wrong])
    for name, value in free.items():
        setattr(parsed, name, value)
    return parsed


def _with_named_values(default: Arguments, names: Sequence[str]) -> Arguments:
    """Returns arguments whose settings `names` (a library's) are flags in tyro's help, which would show commands."""
    import tyro

    if not names:
        return default
    shown: dict[str, Any] = {}
    for name in names:
        flag: Any = Annotated[str | None, tyro.conf.arg(name=f"{name}.NAME", metavar="VALUE")]
        shown[name] = attrs.field(default=None, type=flag)
    kind = attrs.make_class(type(default).__name__, shown, bases=(type(default),), kw_only=True)
    kind.__doc__ = type(default).__doc__
    made: Arguments = kind(**attrs.asdict(default, recurse=False))
    return made


def _set_named(arguments: attrs.AttrsInstance, command: str, words: Sequence[str]) -> list[ConfigurationError]:
    """Sets the flags that a command line names; returns a sentence for each that is wrong.

    tyro gets a class of these flags alone: for one of all settings it takes a tenth of a second.
    """
    import tyro

    kinds = flag_kinds(type(arguments))
    flags = {word.partition("=")[0] for word in words}
    named = {f"flag_{place}": name for place, name in enumerate(kinds) if f"--{name}" in flags}
    fields: dict[str, Any] = {}
    for field, name in named.items():
        kind: Any = Annotated[kinds[name], tyro.conf.arg(name=name)]
        fields[field] = attrs.field(default=attrgetter(name)(arguments), type=kind)
    parsed, wrong = _parse(attrs.make_class("Named", fields)(), command, words, kinds)
    for field, name in named.items():
        section, _, setting = name.rpartition(".")
        setattr(attrgetter(section)(arguments) if section else arguments, setting, getattr(parsed, field))
    return wrong


def _parse(
    default: Arguments, command: str, words: Sequence[str], kinds: Mapping[str, Any]
) -> tuple[Arguments, list[ConfigurationError]]:
    """The arguments, with the defaults of flags that are wrong, and a sentence for each of these; `kinds` are the types
    of the command's flags."""
    import tyro

    kind = type(default)
    wrong: list[ConfigurationError] = []
    while True:
        box = io.StringIO()
        try:
            with contextlib.redirect_stderr(box):
                parsed, unknown = tyro.cli(
                    kind,
                    prog=f"rollgrad {command}",
                    args=words,
                    default=default,
                    return_unknown_args=True,
                    use_underscores=True,
                    config=(tyro.conf.EnumChoicesFromValues, tyro.conf.FlagConversionOff),
                )
            return parsed, [*wrong, *_unknown(list(kinds), command, unknown)]
        except SystemExit as stop:
            if not stop.code:
                raise
            # It names one wrong flag at a time: the others are found without it.
            sentence = _sentence(box.getvalue())
            rest = _without(words, sentence)
            wrong.append(ConfigurationError(wrong_value(sentence, words, kinds)))
            if rest == words:
                return default, wrong
            words = rest


def _without(words: Sequence[str], sentence: str) -> Sequence[str]:
    """The words of a command line without the flag that a sentence names, and what follows it."""
    flags = {flag.rstrip(".") for flag in re.findall(r"--[\w.]+", sentence)}
    named = [word for word in words if word.partition("=")[0] in flags]
    if not named:
        return words
    first = words.index(named[0])
    after = next((i for i, word in enumerate(words[first + 1 :], first + 1) if word.startswith("--")), len(words))
    return [*words[:first], *words[after:]]


def _unknown(known: Sequence[str], command: str, words: Sequence[str]) -> list[ConfigurationError]:
    """One sentence for each flag that is not known; for a word only where there is no such flag."""
    flags = [word for word in words if word.startswith("-") or "=" in word] or words[:1]
    return [ConfigurationError(unknown_flag(word, known, command)) for word in dict.fromkeys(flags)]


def _positive(name: str, kinds: Mapping[str, Any]) -> str | None:
    """`data.apply_chat_template` for `data.no_apply_chat_template`; None for other names."""
    section, dot, last = name.rpartition(".")
    if name in kinds or not last.startswith("no_"):
        return None
    return f"{section}{dot}{last.removeprefix('no_')}"


def _canonical(value: str, annotation: Any) -> str:
    """Returns the canonical spelling of an enum's value; any other value as it is, which tyro judges."""
    kind = choice_kind(annotation) if isinstance(annotation, type | UnionType) else None
    if kind is None:
        return value
    try:
        return choice(kind, value).value
    except ValueError:
        return "None" if value.lower() == "none" and get_args(annotation) else value


def _flag_value(flag: str, words: Sequence[str]) -> str | None:
    """Returns the value of a flag that decides the defaults of others.

    Raises:
        ConfigurationError: it is there more than once, where one of them would have no effect.
    """
    found = [word.removeprefix(f"{flag}=") for word in words if word.startswith(f"{flag}=")]
    found += [value for word, value in pairwise(words) if word == flag]
    if len(found) > 1:
        raise ConfigurationError(
            f"{flag} is given {len(found)} times ({', '.join(found)}), but only one counts: keep one."
        )
    return next(iter(found), None)


def _sentence(box: str) -> str:
    """The message in the box that tyro draws: between the title and the first rule, without the list of attempts."""
    lines = [line.strip("│| ") for line in box.splitlines()[1:]]
    message: list[str] = []
    for line in lines:
        rule = not line.strip("─╰╯-")
        if (rule and message) or line.startswith("Got errors"):
            break
        message += [] if rule else [line]
    return " ".join(message)
