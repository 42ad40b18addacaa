"""Reads a command line of verl: its program, and the overrides of its configuration in the grammar of Hydra."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from attrs import evolve, frozen

from rollgrad.domain.errors import ConfigurationError, raise_together
from rollgrad.entrypoints.names.flags import Flag, Kind, Program
from rollgrad.entrypoints.names.names_of_verl_commands import COLLECTED, IDLE
from rollgrad.entrypoints.names.suggestions import nearest
from rollgrad.entrypoints.translation.words import Given, launcher_number, shell_words

MODULE = re.compile(r"(?:.*/)?(verl|recipe)/(?:\w+/)*(\w+)\.py|(verl|recipe)\.(?:\w+\.)*(\w+)")
"""The file of a program of verl or of its recipes, or its module."""

RECIPE = "main_dapo"
ONE_STEP_OFF, FULLY_ASYNC = "one_step_off_policy", "fully_async_main"
RL = ("main_ppo", "main_ppo_v0", "main_ppo_sync", RECIPE, ONE_STEP_OFF, FULLY_ASYNC)
SFT = ("sft_trainer", "fsdp_sft_trainer", "sft_trainer_ray")
PROGRAMS = (*RL, *SFT)

ASYNCHRONOUS: Mapping[str, str] = {"async_main_ppo": ONE_STEP_OFF, FULLY_ASYNC: FULLY_ASYNC}
"""Programs that other packages than verl.trainer have, as recipes in older releases."""

OTHERS: Mapping[str, str] = {
    "main_generation": "write rollgrad generate.",
    "main_generation_server": "write rollgrad generate.",
    "main_eval": "write rollgrad score, which judges the replies in a file.",
    "main_dpo": "write rollgrad train dpo.",
    "model_merger": "models are saved as Hugging Face's from the first on.",
}
"""Programs of verl that are not translated, and what to do."""

HYDRA_FLAGS: Mapping[str, str] = {
    **dict.fromkeys(("--config-path", "-cp", "--config-dir", "-cd"), "path"),
    **dict.fromkeys(("--config-name", "-cn"), "name"),
}
"""Flags of Hydra that say which file the configuration begins with."""

OWN_FILES = (
    *("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer", "sft_trainer"),
    *("fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer", "sft_trainer_engine"),
    *("one_step_off_ppo_trainer", "one_step_off_ppo_megatron_trainer"),
)
"""Names of verl's own files, whose defaults count in any case."""

VARIABLE = re.compile(r"\$[\w{(@*]")
"""Names that a shell, or Hydra, would have filled in."""

UNKNOWN = "rollgrad knows no setting of verl's of this name"


@frozen
class Override(Given):
    """An override; its `flag` is the dotted name. `added`: whether it may have a name that verl's own configuration has
    not. `unset`: whether it takes the value away."""

    written: str = ""
    added: bool = False
    unset: bool = False

    def __str__(self) -> str:
        return self.written


@frozen
class Command:
    """A command of verl."""

    module: str
    words: tuple[str, ...]
    """The words that follow the module's name."""
    submitted: bool = False
    """Whether `ray job submit` sends it to a running cluster."""
    environment: tuple[str, ...] = ()
    """Variables of the environment that are set in front of it."""
    processes: int | None = None
    """Processes that its launcher starts on each machine; None where it does not say."""
    machines: int = 1
    """Machines that its launcher uses."""


