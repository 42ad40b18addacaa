"""Translates command lines of verl to rollgrad's settings.

Settings with a counterpart of the same meaning, and those without one, are in `names.names_of_verl` and
`names.names_of_verl_commands`. Settings that depend on each other are translated by `algorithm`, `run` and `cluster`,
and for supervised fine-tuning by `sft`. verl's defaults are applied, because they differ from ours. Importable without
torch.
"""

from collections.abc import Sequence

from rollgrad.application.settings.run import RLConfig
from rollgrad.entrypoints.config_io import structure_run
from rollgrad.entrypoints.names.names_of_verl_asynchronous import FULLY_ASYNC, ONE_STEP_OFF
from rollgrad.entrypoints.names.names_of_verl_commands import AS_ACTOR, PPO
from rollgrad.entrypoints.translation.draft import TranslatedRun
from rollgrad.entrypoints.verl import words
from rollgrad.entrypoints.verl.algorithm import translate_algorithm
from rollgrad.entrypoints.verl.cluster import translate_cluster
from rollgrad.entrypoints.verl.distillation import translate_distillation
from rollgrad.entrypoints.verl.draft import RLDraft, read_draft
from rollgrad.entrypoints.verl.run import translate_run
from rollgrad.entrypoints.verl.sft import translate_sft
from rollgrad.entrypoints.verl.words import SFT, Command, read_command

PROGRAMS = {words.ONE_STEP_OFF: ONE_STEP_OFF, words.FULLY_ASYNC: FULLY_ASYNC}
"""Trainers by reinforcement learning with settings of their own."""

USAGE = """usage: rollgrad verl [--run] COMMAND...

Translates a command of verl (python3 -m verl.trainer.main_ppo key=value ..., those of one_step_off_policy,
fully_async_policy and the recipe DAPO, and verl.trainer.sft_trainer or fsdp_sft_trainer, with ray job submit or
torchrun in front of them or not) to settings of rollgrad train rl or sft, and prints those that differ from the
defaults as YAML. What has no counterpart, or not the same one, is listed on stderr. A file of --config-path and
--config-name is read as verl does.

  --run   train instead of printing
"""


def translate_command(argv: Sequence[str]) -> TranslatedRun:
    """Returns the run of a command of verl, with notes.

    Raises:
        ConfigurationError: it cannot be translated.
    """
    command = read_command(argv)
    return translate_sft(command) if command.module in SFT else _translate_rl(command)


def _translate_rl(command: Command) -> TranslatedRun:
    draft = read_draft(RLDraft, command, PROGRAMS.get(command.module, PPO))
    draft.module = command.module
    for name, same in AS_ACTOR.items():
        pair = [draft.options.get(key) for key in (name, same)]
        if all(pair) and len({given.values for given in pair if given}) == 1:
            del draft.options[name]
    for name in dict.fromkeys((*draft.options, *draft.program.flags)):
        draft.follow(name)
    translate_algorithm(draft)
    translate_distillation(draft)
    translate_run(draft)
    translate_cluster(draft)
    return TranslatedRun("train rl", structure_run(RLConfig, draft.settings), draft.notes)
