"""Parses an OpenRLHF command line: the command, its flags, and their values."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.names.names_of_openrlhf import FLAGS, FLAT, IMPLIED, Flag, Kind
from rollgrad.entrypoints.names.suggestions import nearest

TRAINER = "train_ppo_ray"
SERVER = "serve_rm"
TRANSLATED = (TRAINER, SERVER)
"""The modules whose commands have a counterpart."""

OTHERS = {
    "train_sft": "supervised fine-tuning is not there yet",
    "train_rm": "training reward models is not there yet",
    "train_dpo": "training on preferences is not there yet",
    "train_kto": "training on preferences is not there yet",
}
"""Reasons why other modules have no counterpart."""

MODULE = re.compile(r"(?:^|.*/)openrlhf[./]cli[./](\w+?)(?:\.py)?$")


@frozen
class Given:
    """A flag as it was written, and its values."""

    flag: str
    values: tuple[str, ...] = ()
    implied: bool = False
    """Whether the values follow from the flag and were not written."""

    def __str__(self) -> str:
        return self.flag if self.implied else " ".join((self.flag, *self.values))


@frozen
class Command:
    """An OpenRLHF command."""

    flags: list[str]
    """The words that follow the module's name."""
    module: str = TRAINER
    """The module of `openrlhf.cli`."""
    submitted: bool = False
    """Whether `ray job submit` sends it to a running cluster."""


def parse(argv: Sequence[str]) -> list[Given]:
    """Returns the flags of a command line, in order, each with the words up to the next one.

    Lone backslashes (line continuations) and comments are skipped, and so are `...`.

    >>> parse(["--zero_stage", "3", "\\\\", "--reward_clip_range", "-1", "1", "--top_p=0.9"])[1]
    Given(flag='--reward_clip_range', values=('-1', '1'), implied=False)

    Raises:
        ConfigurationError: a word belongs to no flag.
    """
    found: list[Given] = []
    comment = False
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            comment = False
            flag, equals, value = word.partition("=")
            found.append(Given(flag, (value,) if equals else ()))
        elif word == "#" or comment:
            comment = True
        elif word and (word in ("...", "\u2026") or not word.strip("\\ \r\n\t")):
            continue
        elif not found:
            raise ConfigurationError(f"{word!r} belongs to no flag: write --flag value.")
        else:
            found[-1] = Given(found[-1].flag, (*found[-1].values, word))
    return found


def read_command(argv: Sequence[str]) -> Command:
    """Returns the command of the given words; a single word is split as by a shell.

    Raises:
        ConfigurationError: the command cannot be translated.
    """
    words = list(argv)
    if len(words) == 1 and len(words[0].split()) > 1:
        try:
            words = shlex.split(words[0].replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise ConfigurationError(f"The command cannot be split into words ({error}): check its quotes.") from error
    for index, word in enumerate(words):
        match = MODULE.match(word)
        if match is None:
            continue
        if match[1] not in TRANSLATED:
            why = OTHERS.get(match[1], f"the commands that are translated are {' and '.join(TRANSLATED)}")
            raise ConfigurationError(
                f"openrlhf.cli.{match[1]} has no counterpart in rollgrad ({why}): run this step with OpenRLHF."
            )
        return Command(words[index + 1 :], module=match[1], submitted=words[:3] == ["ray", "job", "submit"])
    if words and words[0].startswith("--"):
        return Command(words)
    raise ConfigurationError(
        f"The command names no module of OpenRLHF: write rollgrad openrlhf python3 -m openrlhf.cli.{TRAINER} --flag "
        "value ..."
    )


def options(flags: Sequence[Given]) -> dict[str, Given]:
    """Returns the flags by dotted name; of a repeated flag the last one counts."""
    options: dict[str, Given] = {}
    for given in flags:
        name = given.flag.removeprefix("--").replace("-", "_")
        if name in IMPLIED:
            read_values(Flag(Kind.SWITCH), given)
            dotted, value = IMPLIED[name]
            options[dotted] = Given(given.flag, (value,), implied=True)
        elif name in FLAT or name in FLAGS:
            for dotted in FLAT.get(name, (name,)):
                options[dotted] = given
        else:
            suggestion = nearest(name, (*FLAT, *IMPLIED, *FLAGS))
            hint = f"did you mean --{suggestion}?" if suggestion else "remove it."
            raise ConfigurationError(f"{given.flag} is not a flag of openrlhf.cli.{TRAINER}; {hint}")
    return options


def read_values(flag: Flag, given: Given) -> Any:
    """Returns the value of a flag.

    Raises:
        ConfigurationError: it is not of the flag's kind.
    """
    words = given.values
    try:
        match flag.kind:
            case Kind.SWITCH:
                return {(): True, ("true",): True, ("false",): False}[tuple(word.lower() for word in words)]
            case Kind.INTEGER:
                (word,) = words
                number = float(word)
                if number != int(number):
                    raise ValueError(word)
                return int(number)
            case Kind.NUMBER:
                (word,) = words
                return float(word)
            case Kind.TEXT:
                (word,) = words
                return word
            case Kind.WORDS:
                return list(words)
            case Kind.PAIR:
                low, high = _numbers(words)
                return [low, high]
            case Kind.BOUNDS:
                numbers = _numbers(words)
                if len(numbers) not in (1, 2):
                    raise ValueError(words)
                return numbers
            case Kind.PROBABILITIES:
                return _numbers(words)
    except (ValueError, KeyError, OverflowError) as error:
        shown = " ".join(words) or "without a value"
        raise ConfigurationError(f"{given.flag} is {shown}, but it takes {_KINDS[flag.kind]}: change it.") from error


_KINDS = {
    Kind.SWITCH: "no value",
    Kind.INTEGER: "one integer",
    Kind.NUMBER: "one number",
    Kind.TEXT: "one word (quote what has spaces)",
    Kind.PAIR: "two numbers",
    Kind.BOUNDS: "a lower and an upper number",
    Kind.PROBABILITIES: "numbers with commas between",
}


def _numbers(words: Sequence[str]) -> list[float]:
    return [float(part) for word in words for part in word.split(",")]
