"""`PromptBuilder` makes a `Prompt` with token ids from a dataset row.

Invariant: a row becomes a prompt or a `DataError` that names the column and its flag; nothing is truncated.

Does not own: reading rows, their order, nor the limit on a prompt's length (`survey`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import structlog
from attrs import frozen

from rollgrad.adapters.chat.image_marks import listed_images, placed_images
from rollgrad.adapters.chat.pictures import image_count
from rollgrad.adapters.chat.template_codec import TemplateCodec, WrittenPrompt
from rollgrad.adapters.data.datasets.columns import Columns, find_columns, has_value, value_at, written_messages
from rollgrad.adapters.data.datasets.teacher_template import TeacherTemplate
from rollgrad.adapters.data.fetched_images import FetchedImages
from rollgrad.application.foreign import shown
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.domain.episodes.messages import Message, with_system
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ConfigurationError, DataError
from rollgrad.domain.ports.chat_codec import RenderedPrompt

log = structlog.get_logger(__name__)

LabelProblem = Callable[[Any, str | None], str | None]
"""Function from a label and its column to a sentence that says why the reward cannot use the label; None if it can."""

IMAGES = ("images", "image")
"""Usual names of the column of images, which nobody is shown unless data.image_key names it."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages that every chat template is given."""


def _has_content(content: Any) -> bool:
    """Returns whether a message's content is not empty: a text that is not blank, or a list of parts."""
    return bool(content.strip()) if isinstance(content, str) else bool(content)


def with_suffix(message: Message, suffix: str) -> Message:
    """Returns a message whose text goes on with `suffix`."""
    content = message["content"]
    longer = content + suffix if isinstance(content, str) else [*content, {"type": "text", "text": suffix}]
    return {**message, "content": longer}


@frozen
class Draft:
    """A prompt that is not yet tokenised. `written`, and `told`, what a teacher reads in its place, are texts if there
    is no chat template; `told` is None if it reads the prompt."""

    written: WrittenPrompt | str
    label: Any
    messages: tuple[Message, ...]
    told: WrittenPrompt | str | None = None

    @property
    def has_images(self) -> bool:
        """Whether there are images in it."""
        return not isinstance(self.written, str) and bool(self.written.images)


