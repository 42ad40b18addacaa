"""Models on the Hugging Face hub. Does not own: what a model's directory holds."""

from pathlib import Path

from rollgrad.domain.errors import ConfigurationError


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
            f"ckpt.push_to_hub is {repository!r}, a name that the hub does not take: {str(error).splitlines()[0]}"
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
