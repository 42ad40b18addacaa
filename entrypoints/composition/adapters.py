"""Checks of models and of adapters, before models are loaded."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from rollgrad.adapters.checkpoints.weight_files import has_weights
from rollgrad.adapters.models.torch.loading.loading import refuse_classifier
from rollgrad.adapters.models.torch.planning.shape import model_shape
from rollgrad.application.settings.rm import RMRun
from rollgrad.application.settings.sections.actor import ALL_LINEAR
from rollgrad.domain.errors import CheckpointError, ConfigurationError, RollgradError, raise_together
from rollgrad.entrypoints.run_directory import MODEL_SECTIONS


def check_writer(config: Any) -> None:
    """Checks that the actor of a run of any kind writes texts; that of `train rm` may be a reward model, which learns
    on.

    Raises:
        CheckpointError: it judges them.
    """
    if config.actor.model_name_or_path and not isinstance(config, RMRun):
        refuse_classifier(config.actor.model_name_or_path, "--actor.model_name_or_path")


def check_weights(config: Any) -> None:
    """Checks that the models of a run of any kind have weights, before processes of a cluster are started.

    Raises:
        CheckpointError, ManyProblemsError: some have not.
    """
    raise_together([CheckpointError(sentence) for sentence in without_weights(config)])


def without_weights(config: Any) -> list[str]:
    """Returns a sentence for each model of a run of any kind that is a directory without weights, such as one of which
    only the settings and the tokenizer were copied: they are enough for a dry run alone."""
    named = {key: getattr(getattr(config, key, None), "model_name_or_path", None) for key in MODEL_SECTIONS}
    return [
        f"{key}.model_name_or_path is {name!r}, which holds no weights (*.safetensors): copy them there."
        for key, name in named.items()
        if name and Path(name).expanduser().is_dir() and not has_weights(Path(name).expanduser())
    ]


def check_adapters(config: Any) -> None:
    """Checks that the models of a run of any kind have the layers that `target_modules` names, from their
    configurations alone.

    Raises:
        ConfigurationError, ManyProblemsError: they do not.
    """
    problems: list[RollgradError] = []
    for key in ("actor", "critic"):
        section: Any = getattr(config, key, None)
        lora = getattr(section, "lora", None)
        if lora is None or not lora.rank or lora.target_modules == ALL_LINEAR:
            continue
        name = section.model_name_or_path or config.actor.model_name_or_path
        try:
            with suppress(CheckpointError):  # the error is raised again when the model is loaded
                model_shape(f"{key}.model_name_or_path", name, lora)
        except ConfigurationError as error:
            problems.append(error)
    raise_together(problems)
