"""A chat template that a user names, checked before anything is rendered with it."""

import re
from pathlib import Path

from jinja2 import Environment, TemplateSyntaxError

from rollgrad.domain.errors import ConfigurationError

_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""Tags around a reply, which transformers adds to Jinja."""


def read_chat_template(value: str) -> str:
    """Returns the template that `data.chat_template` is, or names.

    Raises:
        ConfigurationError: it is no file that can be read, or no Jinja template.
    """
    text, where = value, "data.chat_template"
    if "{{" not in value and "{%" not in value:
        where = f"data.chat_template {value}"
        try:
            text = Path(value).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # such as bytes that are no text, or a name with a zero
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
