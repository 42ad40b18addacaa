"""The draft of a translation: the flags of another tool's command, and the settings that they become."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from attrs import Factory, define, frozen

from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.names.flags import Program
from rollgrad.entrypoints.translation.words import Given, read_values


def is_run(path: Path) -> bool:
    """Returns whether a directory is no model, but that of a run with one."""
    return (path / "model" / "config.json").is_file() and not (path / "config.json").exists()


@frozen
class TranslatedRun:
    """Settings of a training `command` of ours, such as `train sft`, and `notes`: one line for each flag without an
    identical counterpart."""

    command: str
    run: RLConfig | OfflineRun
    notes: list[str]


@frozen
class TranslatedCommand:
    """Words of a command of ours, the first of which name it, and `notes` as those of `TranslatedRun`."""

    words: list[str]
    notes: list[str]


@define(kw_only=True)
class Draft:
    """A translation in progress. Flags have the names of the program's table, settings ours."""

    program: Program
    options: dict[str, Given]
    """Flags of the command, with their values."""
    settings: dict[str, Any] = Factory(dict)
    """Settings so far, nested as in a file of settings."""
    lost: list[str] = Factory(list)
    """Flags that have no effect, and why."""
    changed: list[str] = Factory(list)
    """Flags that mean something else here, and the difference."""

    @property
    def notes(self) -> list[str]:
        """One line for each flag without an identical counterpart."""
        lost = [f"not honoured: {line}" for line in dict.fromkeys(self.lost)]
        return [*lost, *(f"not identical: {line}" for line in dict.fromkeys(self.changed))]

    def value(self, name: str, default: Any = None) -> Any:
        """Returns the value of a flag; without it the table's default, or else `default`.

        Raises:
            ConfigurationError: it is not of the flag's kind.
        """
        given, flag = self.options.get(name), self.program.flags.get(name)
        if given is None or flag is None:
            return default if flag is None or flag.default is None else flag.default
        return read_values(flag, given)

    def mapping(self, name: str) -> dict[str, Any]:
        """Returns the names and values of a flag such as `'{"name": value}'`, in JSON or YAML; none without it.

        Raises:
            ConfigurationError: it is written otherwise.
        """
        given = self.options.get(name)
        try:
            read = yaml.safe_load(" ".join(given.values)) if given is not None else {}
        except yaml.YAMLError:
            read = None
        if not isinstance(read, dict):
            raise ConfigurationError(
                f"{given}: it must be names and values, such as '{{\"name\": 1}}': change --{name}."
            )
        return read

    def asks(self, name: str) -> bool:
        """Returns whether a flag was given with a value that turns something on."""
        given = self.options.get(name)
        if given is None:
            return False
        flag = self.program.flags[name]
        return read_values(flag, given) is not False and given.values not in [(idle,) for idle in flag.idle]

    def follow(self, name: str) -> None:
        """Sets the setting with the same meaning as a flag, if the flag was given or has a default of its own, or notes
        why there is none."""
        flag = self.program.flags[name]
        if flag.reason is not None:
            if self.asks(name):
                self.lose(name, flag.reason)
        elif flag.to is not None and (name in self.options or flag.default is not None):
            self.set(flag.to, self.value(name))

    def set(self, name: str, value: Any) -> None:
        """Sets one of our settings. A model that is the directory of a run here, where the other tool would have saved
        the model itself, is the model in it."""
        *sections, key = name.split(".")
        if key in ("model_name_or_path", "model") and isinstance(value, str) and is_run(Path(value)):
            value, run = str(Path(value) / "model"), value
            self.changed.append(f"{run}: the directory of a run, whose model is {value}")
        branch = self.settings
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[key] = value

    def words(self) -> list[str]:
        """Returns the settings as words of a command line."""
        return list(_words(self.settings, "--"))

    def lose(self, name: str, reason: str) -> None:
        """Notes that a flag has no effect, if it was given."""
        if name in self.options:
            self.lost.append(f"{self.options[name]}: {reason}")

    def change(self, name: str, difference: str) -> None:
        """Notes that a flag means something else here, if it was given."""
        if name in self.options:
            self.changed.append(f"{self.options[name]}: {difference}")


def _words(settings: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _words(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
            yield from map(str, value if isinstance(value, list) else [value])