class PromptBuilder:
    """Builds prompts by the settings `data`: input and label column, chat template or plain text.

    Columns that `data` does not name are found in the first row (`find_columns`), and logged. `labels_are_read`:
    several possible columns of labels are an error. `label_problem`: refuses labels. `fetched`: fetches images that are
    URLs. `teacher`: what a teacher reads in the place of prompts. `check`: refuses rows
    that something else cannot use, by a `DataError`.

    Raises:
        ConfigurationError: settings of the chat template and of plain text are mixed.
    """

    def __init__(
        self,
        codec: TemplateCodec,
        data: DataConfig,
        *,
        labels_are_read: bool = False,
        label_problem: LabelProblem = lambda label, key: None,
        fetched: FetchedImages | None = None,
        teacher: TeacherTemplate | None = None,
        check: Callable[[Mapping[str, Any]], object] = lambda row: None,
    ) -> None:
        if data.apply_chat_template and data.input_template is not None:
            raise ConfigurationError(
                f"--data.input_template is {data.input_template!r}, but prompts are rendered with the chat template: "
                "set --data.apply_chat_template False, or leave the input template out."
            )
        if not data.apply_chat_template and data.system_prompt is not None:
            raise ConfigurationError(
                "--data.system_prompt needs the chat template, but --data.apply_chat_template is False: put the text "
                "into --data.input_template instead."
            )
        if data.input_template is not None and "{}" not in data.input_template:
            raise ConfigurationError(
                f"--data.input_template is {data.input_template!r}: it needs {{}} where the prompt goes."
            )
        self._codec = codec
        self.data = data
        """Settings of the data; read only."""
        self._labels_are_read = labels_are_read
        self._label_problem = label_problem
        self._fetched = fetched
        self._teacher = teacher
        self._check = check
        self._columns: Columns | None = None

    def columns(self, row: Mapping[str, Any], datasource: str) -> Columns:
        """Returns the columns that are read from all rows; the first call finds them.

        Raises:
            DataError: they cannot be found (`find_columns`), or the reward needs labels and there are none.
        """
        if self._columns is None:
            self._columns = self.found(row, datasource)
        return self._columns

    def found(self, row: Mapping[str, Any], datasource: str) -> Columns:
        """Returns the columns that a row of `datasource` has, which may be others than those that are read.

        Raises:
            DataError: as `columns`.
        """
        data = self.data
        found = find_columns(
            row,
            datasource,
            input_key=data.input_key,
            label_key=data.label_key,
            labels_are_read=self._labels_are_read,
        )
        missing = None if found.label is not None else self._label_problem(None, None)
        if missing is not None:
            raise DataError(f"{datasource!r}: {missing}")
        if data.input_key is None or data.label_key is None:
            labels = "no labels" if found.label is None else f"labels from column {found.label}"
            log.info(f"{datasource}: prompts from column {found.prompt}, {labels}")
        unread = next((key for key in IMAGES if row.get(key) is not None), None)
        if data.image_key is None and unread is not None:
            log.warning(
                f"{datasource}: the model is not shown the images of column {unread}: set --data.image_key {unread}"
            )
        return found

    def build(self, row: Mapping[str, Any], datasource: str) -> Prompt:
        """Returns the prompt that `row` describes; `row` itself is kept as its metadata.

        Raises:
            DataError: a column is missing or of the wrong kind, or the prompt is empty.
        """
        draft = self.draft(row, datasource)
        rendered = self._rendered(draft.written)
        return Prompt(
            token_ids=rendered.token_ids,
            text=rendered.text,
            label=draft.label,
            datasource=datasource,
            metadata=dict(row),
            messages=draft.messages,
            images=rendered.images,
            teacher_token_ids=() if draft.told is None else self._rendered(draft.told).token_ids,
        )

    def _rendered(self, written: WrittenPrompt | str) -> RenderedPrompt:
        if isinstance(written, str):
            return RenderedPrompt(text=written, token_ids=self._codec.encode_prompt(written))
        return self._codec.encoded(written)

    def draft(self, row: Mapping[str, Any], datasource: str) -> Draft:
        """Returns the prompt that `row` describes, before it is tokenised.

        Raises:
            DataError: a column is missing or of the wrong kind, or the prompt is empty.
        """
        columns = self.columns(row, datasource)
        value = self._value(row, columns.prompt, datasource)
        label = None if columns.label is None else self._value(row, columns.label, datasource)
        problem = self._label_problem(label, columns.label)
        if problem is not None:
            raise DataError(problem)
        self._check(row)
        if self.data.apply_chat_template:
            messages = self._with_images(self._messages(row, value, datasource), row, datasource)
            told = None
            if self._teacher is not None:
                told = self._codec.write(self._teacher.messages(messages, label, row, datasource))
            return Draft(self._codec.write(messages), label, tuple(messages), told)
        text = self._plain(value, datasource)
        told_text = None if self._teacher is None else self._teacher.about(text, label, row, datasource)
        return Draft(text, label, (), told_text)

    def fetch_ahead(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Fetches the images of rows that are URLs, many at the same time."""
        key = self.data.image_key
        if self._fetched is not None and key is not None:
            images = (value_at(row, key) for row in rows if has_value(row, key))
            self._fetched.ahead(source for value in images for source in listed_images(value))

    def lengths(self, drafts: Sequence[Draft]) -> list[int]:
        """Returns the number of tokens of each draft, in one call of the tokenizer."""
        return self._lengths([draft.written for draft in drafts])

    def told_lengths(self, drafts: Sequence[Draft]) -> list[int]:
        """Returns the number of tokens that a teacher reads in the place of each draft; none if it reads the same."""
        return self._lengths([draft.told for draft in drafts if draft.told is not None])

    def _lengths(self, prompts: Sequence[WrittenPrompt | str]) -> list[int]:
        if self.data.apply_chat_template:
            return self._codec.lengths([written for written in prompts if not isinstance(written, str)])
        return self._codec.text_lengths([written for written in prompts if isinstance(written, str)])

    @staticmethod
    def _value(row: Mapping[str, Any], key: str, datasource: str) -> Any:
        if not has_value(row, key):
            raise DataError(f"There is no column {key!r} of {datasource!r} in it, as there is in other rows.")
        return value_at(row, key)

    def _messages(self, row: Mapping[str, Any], value: Any, datasource: str) -> list[Message]:
        value = written_messages(value)
        if isinstance(value, str):
            self._refuse_empty(value.strip(), value, datasource)
            messages: list[Message] = [{"role": "user", "content": value}]
        elif isinstance(value, list) and value and all(isinstance(m, Mapping) and "role" in m for m in value):
            self._refuse_empty(any(_has_content(m.get("content")) for m in value), value, datasource)
            for message in value:
                self._check_message(message, datasource)
            messages = list(value)
        else:
            raise DataError(
                f"Column {self._prompt_column} of {datasource!r} holds {value!r}: with the chat template a prompt "
                "is a text or a list of messages with role and content."
            )
        system = row.get("system") or self.data.system_prompt
        if not isinstance(system, str | None) and messages[0]["role"] != "system":
            raise DataError(f"Column 'system' of {datasource!r} holds {system!r}, which is no text.")
        return self._with_suffix([*with_system(messages, system)], datasource)

    def _with_images(self, messages: list[Message], row: Mapping[str, Any], datasource: str) -> list[Message]:
        """Puts the images of data.image_key in the place of the marks in messages."""
        key, most = self.data.image_key, self.data.max_images_per_prompt
        if key is None:
            return messages
        placed = placed_images(messages, listed_images(self._value(row, key, datasource)))
        count = sum(map(image_count, placed))
        if most is not None and count > most:
            raise DataError(
                f"The row of {datasource!r} has {count} images, but data.max_images_per_prompt is {most}: raise "
                "--data.max_images_per_prompt."
            )
        return placed if self._fetched is None else self._fetched.local(placed)

    def _with_suffix(self, messages: list[Message], datasource: str) -> list[Message]:
        """Puts data.prompt_suffix after the text of the last user message."""
        if self.data.prompt_suffix is None:
            return messages
        last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is None:
            raise DataError(
                f"Column {self._prompt_column} of {datasource!r} holds no user message for --data.prompt_suffix."
            )
        return [*messages[:last], with_suffix(messages[last], self.data.prompt_suffix), *messages[last + 1 :]]

    def _check_message(self, message: Message, datasource: str) -> None:
        """Refuses messages that a template would write as `None` or as a number, or omit silently."""
        role, content = message["role"], message.get("content")
        problem = None
        if not isinstance(role, str) or not (role in ROLES or self._codec.mentions(role)):
            problem = f"has the role {shown(role)}, which is none of {', '.join(ROLES)} nor in the chat template"
        elif not (isinstance(content, str | list) or (content is None and message.get("tool_calls"))):
            problem = f"has the content {shown(content)}, which is no text"
        elif role == "user" and not _has_content(content):
            problem = "of the user is empty"
        if problem is not None:
            raise DataError(
                f"Column {self._prompt_column} of {datasource!r} holds a message that {problem}: "
                f"{shown(dict(message))}."
            )

    def _plain(self, value: Any, datasource: str) -> str:
        if not isinstance(value, str):
            raise DataError(
                f"Column {self._prompt_column} of {datasource!r} holds {value!r}: without the chat template a "
                "prompt is a text (messages need --data.apply_chat_template True)."
            )
        self._refuse_empty(value.strip(), value, datasource)
        template = self.data.input_template
        value += self.data.prompt_suffix or ""
        return value if template is None else template.replace("{}", value)

    def _refuse_empty(self, content: Any, value: Any, datasource: str) -> None:
        if not content:
            raise DataError(f"Column {self._prompt_column} of {datasource!r} holds {value!r}: the prompt is empty.")

    @property
    def _prompt_column(self) -> str:
        return repr(self._columns.prompt if self._columns else self.data.input_key)
