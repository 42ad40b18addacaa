"""Reads and writes configurations as YAML.

`load_config(path)` reads what `dump_config` wrote to an equal configuration. Reading is strict: an unknown key, or a
value of the wrong type, is one sentence that names the key. Importable without torch.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import attrs
import yaml

from rollgrad.application.foreign import foreign_code
from rollgrad.application.settings.brought import with_brought
from rollgrad.application.settings.presets import preset_settings
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError, raise_together
from rollgrad.entrypoints.kinds import CONVERTER, described
from rollgrad.entrypoints.names.suggestions import unknown_key
from rollgrad.entrypoints.redaction import hide, secrets_of_settings

Config = TypeVar("Config", bound=attrs.AttrsInstance)
Run = TypeVar("Run", bound=attrs.AttrsInstance)
"""A composition of sections, such as `RLConfig`."""

EXTENSION = "algo.extension_path"
"""Names the file with a user's estimators and policy losses, and the settings that these bring, in the runs that have
this setting."""

PRESET = "algo.preset"
"""Names recipes in the runs that have this setting, until they are expanded where a file or flags are read."""


def load_config(path: Path | str | None = None, *, preset: str | None = None) -> RLConfig:
    """Reads the YAML file of a reinforcement-learning run over the settings of a preset; what both leave out keeps its
    default.

    Args:
        path: the file; None reads none.
        preset: names from `application.presets`, separated by commas; None takes the file's `algo.preset`, if any.

    Raises:
        ConfigurationError: the file cannot be read, is not YAML, holds an unknown key or a value of a wrong type, or
            there is no such preset.
    """
    config, problems = read_config(path, preset=preset, run=RLConfig)
    raise_together(problems)
    if path is not None and preset is not None:
        tell_overridden(preset, config, path)
    return config


def read_config(
    path: Path | str | None, *, preset: str | None = None, extension: str | None = None, run: type[Run]
) -> tuple[Run, list[ConfigurationError]]:
    """`load_config` for any run, as far as the file can be read: what it says wrongly keeps its default, and why is
    listed.

    `extension`: the user's file with algorithms, in place of the one that the file names.

    Raises:
        ConfigurationError: the file cannot be read, is not YAML, or there is no such preset.
    """
    if path is None:
        return _structured(run, None, preset, extension)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text, or no path"
        raise ConfigurationError(f"The configuration file {path} cannot be read ({reason}): check --config.") from error
    with foreign_code(lambda words: ConfigurationError(f"The configuration file {path} cannot be used: {words}")):
        try:
            data = yaml.load(text, Loader=_OnceLoader)
        except yaml.YAMLError as error:
            where = getattr(error, "problem_mark", None)
            line = f" at line {where.line + 1}" if where else ""
            raise ConfigurationError(f"The configuration file {path} is not YAML{line}: correct it.") from error
        hide(secrets_of_settings(data))
        return _structured(run, data, preset, extension)


_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""The faster one, where PyYAML was built with libyaml."""


class _OnceLoader(yaml.SafeLoader):
    """Reads plain values; a key that a mapping has twice is an error, where YAML's own loaders drop the first."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Returns the mapping.

        Raises:
            ConfigurationError: it has a key twice.
        """
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = getattr(key_node, "value", None), key_node.start_mark.line + 1
            if key != "<<" and isinstance(key, str) and key in seen:
                raise ConfigurationError(
                    f"The configuration has {key!r} at line {seen[key]} and again at line {line}, where only one would "
                    "count: put its settings together."
                )
            seen[str(key)] = line
        return super().construct_mapping(node, deep)


def structure_config(data: Mapping[str, Any] | None, *, preset: str | None = None) -> RLConfig:
    """Builds a configuration from nested mappings, as YAML or JSON give them, over the settings of a preset (default:
    the one that `data` names); None is all defaults.

    Raises:
        ConfigurationError: an unknown key, preset, or a value of a wrong type.
    """
    config, problems = _structured(RLConfig, data, preset, None)
    raise_together(problems)
    return config


def structure_run(run: type[Run], data: Mapping[str, Any]) -> Run:
    """Builds the settings of any run from nested mappings; what they leave out keeps its default.

    Raises:
        ConfigurationError: an unknown key, or a value of a wrong type.
    """
    config, problems = _structured(run, data, None, None)
    raise_together(problems)
    return config


def forget_preset(config: attrs.AttrsInstance) -> None:
    """Unsets the preset of a run, where it has one."""
    if PRESET in setting_names(type(config)):
        attrgetter("algo")(config).preset = None


def tell_overridden(names: str, config: attrs.AttrsInstance, path: Path | str, flags: Collection[str] = ()) -> None:
    """Warns where a file's settings take the place of those of presets that were named beside it; `flags` are settings
    that were named, too, in which nobody is surprised."""
    with contextlib.suppress(ConfigurationError):  # no such preset, which is told elsewhere
        asked, _ = _structured(type(config), None, names, None)
        differ = [
            f"{name} {attrgetter(name)(config)}, not {attrgetter(name)(asked)}"
            for name in preset_settings(names)
            if name not in flags and attrgetter(name)(config) != attrgetter(name)(asked)
        ]
        if differ:
            import structlog

            structlog.get_logger(__name__).warning(
                "the file's settings take the place of the preset's: name those that you want as flags",
                preset=names,
                file=str(path),
                settings="; ".join(differ),
            )


