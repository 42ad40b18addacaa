"""Description of a run: its settings, the versions of packages, and fingerprints of its models and data.

It is in `config.yaml` and in every training state, without secrets. On `ckpt.resume` it decides whether the run may
continue (`application.settings.rules.resume`).
"""

import hashlib
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import structlog
from attrs import AttrsInstance

from rollgrad.adapters.checkpoints.fingerprint import model_fingerprint
from rollgrad.adapters.data.datasets.survey import Surveyed
from rollgrad.adapters.system.python_file import module_file
from rollgrad.application.settings.brought import with_brought
from rollgrad.application.settings.function_path import FunctionPath, is_module_name, several
from rollgrad.application.settings.rules.resume import CODE, MODELS, TEXTS, changed_code, changes, refusals
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import CheckpointError, ConfigurationError, raise_together
from rollgrad.entrypoints.config_io import setting_names, settings_tree, yaml_text
from rollgrad.entrypoints.redaction import HIDDEN, is_secret_name, known_secrets, redact
from rollgrad.entrypoints.run_record import versions

log = structlog.get_logger(__name__)

COMPUTING = ("torch", "transformers", "vllm", "deepspeed")
"""Packages whose versions may affect the results of a run."""

Description = dict[str, Any]


def describe(config: RLConfig, prompts: Any) -> Description:
    """Returns the description of a run on `prompts`; JSON-serialisable."""
    return describe_run(config, prompts.survey.fingerprint if isinstance(prompts, Surveyed) else None)


def describe_run(config: AttrsInstance, fingerprint: str | None, date: str | None = None) -> Description:
    """Returns the description of any run on data with this fingerprint, in which a chat template wrote `date`;
    JSON-serialisable."""
    settings = flat_settings(config)
    return {
        "trainer": trainer_name(type(config)),
        "settings": settings,
        "versions": versions(COMPUTING),
        "models": {name: model_fingerprint(settings[name]) for name in MODELS if settings.get(name)},
        "files": {name: _held(name, settings[name]) for name in (*CODE, *TEXTS) if settings.get(name)},
        "data": fingerprint,
        "date": date,
    }


def trainer_name(run: type[AttrsInstance]) -> str:
    """Returns the name of the trainer whose settings a class holds, as `rollgrad train` has it.

    >>> trainer_name(RLConfig)
    'rl'
    """
    return run.__name__.removesuffix("Run").removesuffix("Config").lower()


def flat_settings(config: AttrsInstance) -> dict[str, Any]:
    """Returns every setting by its dotted name, without secrets, as JSON has it."""
    settings = public_settings(config)
    return {name: reduce(getitem, name.split("."), settings) for name in setting_names(type(config))}


def settings_file(config: AttrsInstance) -> str:
    """Returns the settings as YAML, without secrets, below the versions as a comment."""
    computed_by = ", ".join(f"{name} {version}" for name, version in versions(COMPUTING).items())
    return f"# {computed_by}\n{yaml_text(public_settings(config))}"


def check_continues(begun: Mapping[str, Any] | None, now: Description, run: type[AttrsInstance] = RLConfig) -> None:
    """Checks that a run continues with the settings it began with, and reports changes. `run`: class of its settings.

    Raises:
        CheckpointError: a setting differs that must not; one sentence for each.
    """
    if begun is None:
        log.warning("the training state does not say which run it is of: nothing is compared")
        return
    defaults = flat_settings(with_brought(run)())
    try:
        raise_together([CheckpointError(sentence) for sentence in refusals(begun, now, defaults)])
        changed = changes(begun, now, defaults)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"The training state's description has other parts than a run's ({type(error).__name__}: {error}): "
            "continue with the version of rollgrad that wrote it."
        ) from error
    if begun.get("date") != now.get("date"):
        log.warning(
            "the chat template writes the date: the examples have today's, not that of the run's beginning",
            began=begun.get("date"),
            now=now.get("date"),
        )
    if other := changed_code(begun, now):
        log.warning(
            "the run continues with files of another content than it began with: its results are those of both",
            **{name.replace(".", "_"): now["settings"][name] for name in other},
        )
    if changed:
        log.info("the run continues with changes", **{name.replace(".", "_"): text for name, text in changed.items()})


def _held(name: str, value: str) -> str:
    """Returns the sha256 of what a setting of files names; what is neither file nor module stands for itself."""
    held = hashlib.sha256()
    for part in several(value) if name in CODE else [value]:
        place = FunctionPath.parse(part) if name in CODE else FunctionPath(part)
        try:
            content = (_file(place.file) if name in CODE else Path(place.file).expanduser()).read_bytes()
        except (OSError, ValueError):  # a text may be too long for a name, or have a zero in it
            content = place.file.encode()
        held.update(hashlib.sha256(content).digest() + f"{place.name}".encode())
    return held.hexdigest()


def _file(place: str) -> Path:
    """Returns the file of a user's code, which may be named as a module; no code is run to find it."""
    found = module_file(place) if is_module_name(place) else None
    return Path(place).expanduser() if found is None else found


def code_fingerprint(path: str, *, flag: str) -> str:
    """Returns the sha256 of the file of a user's function, which `flag` names and which may be a module's.

    Raises:
        ConfigurationError: there is no such file or module, or it cannot be read.
    """
    place = FunctionPath.parse(path).file
    try:
        return hashlib.sha256(_file(place).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigurationError(
            f"{flag} is {path!r}, but {error.strerror or error}: name a file (.py), or a module that Python finds from "
            "here (see PYTHONPATH)."
        ) from error


def reward_fingerprint(paths: str | None) -> str | None:
    """Returns the fingerprint of the code of reward functions, None without any."""
    return " ".join(code_fingerprint(path, flag="--reward.function_path") for path in several(paths)) or None


def public_settings(config: AttrsInstance) -> Any:
    """Returns the settings as nested mappings, without secrets."""
    secrets = known_secrets()

    def public(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: public(item, str(key)) for key, item in value.items()}
        if isinstance(value, list):
            return [public(item, name) for item in value]
        if not isinstance(value, str):
            return value
        return HIDDEN if is_secret_name(name) else redact(value, secrets)

    return public(settings_tree(config), "")
