"""Translates OpenRLHF command lines to rollgrad's settings.

Flags with a counterpart of the same meaning, and those without one, are in `entrypoints.names.names_of_openrlhf`; flags
that depend on each other are translated by `algorithm`, `run`, `checkpoints` and `cluster`. OpenRLHF's defaults are
applied, because they differ from ours. Importable without torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from attrs import frozen

from rollgrad.application.settings.rules import validate
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.config_io import dump_config, structure_config
from rollgrad.entrypoints.names.names_of_openrlhf import FLAGS
from rollgrad.entrypoints.openrlhf.algorithm import translate_algorithm
from rollgrad.entrypoints.openrlhf.checkpoints import translate_checkpoints
from rollgrad.entrypoints.openrlhf.cluster import translate_cluster
from rollgrad.entrypoints.openrlhf.draft import Draft
from rollgrad.entrypoints.openrlhf.run import translate_run
from rollgrad.entrypoints.openrlhf.serve import ServerTranslation, translate_server
from rollgrad.entrypoints.openrlhf.words import SERVER, TRAINER, options, parse, read_command

USAGE = """usage: rollgrad openrlhf [--run] COMMAND...

Translates an OpenRLHF command (python3 -m openrlhf.cli.train_ppo_ray --flag value ..., flat or dotted flags, ray job
submit and deepspeed included) to settings, and prints those that differ from the defaults as YAML for
rollgrad train rl --config. What has no counterpart, or not the same one, is listed on stderr.

A command of openrlhf.cli.serve_rm becomes one of rollgrad serve reward, which is printed.

  --run   train, or serve, instead of printing
"""


def translate_command(argv: Sequence[str]) -> tuple[RLConfig, list[str]] | ServerTranslation:
    """Returns the configuration of an OpenRLHF command and notes about it; for its reward server, the command here.

    Raises:
        ConfigurationError: `translate` refuses the command.
    """
    command = read_command(argv)
    return translate_server(parse(command.flags)) if command.module == SERVER else translated_config(argv)


@frozen
class Translation:
    """Translation of a command. `settings`: nested, for `structure_config`. `notes`: one line for each flag without an
    identical counterpart."""

    settings: dict[str, Any]
    notes: list[str]


def translate(argv: Sequence[str]) -> Translation:
    """Translates an OpenRLHF command.

    Raises:
        ConfigurationError: it is not a `train_ppo_ray` command, or OpenRLHF has no such flag or value.
    """
    command = read_command(argv)
    if command.module != TRAINER:
        raise ConfigurationError(f"openrlhf.cli.{command.module} trains nothing: translate openrlhf.cli.{TRAINER}.")
    draft = Draft(options(parse(command.flags)), submitted=command.submitted)
    for name in draft.options:
        reason = FLAGS[name].reason
        if draft.asks(name) and reason is not None:
            draft.lose(name, reason)
    for name, flag in FLAGS.items():
        if flag.to is not None and name in draft.options and not name.startswith("critic."):
            draft.set(flag.to, draft.value(name))
    translate_checkpoints(draft)
    translate_algorithm(draft)
    translate_run(draft)
    translate_cluster(draft)
    lost = [f"not honoured: {line}" for line in dict.fromkeys(draft.lost)]
    return Translation(draft.settings, [*lost, *(f"not identical: {line}" for line in dict.fromkeys(draft.changed))])


def translated_config(argv: Sequence[str]) -> tuple[RLConfig, list[str]]:
    """Returns the configuration of an OpenRLHF command, and notes about it.

    Raises:
        ConfigurationError: `translate` refuses the command.
    """
    translation = translate(argv)
    return structure_config(translation.settings), translation.notes


def changed_settings(config: RLConfig) -> str:
    """Returns the settings that differ from the defaults, as YAML."""
    changed = _difference(yaml.safe_load(dump_config(config)), yaml.safe_load(dump_config(RLConfig())))
    text: str = yaml.safe_dump(changed, sort_keys=False)
    return text


def check(config: RLConfig) -> str | None:
    """Returns the problems for which `rollgrad train rl` would refuse the configuration; None if there are none."""
    try:
        validate(config)
    except ConfigurationError as error:
        return str(error)
    return None


def _difference(values: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if value != default[key]:
            section = isinstance(value, dict) and isinstance(default[key], dict)
            result[key] = _difference(value, default[key]) if section else value
    return result
