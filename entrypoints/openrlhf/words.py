"""Finds the program that an OpenRLHF command starts."""

import re
from collections.abc import Sequence

from attrs import frozen

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.translation.words import launcher_number, shell_words

TRAINER = "train_ppo_ray"
SERVER = "serve_rm"
COMBINER = "lora_combiner"
INFERENCE = "batch_inference"

MODULE = re.compile(r"(?:^|.*/)openrlhf[./]cli[./](\w+?)(?:\.py)?$")


@frozen
class Command:
    """An OpenRLHF command."""

    flags: list[str]
    """The words that follow the module's name."""
    module: str = TRAINER
    """The module of `openrlhf.cli`."""
    submitted: bool = False
    """Whether `ray job submit` sends it to a running cluster."""
    processes: int | None = None
    """Processes on each machine that its launcher is told to start."""
    machines: int = 1
    """Machines that its launcher is told to use."""


PROCESSES = ("num_gpus", "nproc_per_node")
MACHINES = ("num_nodes", "nnodes")
"""Flags of the launchers deepspeed and torchrun."""


def read_command(argv: Sequence[str]) -> Command:
    """Returns the command of the given words; a single word is split as by a shell.

    Raises:
        ConfigurationError: the command cannot be translated.
    """
    words = shell_words(argv)
    for index, word in enumerate(words):
        match = MODULE.match(word)
        if match is None:
            continue
        launcher = words[:index]
        return Command(
            words[index + 1 :],
            module=match[1],
            submitted=launcher[:3] == ["ray", "job", "submit"],
            processes=launcher_number(launcher, PROCESSES),
            machines=launcher_number(launcher, MACHINES) or 1,
        )
    if words and words[0].startswith("--"):
        return Command(words)
    raise ConfigurationError(
        f"The command names no module of OpenRLHF: write rollgrad openrlhf python3 -m openrlhf.cli.{TRAINER} --flag "
        "value ..."
    )
