"""Flags whose names a library defines: `--vllm.extra.kv_cache_dtype fp8` is a value in the setting `vllm.extra`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.settings import FREE
from rollgrad.entrypoints.config_io import merged


def take_free_settings(
    arguments: Sequence[str], kinds: Mapping[str, Any]
) -> tuple[list[str], dict[str, dict[str, Any]], list[ConfigurationError]]:
    """Returns a command line without such flags, what they say, nested by the dots in their names, and what is wrong.

    Values are YAML, so that numbers, lists and sections keep their types; a flag without one is true.

    >>> words = ["--ds.extra.zero_optimization.overlap_comm=true", "--ds.zero_stage", "3", "--ds.extra.dump_state"]
    >>> take_free_settings(words, {"ds.zero_stage": int, "ds.extra": FREE})
    (['--ds.zero_stage', '3'], {'ds.extra': {'zero_optimization': {'overlap_comm': True}, 'dump_state': True}}, [])
    """
    rest: list[str] = []
    values: dict[str, dict[str, Any]] = {}
    wrong: list[ConfigurationError] = []
    words = list(arguments)
    free = [name for name, kind in kinds.items() if kind == FREE]
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        setting = next((its for its in free if f"{name}.".startswith(f"{its}.")), None) if word[:2] == "--" else None
        if setting is None:
            rest.append(word)
            continue
        given = text if equals else words.pop(0) if words and not words[0].startswith("--") else "true"
        try:
            value = yaml.safe_load(given)
        except yaml.YAMLError:
            wrong.append(ConfigurationError(f"--{name} is {given!r}, which is not YAML: change --{name}."))
            continue
        for key in reversed(list(_keys(name, setting))):
            value = {key: value}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            values[setting] = merged(values.get(setting, {}), value)
        else:
            wrong.append(
                ConfigurationError(f"--{name} is {given!r}, but it must be a section: write --{name}.NAME VALUE.")
            )
    return rest, values, wrong


def _keys(name: str, setting: str) -> Iterator[str]:
    """Yields the parts of a flag's name after that of its setting."""
    yield from filter(None, name.removeprefix(setting).split("."))
