"""Finds TRL's command in the line that starts one of TRL's own scripts."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.names.names_of_trl_commands import COMMANDS
from rollgrad.entrypoints.translation.words import launcher_number

LAUNCHERS = ("accelerate", "python", "python3", "torchrun", "deepspeed", "uv")
"""Programs that scripts are started with."""

SCRIPT = re.compile(r".+\.py|trl\.scripts\.\w+")
"""A script, or a module of TRL's."""

SCRIPTS: Mapping[str, str] = {
    **{name: name for name in COMMANDS},
    "dpo_vlm": "dpo",
    "reward_modeling": "reward",
    **dict.fromkeys(("gspo", "grpo_vlm", "gspo_vlm", "grpo_agent"), "grpo"),
}
"""Commands by the names of TRL's scripts that take the same flags."""


def launched(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Returns the words of TRL's command that a command line stands for, and the script that it starts, if that does
    more than the command.

    >>> launched(["accelerate", "launch", "--num_processes", "2", "trl/scripts/dpo.py", "--beta", "0.1"])
    (['dpo', '--num_processes', '2', '--beta', '0.1'], None)
    >>> launched(["python", "examples/scripts/gspo.py"])
    (['grpo'], 'examples/scripts/gspo.py')

    Raises:
        ConfigurationError: a script is started that is none of TRL's.
    """
    words = list(argv)
    place = next((place for place, word in enumerate(words) if SCRIPT.fullmatch(word)), None)
    if place is None or (place and words[0] not in LAUNCHERS):
        return words, None
    launcher, script = words[:place], words[place]
    name = script.rpartition(".")[2] if script.startswith("trl.") else Path(script).stem
    if name not in SCRIPTS:
        raise ConfigurationError(
            f"{script} is no script of TRL's, so that what it does is not known: write rollgrad trl with one of "
            f"{', '.join(COMMANDS)}, and its flags (docs/migration.md, Scripts of TRL)."
        )
    return [SCRIPTS[name], *_processes(launcher), *words[place + 1 :]], None if name in COMMANDS else script


def _processes(launcher: Sequence[str]) -> list[str]:
    """Returns what a launcher says about processes, as flags of TRL's commands."""
    count = launcher_number(launcher, ("num_processes",))
    if count is None and (each := launcher_number(launcher, ("nproc_per_node", "num_gpus"))) is not None:
        count = each * (launcher_number(launcher, ("nnodes", "num_nodes")) or 1)
    if count is not None:
        return ["--num_processes", str(count)]
    file = next((after for word, after in pairwise(launcher) if word == "--config_file"), None)
    return [] if file is None else ["--accelerate_config", file]