def read_command(argv: Sequence[str]) -> Command:
    """Returns the command of the given words; a single word is split as by a shell.

    Raises:
        ConfigurationError: it cannot be translated.
    """
    words = shell_words(argv)
    for place, word in enumerate(words):
        match = MODULE.fullmatch(word)
        if match is None:
            continue
        package, module = match[1] or match[3], match[2] or match[4]
        if f"{ONE_STEP_OFF}." in word.replace("/", "."):  # the module of this recipe is called main_ppo, too
            package, module = "verl", ONE_STEP_OFF
        elif module in ASYNCHRONOUS:
            package, module = "verl", ASYNCHRONOUS[module]
        if module not in PROGRAMS or (package == "recipe") != (module == RECIPE):
            advice = OTHERS.get(module, f"the programs that are translated are {', '.join(PROGRAMS)}.")
            raise ConfigurationError(f"{word} is no program of verl's that is translated: {advice}")
        launcher = words[:place]
        return Command(
            module,
            tuple(words[place + 1 :]),
            submitted=launcher[:3] == ["ray", "job", "submit"],
            environment=tuple(word for word in launcher if re.match(r"[A-Z_][A-Z0-9_]*=", word)),
            processes=launcher_number(launcher, ("nproc_per_node",)),
            machines=launcher_number(launcher, ("nnodes",)) or 1,
        )
    if words and re.match(r"[+~]*[a-z_]+(\.\w+)+=", words[0]):
        return Command(RL[0], tuple(words))
    raise ConfigurationError(
        f"The command names no program of verl: write rollgrad verl python3 -m verl.trainer.{RL[0]} key=value ..."
    )


@frozen
class Overrides:
    """The overrides of a command in order, those of its file first; `told`: what of its words is not honoured, and why.
    `file`: the name of the file that it begins with."""

    given: tuple[Override, ...]
    told: tuple[str, ...] = ()
    file: str = ""


def read_overrides(words: Sequence[str]) -> Overrides:
    """Returns the overrides in the words of a command.

    Raises:
        ConfigurationError: a word is none; all problems together.
    """
    found: list[Override] = []
    told: list[str] = []
    wrong: list[ConfigurationError] = []
    places = {"path": "", "name": ""}
    rest = iter(words)
    for word in rest:
        if not word.strip("\\ \r\n\t") or word in ("...", "\u2026", "$@", "$*", "${@}"):
            continue
        flag, equals, value = word.partition("=")
        if flag in HYDRA_FLAGS:
            places[HYDRA_FLAGS[flag]] = value if equals else next(rest, "")
        elif word.startswith("-"):
            told.append(f"{word}: it is a flag of Hydra, which there is none of here")
        else:
            try:
                found += _override(word)
            except ConfigurationError as error:
                wrong.append(error)
    raise_together(wrong)
    name = places["name"].removesuffix(".yaml")
    if name:
        of_file = _of_file(Path(places["path"] or ".", f"{name}.yaml"), told)
        found = [*of_file, *found]
    return Overrides(tuple(found), tuple(told), name)


def _of_file(path: Path, told: list[str]) -> list[Override]:
    """Returns what a file changes of verl's defaults.

    Raises:
        ConfigurationError: it is no configuration.
    """
    if not path.is_file():
        if path.stem not in OWN_FILES:
            told.append(f"{path}: there is no such file here; verl's defaults count, and what the command says")
        return []
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path} cannot be read as YAML: change --config-name.") from error
    if not isinstance(settings, dict):
        raise ConfigurationError(f"{path} has no `name: value` lines: change --config-name.")
    others = [entry for entry in settings.pop("defaults", None) or () if entry not in ("_self_", *OWN_FILES)]
    told += [f"{path}: {entry}: of files that a file begins with, verl's own alone are known" for entry in others]
    settings.pop("hydra", None)
    found: list[Override] = []
    for override in _nested("", settings):
        if any(VARIABLE.search(value) for value in override.values):
            told.append(f"{override}: Hydra would fill it in: write the value")
        else:
            found.append(override)
    return found


