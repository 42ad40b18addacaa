"""Parses the command line of another tool's program: its flags and their values."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from attrs import frozen

from rollgrad.domain.errors import ConfigurationError, raise_together
from rollgrad.entrypoints.names.flags import Flag, Kind, Program
from rollgrad.entrypoints.names.suggestions import nearest

BOOLEANS: Mapping[str, bool] = {
    **dict.fromkeys(("true", "yes", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "f", "n", "0"), False),
}
"""Words that a switch may be followed by, in small letters."""


@frozen
class Given:
    """A flag as it was written, and its values."""

    flag: str
    values: tuple[str, ...] = ()
    implied: bool = False
    """Whether the values follow from the flag and were not written."""

    def __str__(self) -> str:
        return self.flag if self.implied else " ".join((self.flag, *self.values))


def shell_words(argv: Sequence[str]) -> list[str]:
    """Returns the words of a command; a single word with spaces is a whole command, and is split as by a shell.

    Raises:
        ConfigurationError: it cannot be split.
    """
    words = list(argv)
    if len(words) != 1 or len(words[0].split()) < 2:
        return words
    try:
        return shlex.split(words[0].replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigurationError(f"The command cannot be split into words ({error}): check its quotes.") from error


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


def options(program: Program, flags: Sequence[Given]) -> dict[str, Given]:
    """Returns the flags of a command line by their names in the program's table; of a repeated flag the last one
    counts.

    Raises:
        ConfigurationError: the program has not all of the flags.
    """
    options: dict[str, Given] = {}
    wrong: list[ConfigurationError] = []
    for given in flags:
        name = given.flag.removeprefix("--").replace("-", "_")
        if name in program.implied:
            read_values(Flag(Kind.SWITCH), given)
            known, value = program.implied[name]
            options[known] = Given(given.flag, (value,), implied=True)
        elif name in program.names:
            for known in program.names[name]:
                options[known] = given
        else:
            suggestion = nearest(name, (*program.names, *program.implied))
            hint = f"did you mean --{suggestion}?" if suggestion else "remove it."
            wrong.append(ConfigurationError(f"{given.flag} is not a flag of {program.name}; {hint}"))
    raise_together(wrong)
    return options


def launcher_number(words: Sequence[str], flags: Sequence[str]) -> int | None:
    """Returns the value of one of a launcher's flags; None without one, or where it is no number.

    >>> launcher_number(["accelerate", "launch", "--num_processes=4"], ("num_processes",))
    4
    """
    for word, following in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag.removeprefix("--").replace("-", "_") in flags:
            given = value if equals else following
            return int(given) if given.isdecimal() and int(given) else None
    return None


def read_values(flag: Flag, given: Given) -> Any:
    """Returns the value of a flag.

    Raises:
        ConfigurationError: it is not of the flag's kind.
    """
    words = given.values
    try:
        match flag.kind:
            case Kind.SWITCH:
                if not words:
                    return True
                (word,) = words
                return BOOLEANS[word.lower()]
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
                return [word.rstrip(",") or word for word in words]  # "q_proj", "v_proj" in a shell
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
