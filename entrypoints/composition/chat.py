"""From the settings `actor` and `data` to the tokenizer, and the template that writes and reads conversations."""

import re
from pathlib import Path
from typing import Any

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.models.torch.loading import load_tokenizer
from rollgrad.application.settings.sections.actor import ActorConfig
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.domain.errors import ConfigurationError

_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""Tags around a reply, which transformers adds to Jinja."""
BOOLEANS = {"true": True, "false": False}
"""Values on a command line that are booleans of a template, for `false` as a text would count as true there."""


def make_tokenizer(actor: ActorConfig, data: DataConfig) -> Any:
    """The actor's tokenizer, with the chat template of the run.

    Raises:
        CheckpointError: there is none.
        ConfigurationError: `data.chat_template` is no file and no template.
    """
    tokenizer = load_tokenizer(actor.model_name_or_path, flag="--actor.model_name_or_path")
    if data.chat_template is not None:
        tokenizer.chat_template = read_chat_template(data.chat_template)
    return tokenizer


def read_chat_template(value: str) -> str:
    """The template that `data.chat_template` is, or names.

    Raises:
        ConfigurationError: it is no file that can be read, or no Jinja template.
    """
    from jinja2 import Environment, TemplateSyntaxError

    text, where = value, "data.chat_template"
    if "{{" not in value and "{%" not in value:
        where = f"data.chat_template {value}"
        try:
            text = Path(value).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ConfigurationError(
                f"data.chat_template is {value!r}, which is no Jinja template and no file that can be read ({reason}): "
                "check --data.chat_template."
            ) from error
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", text))
    except TemplateSyntaxError as error:
        raise ConfigurationError(
            f"{where} is no Jinja template (line {error.lineno}: {error.message}): check --data.chat_template."
        ) from error
    return text


def make_codec(data: DataConfig, tokenizer: Any) -> TemplateCodec:
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
