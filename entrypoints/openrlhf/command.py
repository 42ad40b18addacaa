"""Translates OpenRLHF command lines to rollgrad's settings and commands.

Flags with a counterpart of the same meaning, and those without one, are in `names.names_of_openrlhf` and its
neighbours; flags that depend on each other are translated by `algorithm`, `run`, `shared` and `cluster`, of trainers
over examples by `examples`. OpenRLHF's defaults are applied, because they differ from ours. Importable without torch.
"""

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.config_io import structure_config
from rollgrad.entrypoints.names.names_of_openrlhf import FLAGS
from rollgrad.entrypoints.names.names_of_openrlhf import TRAINER as PROGRAM
from rollgrad.entrypoints.names.suggestions import OTHER_COMMANDS
from rollgrad.entrypoints.openrlhf.algorithm import translate_algorithm
from rollgrad.entrypoints.openrlhf.cluster import translate_cluster
from rollgrad.entrypoints.openrlhf.draft import RLDraft
from rollgrad.entrypoints.openrlhf.examples import TRAINERS, translate_trainer
from rollgrad.entrypoints.openrlhf.inference import translate_inference
from rollgrad.entrypoints.openrlhf.merge import translate_combiner
from rollgrad.entrypoints.openrlhf.run import translate_images, translate_run
from rollgrad.entrypoints.openrlhf.serve import translate_server
from rollgrad.entrypoints.openrlhf.shared import translate_checkpoints
from rollgrad.entrypoints.openrlhf.words import COMBINER, INFERENCE, SERVER, TRAINER, Command, read_command
from rollgrad.entrypoints.translation.draft import TranslatedCommand, TranslatedRun
from rollgrad.entrypoints.translation.words import options, parse

USAGE = """usage: rollgrad openrlhf [--run] COMMAND...

Translates an OpenRLHF command (python3 -m openrlhf.cli.train_ppo_ray --flag value ..., flat or dotted flags, ray job
submit, deepspeed and torchrun included) to settings, and prints those that differ from the defaults as YAML. What has
no counterpart, or not the same one, is listed on stderr.

  train_ppo_ray  rollgrad train rl
  train_NAME     rollgrad train NAME: sft, dpo, rm, prm, kto, kd
  serve_rm, batch_inference, lora_combiner
                 commands of rollgrad serve reward, generate or score, and merge-lora, which are printed

  --run   train, or run the command, instead of printing
"""


def translate_command(argv: Sequence[str]) -> TranslatedRun | TranslatedCommand:
    """Returns the run of an OpenRLHF command, or for a program that trains nothing the command here, with notes.

    Raises:
        ConfigurationError: the command cannot be translated.
    """
    command = read_command(argv)
    if command.module == TRAINER:
        config, notes = translated_config(argv)
        return TranslatedRun("train rl", config, notes)
    if command.module == SERVER:
        return translate_server(command.flags)
    if command.module == INFERENCE:
        return translate_inference(command.flags)
    if command.module == COMBINER:
        return translate_combiner(command.flags)
    _check_module(command, *TRAINERS)
    return translate_trainer(command)


def _check_module(command: Command, *modules: str) -> None:
    """Refuses a command of another module.

    Raises:
        ConfigurationError: it is one.
    """
    if command.module in modules:
        return
    known = (TRAINER, *TRAINERS, SERVER, INFERENCE, COMBINER)
    ours = OTHER_COMMANDS.get(command.module.removeprefix("train_"), "run this step with OpenRLHF.")
    raise ConfigurationError(
        f"openrlhf.cli.{command.module} is not translated (the commands that are: {', '.join(known)}): {ours}"
    )


@frozen
class Translation:
    """Translation of a command. `settings`: nested, for `structure_config`. `notes`: one line for each flag without an
    identical counterpart."""

    settings: dict[str, Any]
    notes: list[str]


def translate(argv: Sequence[str]) -> Translation:
    """Translates a command of OpenRLHF's trainer by reinforcement learning.

    Raises:
        ConfigurationError: it is not a `train_ppo_ray` command, or OpenRLHF has no such flag or value.
    """
    command = read_command(argv)
    if command.module != TRAINER:
        raise ConfigurationError(
            f"openrlhf.cli.{command.module} does not train by reinforcement learning: translate openrlhf.cli.{TRAINER}."
        )
    draft = RLDraft(program=PROGRAM, options=options(PROGRAM, parse(command.flags)), submitted=command.submitted)
    for name in dict.fromkeys((*draft.options, *FLAGS)):
        if FLAGS[name].reason is not None or not name.startswith("critic."):
            draft.follow(name)
    translate_checkpoints(draft)
    translate_algorithm(draft)
    translate_run(draft)
    translate_cluster(draft)
    translate_images(draft)
    return Translation(draft.settings, draft.notes)


def translated_config(argv: Sequence[str]) -> tuple[RLConfig, list[str]]:
    """Returns the configuration of an OpenRLHF command, and notes about it.

    Raises:
        ConfigurationError: `translate` refuses the command.
    """
    translation = translate(argv)
    return structure_config(translation.settings), translation.notes