def _structured(
    run: type[Run], data: Mapping[str, Any] | None, preset: str | None, extension: str | None
) -> tuple[Run, list[ConfigurationError]]:
    """Returns the configuration as far as it can be read, and what cannot be."""
    problems: list[ConfigurationError] = []
    if EXTENSION in setting_names(run):
        problems += load_extension_file(extension or _named(data, EXTENSION))
        run = with_brought(run)
    config = _section(run(), data, "", problems)
    names = preset or (attrgetter(PRESET)(config) if PRESET in setting_names(run) else None)
    if names is not None:
        try:
            settings = _nested(preset_settings(names))
        except ConfigurationError as error:
            problems.append(error)
        else:
            config = _section(run(), merged(settings, data if isinstance(data, Mapping) else {}), "", [])
        forget_preset(config)
    return config, problems


def load_extension_file(path: Any) -> list[ConfigurationError]:
    """Runs the file with the user's algorithms, if one is named; returns why it cannot be."""
    if isinstance(path, str):
        from rollgrad.adapters.system.python_file import load_python

        try:
            load_python(path, flag=f"--{EXTENSION}")
        except ConfigurationError as error:
            return [error]
    return []


def _named(data: Any, name: str) -> Any:
    """Returns what nested mappings hold under a dotted name; None where there is nothing."""
    for key in name.split("."):
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by dotted names as nested mappings."""
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, key = name.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[key] = value
    return tree


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merges `above` over `below`, section by section; a section without lines is None."""
    result = dict(below)
    for key, value in above.items():
        inner: Any = result.get(key)
        section: Any = {} if value is None else value
        merge = isinstance(inner, Mapping) and isinstance(section, Mapping)
        result[key] = merged(inner, section) if merge else value
    return result


def dump_config(config: attrs.AttrsInstance) -> str:
    """Returns every setting of a run as YAML."""
    return yaml_text(settings_tree(config))


def yaml_text(value: Any) -> str:
    """Returns nested mappings and lists as YAML, in their order."""
    # Escaped beyond ASCII: unescaped, U+0085 would read back as a space.
    try:
        text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False)
    except UnicodeEncodeError:  # libyaml cannot escape a path of a command line whose bytes are no UTF-8
        text = yaml.safe_dump(value, sort_keys=False)
    return text


def settings_tree(config: attrs.AttrsInstance) -> dict[str, Any]:
    """Returns every setting of a run as nested mappings, lists and plain values: what YAML would read back."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, StrEnum):  # in the place of a text, such as a name of one's own
            return value.value
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    tree: dict[str, Any] = plain(CONVERTER.unstructure(config))
    return tree


def changed_settings(run: attrs.AttrsInstance) -> dict[str, Any]:
    """Returns the settings of a run that differ from the defaults, as `settings_tree` has them."""
    return _difference(settings_tree(run), settings_tree(type(run)()))


def setting_names(cls: type[attrs.AttrsInstance] = RLConfig, prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of all settings, e.g. `algo.advantage.estimator`."""
    for field in attrs.fields(cls):
        if attrs.has(field.type):
            yield from setting_names(field.type, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def _section(
    default: Config,
    data: Any,
    prefix: str,
    problems: list[ConfigurationError],
    known: Sequence[str] | None = None,
) -> Config:
    """Returns a section as far as it can be read.

    Args:
        default: what it is without data: the defaults of one class differ by the section that has it, such as the
            learning rates of actor and critic.
        known: names of all settings of the run; None where `default` is the run.
    """
    known = list(setting_names(type(default))) if known is None else known
    if data is None:  # a section whose lines are all comments
        return default
    if not isinstance(data, Mapping):
        where = prefix.rstrip(".") or "The configuration"
        problems.append(ConfigurationError(f"{where} is {data!r}, but it must be a section of `key: value` lines."))
        return default
    fields = {field.name: field.type for field in attrs.fields(type(default))}
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if key not in fields:
            problems.append(ConfigurationError(unknown_key(name, value, known)))
            continue
        if attrs.has(fields[key]):
            values[key] = _section(getattr(default, key), value, f"{name}.", problems, known)
            continue
        try:
            values[key] = CONVERTER.structure(value, fields[key])
        except Exception:  # cattrs wraps what the hooks raise in groups of its own
            problems.append(ConfigurationError(f"{name} is {value!r}, but it must be {described(fields[key])}."))
    return attrs.evolve(default, **values)  # type: ignore[misc] # a class of attrs, which the bound does not say


def _difference(values: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if value != default[key]:
            section = isinstance(value, dict) and isinstance(default[key], dict)
            result[key] = _difference(value, default[key]) if section else value
    return result