def _override(word: str) -> list[Override]:
    """Returns the override that a word is, or those of a mapping.

    >>> [(str(given), given.values) for given in _override("+trainer.logger=['console','wandb']")]
    [("+trainer.logger=['console','wandb']", ('console', 'wandb'))]
    >>> [given.flag for given in _override("data.apply_chat_template_kwargs={enable_thinking:False}")]
    ['data.apply_chat_template_kwargs.enable_thinking']

    Raises:
        ConfigurationError: it is none, or its value cannot be read.
    """
    name, equals, text = word.partition("=")
    key = name.lstrip("+~")
    if name.startswith("~"):
        return [Override(key, written=word, unset=True)]
    if not equals or not re.fullmatch(r"[\w.@/]+", key):
        raise ConfigurationError(f"{word!r} is no override: write key=value.")
    if (variable := VARIABLE.search(text)) is not None:
        raise ConfigurationError(f"{word}: a value is not filled in from {variable[0]!r} on: write it.")
    if not text:
        raise ConfigurationError(f"{word} has no value: write it (a variable of the script that is not set is empty).")
    return [evolve(given, written=word) for given in _nested(key, _value(word, text), added=name.startswith("+"))]


def _value(word: str, text: str) -> Any:
    """Returns the value of an override: a text, a list or mapping, or None.

    Raises:
        ConfigurationError: it cannot be read.
    """
    if text.lower() in ("null", "none"):
        return None
    if text[0] not in "[{'\"":
        return text
    spaced = re.sub(r":(?!\s|//)", ": ", text) if text[0] == "{" else text  # in YAML a space is needed
    try:
        return yaml.load(spaced, Loader=yaml.BaseLoader)  # texts, which the flag's kind reads
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"{word} is no value of Hydra's: close brackets, and quote what has spaces."
        ) from error


def plain(text: str) -> Any:
    """Returns a number, a truth or a text, as YAML reads it."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _nested(key: str, value: Any, *, added: bool = True) -> Iterator[Override]:
    """Yields the override of a value, or those of a mapping."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _nested(f"{key}.{name}".lstrip("."), inner, added=added)
        return
    values = value if isinstance(value, list) else [] if isinstance(value, Mapping) else [value]
    words = tuple(_at_home(str(part)) for part in values)
    yield Override(key, () if value is None else words, written=f"{key}={value}", added=added, unset=value is None)


def _at_home(text: str) -> str:
    """Returns a path with the home directory in place of ~, which no shell fills in behind a dotted name."""
    return str(Path(text).expanduser()) if text.startswith("~/") else text


def known(program: Program, overrides: Sequence[Override], lost: list[str]) -> tuple[Program, dict[str, Override]]:
    """Returns the overrides by their names in the program's table, and the table with those that their section
    answers; of a repeated one the last counts.

    Raises:
        ConfigurationError: verl has not all of the names.
    """
    flags, given, wrong = dict(program.flags), dict[str, Override](), list[ConfigurationError]()
    for override in overrides:
        name = override.flag
        if name in COLLECTED:
            if override.values:
                wrong.append(ConfigurationError(f"{override} is no mapping: write {name}.NAME=VALUE."))
        elif name in program.names:
            given.update(dict.fromkeys(program.names[name], override))
        elif (section := _section(name, program)) is not None:
            flags[name] = Flag(Kind.WORDS, reason=program.flags[section].reason, idle=IDLE.get(name, ()))
            given[name] = override
        elif override.added:
            lost.append(f"{override}: {UNKNOWN}")
        else:
            suggestion = _suggestion(name, program)
            hint = f"did you mean {suggestion}?" if suggestion else "remove it."
            wrong.append(ConfigurationError(f"{name} is not a setting of {program.name}; {hint}"))
    raise_together(wrong)
    return evolve(program, flags=flags), given


def _suggestion(name: str, program: Program) -> str | None:
    """Returns the setting that a misspelt one is likely to be: one of its section, or of the same name in another."""
    section, _, last = name.rpartition(".")
    beside = {known.rpartition(".")[2]: known for known in program.names if known.rpartition(".")[0] == section}
    if (similar := nearest(last, tuple(beside))) is not None:
        return beside[similar]
    return next((known for known in program.names if known.rpartition(".")[2] == last), None)


def _section(name: str, program: Program) -> str | None:
    """Returns the section of a setting that answers for all in it."""
    while name := name.rpartition(".")[0]:
        if name in program.flags and (program.flags[name].reason is not None or name in COLLECTED):
            return name
    return None
