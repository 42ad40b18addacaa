"""From the settings `actor` and `data` to the tokenizer, and the template that writes and reads conversations."""

from typing import Any

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.chat.template_file import read_chat_template
from rollgrad.adapters.models.torch.loading import load_tokenizer
from rollgrad.application.settings.sections.actor import ModelConfig
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.application.settings.sections.examples import RowsConfig
from rollgrad.domain.errors import ConfigurationError

BOOLEANS = {"true": True, "false": False}
"""Values on a command line that are booleans of a template, for `false` as a text would count as true there."""


def make_tokenizer(actor: ModelConfig, data: DataConfig | RowsConfig) -> Any:
    """The actor's tokenizer, with the chat template of the run.

    Raises:
        CheckpointError: there is none.
        ConfigurationError: `data.chat_template` is no file and no template.
    """
    tokenizer = load_tokenizer(actor.model_name_or_path, flag="--actor.model_name_or_path")
    if data.chat_template is not None:
        tokenizer.chat_template = read_chat_template(data.chat_template)
    return tokenizer


def make_codec(data: DataConfig | RowsConfig, tokenizer: Any) -> TemplateCodec:
    """Writes and reads the conversations of the run.

    Raises:
        ConfigurationError: the template has no variable of a name in `data.chat_template_kwargs`.
    """
    given = data.chat_template_kwargs or {}
    unknown = [name for name in given if name not in str(tokenizer.chat_template)]
    if unknown:
        raise ConfigurationError(
            f"data.chat_template_kwargs sets {', '.join(unknown)}, which the chat template does not read: check the "
            "name, or leave it out of --data.chat_template_kwargs."
        )
    values = {
        name: BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value for name, value in given.items()
    }
    return TemplateCodec(tokenizer, values)
