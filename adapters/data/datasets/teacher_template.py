"""The text that a teacher reads in the place of a prompt: the prompt's own, with columns of its row that the policy is
not shown, such as a solution, or with a reply of the policy's own that passed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from rollgrad.adapters.data.datasets.columns import has_value, value_at
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ConfigurationError, DataError
from rollgrad.domain.placeholders import filled, places
from rollgrad.domain.ports.chat_codec import ChatCodec

SETTING = "algo.kl.teacher_template"

PASSED_REPLY = "passed_reply"
"""Name of the place of a reply to the same prompt that passed, which is known when the rollout has been judged."""


@frozen
class TeacherTemplate:
    """A text with `{prompt}`, `{label}`, `{passed_reply}` and `{column}` of the row; `{{name}}` is the text {name}.
    Where a method is given no reply that passed, its place stays as it is written."""

    text: str

    @property
    def tells_passed_replies(self) -> bool:
        """Whether the teacher is told a reply that passed."""
        return PASSED_REPLY in places(self.text)

    @classmethod
    def read(cls, given: str) -> "TeacherTemplate":
        """Returns the template that a setting gives: itself, or the name of a file with it.

        Raises:
            ConfigurationError: it is neither, or has no place for the prompt.
        """
        text = given
        if not places(given):
            try:
                text = Path(given).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ConfigurationError(
                    f"{SETTING} is {given!r}, which has no place for anything ({{prompt}} is one), and cannot be read "
                    f"as a file either ({error}): write a text with {{prompt}}, or name a file with one."
                ) from error
        if "prompt" not in places(text):
            raise ConfigurationError(
                f"{SETTING} is {given!r}, which has no {{prompt}}, so that the teacher would not see the question: "
                "write {prompt} where it belongs."
            )
        return cls(text)

    def about(
        self, prompt: str, label: Any, row: Mapping[str, Any], datasource: str, passed: str = f"{{{PASSED_REPLY}}}"
    ) -> str:
        """Returns what the teacher reads in the place of `prompt`.

        Raises:
            DataError: the row lacks what the template names.
        """

        def value(name: str) -> str:
            if name == "prompt":
                return prompt
            if name == PASSED_REPLY:
                return passed
            if name == "label" and label is not None:
                return str(label)
            found = value_at(row, name) if has_value(row, name) else None
            if found is None:
                raise DataError(
                    f"There is no {name!r} in this row of {datasource!r} ({', '.join(sorted(row))}), which {SETTING} "
                    f"names: correct it, or write {{{{{name}}}}} for the text itself."
                )
            return str(found)

        return filled(self.text, value)

    def messages(
        self,
        messages: Sequence[Message],
        label: Any,
        row: Mapping[str, Any],
        datasource: str,
        passed: str = f"{{{PASSED_REPLY}}}",
    ) -> list[Message]:
        """Returns a conversation whose last user message is what the teacher reads in its place.

        Raises:
            DataError: there is no user message, or the row lacks what the template names.
        """
        last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is None:
            raise DataError(f"A prompt of {datasource!r} has no user message for {SETTING}.")
        content = messages[last]["content"]
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        told = {**messages[last], "content": self.about(text, label, row, datasource, passed)}
        return [*messages[:last], told, *messages[last + 1 :]]


@frozen
class Telling:
    """Writes what a teacher reads that is told a reply; its tokens are those that `codec` gives them."""

    template: TeacherTemplate
    codec: ChatCodec

    def __call__(self, prompt: Prompt, passed: str) -> tuple[int, ...]:
        """Returns the tokens that the teacher reads in the place of `prompt`."""
        about = prompt.label, prompt.metadata, prompt.datasource, passed
        if prompt.messages:
            return self.codec.render(self.template.messages(prompt.messages, *about)).token_ids
        return self.codec.encode_prompt(self.template.about(prompt.text, *about))
