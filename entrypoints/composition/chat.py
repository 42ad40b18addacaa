"""Makes the tokenizer and the chat codec from the settings `actor` and `data`."""

from collections.abc import Mapping
from typing import Any

from rollgrad.adapters.chat.pictures import ImageRenderer, load_processor
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.chat.template_file import read_chat_template
from rollgrad.adapters.models.torch.loading.loading import load_tokenizer
from rollgrad.application.settings.sections.actor import ModelConfig
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.application.settings.sections.examples import RowsConfig
from rollgrad.domain.errors import ConfigurationError

BOOLEANS = {"true": True, "false": False}
"""Booleans of a template, as written on a command line; in a template the text `false` would count as true."""


def make_tokenizer(actor: ModelConfig, data: DataConfig | RowsConfig) -> Any:
    """Returns the actor's tokenizer, with the chat template of the run.

    Raises:
        CheckpointError: there is none.
        ConfigurationError: `data.chat_template` is no file and no template.
    """
    tokenizer = load_tokenizer(actor.model_name_or_path, flag="--actor.model_name_or_path")
    if data.chat_template is not None:
        tokenizer.chat_template = read_chat_template(data.chat_template)
    return tokenizer


def make_image_renderer(actor: ModelConfig, data: DataConfig | RowsConfig, tokenizer: Any) -> ImageRenderer | None:
    """Returns what renders the images of prompts by the actor's processor; None for a run without images.

    Raises:
        CheckpointError: the actor has no processor.
    """
    if data.image_key is None:
        return None
    flag = "--actor.model_name_or_path"
    return ImageRenderer(load_processor(actor.model_name_or_path, tokenizer, flag=flag))


def make_codec(data: DataConfig | RowsConfig, tokenizer: Any, images: ImageRenderer | None = None) -> TemplateCodec:
    """Returns the codec that writes and parses the run's conversations; `images` renders images in them.

    Raises:
        ConfigurationError: the template has no variable of a name in `data.chat_template_kwargs`.
    """
    return TemplateCodec(tokenizer, template_values(data.chat_template_kwargs, tokenizer), images)


def template_values(
    given: Mapping[str, bool | int | float | str] | None, tokenizer: Any, setting: str = "data.chat_template_kwargs"
) -> dict[str, bool | int | float | str]:
    """Returns the values of a template's variables, as `setting` gives them.

    Raises:
        ConfigurationError: the template has no variable of a name.
    """
    given = given or {}
    unknown = [name for name in given if name not in str(tokenizer.chat_template)]
    if unknown:
        raise ConfigurationError(
            f"{setting} sets {', '.join(unknown)}, which the chat template does not read: check the name, or leave it "
            f"out of --{setting}."
        )
    return {
        name: BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value for name, value in given.items()
    }
