"""Models on the Hugging Face hub. Does not own: what a model's directory holds."""

import os
from functools import cache
from pathlib import Path

import structlog

from rollgrad.application.foreign import first_line
from rollgrad.domain.errors import CheckpointError, ConfigurationError

HUB_SECONDS = 10.0
"""Time for the hub's first answer. Without one, each file of a model or a dataset would be asked for again and again,
half a minute long, those in the local cache too."""

log = structlog.get_logger()


def find_model(name: str, *, flag: str) -> None:
    """Checks that a model of the hub can be read. Where the hub does not answer, this process and those that it starts
    read the local cache alone from then on.

    Raises:
        CheckpointError: the hub does not answer, and the model is not in the local cache; `flag` names it.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if constants.HF_HUB_OFFLINE:
        return
    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # no name of the hub, which loading reports
        return
    if hub_answers():
        return
    if not cached:
        raise CheckpointError(
            f"{flag} is {name!r}, which is neither a directory nor in the local cache of models, and the Hugging Face "
            "hub cannot be reached: check the name, or go online."
        )
    log.warning("The Hugging Face hub cannot be reached: models are read from the local cache", model=name)
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"  # of processes that are started later


@cache
def hub_answers() -> bool:
    """Returns whether the hub answers, which is asked once."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception:  # whatever the error is, the hub cannot be reached
        return False
    return True


def check_upload(repository: str) -> None:
    """Checks that this process may ask the hub for something in its user's name.

    Raises:
        ConfigurationError: there is no token, the hub is not to be asked, or takes no such name.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigurationError(
            f"ckpt.push_to_hub is {repository!r}, a name that the hub does not take: {first_line(error)}"
        ) from error
    if constants.HF_HUB_OFFLINE:
        raise ConfigurationError(
            f"ckpt.push_to_hub is {repository!r}, but HF_HUB_OFFLINE says that the hub is not to be asked: unset it, "
            "or leave --ckpt.push_to_hub out."
        )
    if get_token() is None:
        raise ConfigurationError(
            f"ckpt.push_to_hub is {repository!r}, but there is no token for the hub: set HF_TOKEN, or log in once "
            "(hf auth login)."
        )


def upload_model(model: Path, repository: str) -> str:
    """Puts the files of a model's directory into a repository of the hub, as one commit, with the token of HF_TOKEN or
    `hf auth login`. A repository that is not there is made, and is private. Returns the address of the commit.

    Raises:
        Exception: of many kinds: no network, no right to write there, a file that the hub refuses.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    hub.create_repo(repository, private=True, exist_ok=True)
    commit = hub.upload_folder(
        repo_id=repository, folder_path=model, commit_message="Upload model trained with rollgrad"
    )
    return str(commit.commit_url)
