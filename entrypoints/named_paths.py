"""Checks that the models, datasets, files and directories that settings name are there, before anything is loaded.

Does not own: what is in them. Importable without torch.
"""

import os
from pathlib import Path

from rollgrad.adapters.checkpoints.hub import find_model
from rollgrad.adapters.checkpoints.weight_files import weights_problem
from rollgrad.adapters.data.datasets.files import check_address, data_files, file_format, is_pattern
from rollgrad.application.settings.function_path import FunctionPath, is_module_name, several
from rollgrad.application.settings.rules.inputs import REASONING_GYM
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import CheckpointError, ConfigurationError, DataError, raise_together


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~"))


def check_model(key: str, name: str | None) -> None:
    """Checks a model.

    Raises:
        CheckpointError: there is none of this name.
    """
    if not name:
        return
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{key} is {name!r}, {_no_model(key, path)}")
        if problem := weights_problem(path):  # before rows are prepared, and processes of a cluster started
            raise CheckpointError(f"{key} is {name!r}, {problem}.")
    elif path.exists() or _is_path(name) or name.count("/") > 1:  # names of the hub have one
        of_model = path.is_file() and (path.parent / "config.json").is_file()
        hint = f"did you mean --{key} {path.parent}?" if of_model else f"name a model with --{key}."
        raise CheckpointError(f"{key} is {name!r}, which is no directory: {hint}")
    else:
        find_model(name, flag=f"--{key}")


def _no_model(key: str, directory: Path) -> str:
    """Returns what a directory without config.json is, as the end of a sentence with its remedy."""
    near = [directory / "model"]  # of a run's directory
    what, remedy = "a directory without config.json", f"name a model with --{key}."
    if (directory / "adapter_config.json").is_file():
        near, what = [directory.parent], "which holds adapters to a model and not the model"  # as rollgrad saves them
        remedy = f"merge them by rollgrad merge-lora --adapter {directory}, and name what that writes."
    found = next((place for place in near if (place / "config.json").is_file()), None)
    return f"{what}: {remedy if found is None else f'did you mean --{key} {found}?'}"


def check_dataset(key: str, name: str) -> None:
    """Checks a dataset.

    Raises:
        DataError: there is no such file or folder, or a pattern does not fit the files.
    """
    if name.startswith(REASONING_GYM):
        return
    check_address(name)
    if is_pattern(name):
        data_files(name)
        return
    is_file_name = file_format(Path(name)) is not None
    folder = name.rpartition(":")[0]  # with a configuration
    if (is_file_name or _is_path(name)) and not Path(name).exists() and not (folder and Path(folder).is_dir()):
        raise DataError(f"{key} is {name!r}, which does not exist: check --{key}.")


def check_reward_file(config: RLConfig) -> None:
    """Checks the files of a reward; a module is looked for when it is imported.

    Raises:
        ConfigurationError: one is missing.
    """
    code = [FunctionPath.parse(path).file for path in several(config.reward.function_path)]
    judge = config.reward.judge_prompt
    named = [("function_path", file) for file in code if not is_module_name(file)]
    named += [] if judge is None else [("judge_prompt", judge)]
    problems = [
        f"reward.{key} is {file!r}, which is no file: check --reward.{key}."
        for key, file in named
        if not Path(file).is_file()
    ]
    raise_together([ConfigurationError(problem) for problem in problems])


def check_written(key: str, name: str | None) -> None:
    """Checks a directory that is to be written, and may have to be made.

    Raises:
        CheckpointError: it cannot.
    """
    if not name:
        return
    path = Path(name).absolute()
    existing = next(candidate for candidate in (path, *path.parents) if candidate.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise CheckpointError(f"{key} is {name!r}, but {existing} is no directory that can be written: set --{key}.")
