"""`PromptBuilder`: from a dataset row to a `Prompt` with token ids.

Invariant: a row becomes a prompt or a `DataError` that names the column or the limit and its flag; nothing is cut.
Does not own: reading rows, nor the order in which they come.
"""

from collections.abc import Mapping
from typing import Any

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.application.config import DataConfig
from rollgrad.domain.errors import ConfigurationError, DataError
from rollgrad.domain.ports.chat_codec import RenderedPrompt
from rollgrad.domain.prompts import Prompt


class PromptBuilder:
    """Builds prompts as `data` says: input and label column, chat template or plain text, longest prompt.

    Raises:
        ConfigurationError: settings of the chat template and of plain text are mixed.
    """

    def __init__(self, codec: TemplateCodec, data: DataConfig) -> None:
        if data.apply_chat_template and data.input_template is not None:
            raise ConfigurationError(
                f"--data.input-template is {data.input_template!r}, but prompts are rendered with the chat template: "
                "set --data.apply-chat-template False, or leave the input template out."
            )
        if not data.apply_chat_template and data.system_prompt is not None:
            raise ConfigurationError(
                "--data.system-prompt needs the chat template, but --data.apply-chat-template is False: put the text "
                "into --data.input-template instead."
            )
        if data.input_template is not None and "{}" not in data.input_template:
            raise ConfigurationError(
                f"--data.input-template is {data.input_template!r}: it needs {{}} where the prompt goes."
            )
        self._codec = codec
        self._data = data

    def build(self, entry: Mapping[str, Any], datasource: str) -> Prompt:
        """The prompt that `entry` describes; `entry` itself is kept as its metadata.

        Raises:
            DataError: a column is missing or of the wrong kind, or the prompt is empty or too long.
        """
        data = self._data
        value = self._column(entry, data.input_key, "--data.input-key", datasource)
        label = None
        if data.label_key is not None:
            label = self._column(entry, data.label_key, "--data.label-key", datasource)
        messages = self._messages(value, datasource) if data.apply_chat_template else []
        rendered = self._codec.render(messages) if messages else self._plain(value, datasource)
        length = len(rendered.token_ids)
        if length == 0:
            raise DataError(f"A prompt of {datasource!r} has no tokens: column {data.input_key!r} holds {value!r}.")
        if length > data.max_prompt_tokens:
            raise DataError(
                f"A prompt of {datasource!r} has {length} tokens, more than the {data.max_prompt_tokens} allowed "
                f"(it starts {rendered.text[:60]!r}): raise --data.max-prompt-tokens or remove the row."
            )
        return Prompt(
            token_ids=rendered.token_ids,
            text=rendered.text,
            label=label,
            datasource=datasource,
            metadata=dict(entry),
            messages=tuple(messages),
        )

    @staticmethod
    def _column(entry: Mapping[str, Any], key: str, flag: str, datasource: str) -> Any:
        if key not in entry:
            columns = ", ".join(sorted(name for name in entry if name != "datasource")) or "none"
            raise DataError(f"{datasource!r} has no column {key!r}: set {flag} to one of its columns ({columns}).")
        return entry[key]

    def _messages(self, value: Any, datasource: str) -> list[Mapping[str, Any]]:
        if isinstance(value, str):
            messages: list[Mapping[str, Any]] = [{"role": "user", "content": value}]
        elif isinstance(value, list) and value and all(isinstance(m, Mapping) and "role" in m for m in value):
            messages = list(value)
        else:
            raise DataError(
                f"Column {self._data.input_key!r} of {datasource!r} holds {value!r}: with the chat template a prompt "
                "is a text or a list of messages with role and content."
            )
        if self._data.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._data.system_prompt})
        return messages

    def _plain(self, value: Any, datasource: str) -> RenderedPrompt:
        if not isinstance(value, str):
            raise DataError(
                f"Column {self._data.input_key!r} of {datasource!r} holds {value!r}: without the chat template a "
                "prompt is a text (messages need --data.apply-chat-template True)."
            )
        template = self._data.input_template
        text = value if template is None else template.replace("{}", value)
        return RenderedPrompt(text=text, token_ids=self._codec.encode_prompt(text))
