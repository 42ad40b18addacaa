"""The text that a teacher reads in the place of a prompt. It is the prompt's own text, with columns of its row that the
policy is not shown, such as a solution, or with what is known once replies were judged: a reply that passed, or what
was wrong."""

import re
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

PASSED_REPLY, PASSED_ANSWER, FEEDBACK = "passed_reply", "passed_answer", "reward_feedback"
"""Names of the places of what is known when a rollout has been judged: a reply to the same prompt that passed, the same
without its thinking, and what the reward says of the reply that is taught."""

Judged = Mapping[str, str | None]
"""Texts that are known of a reply, by these names; None where one is not."""
UNJUDGED: Judged = {name: f"{{{name}}}" for name in (PASSED_REPLY, PASSED_ANSWER, FEEDBACK)}
"""Leaves these places as they are written."""

_PART = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


@frozen
class TeacherTemplate:
    """A text with `{prompt}`, `{label}`, `{passed_reply}`, `{passed_answer}`, `{reward_feedback}` and `{column}` of the
    row; `{{name}}` is the text {name}. A part in double square brackets that has such places is left out where one of
    them has nothing."""

    text: str

    @property
    def judged(self) -> frozenset[str]:
        """Names of what the teacher is told that is known once replies were judged."""
        return frozenset(places(self.text) & UNJUDGED.keys())

    def teaches(self, known: Judged) -> bool:
        """Returns whether a reply is taught of which this is known: everything outside of parts that may be left out,
        and, of what the template tells of judged replies, anything."""
        return all(known[name] for name in _always(self.text) & UNJUDGED.keys()) and any(
            known[name] for name in self.judged
        )

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
        if "prompt" not in _always(text):
            raise ConfigurationError(
                f"{SETTING} is {given!r}, which has no {{prompt}}, so that the teacher would not see the question: "
                "write {prompt} where it belongs."
            )
        return cls(text)

    def about(self, prompt: str, label: Any, row: Mapping[str, Any], datasource: str, known: Judged = UNJUDGED) -> str:
        """Returns what the teacher reads in the place of `prompt`.

        Raises:
            DataError: the row lacks what the template names.
        """

        def value(name: str) -> str | None:
            if name == "prompt":
                return prompt
            if name in known:
                return known[name] or None
            if name == "label" and label is not None:
                return str(label)
            found = value_at(row, name) if has_value(row, name) else None
            return None if found is None else _as_text(found)

        def required(name: str) -> str:
            found = value(name)
            if found is None:
                raise DataError(
                    f"There is no {name!r} in this row of {datasource!r} ({', '.join(sorted(row))}), which {SETTING} "
                    f"names: correct it, or write {{{{{name}}}}} for the text itself."
                )
            return found

        # One after the other, as what is filled in may have such brackets itself.
        told, place = list[str](), 0
        for part in _PART.finditer(self.text):
            told.append(filled(self.text[place : part.start()], required))
            names, place = places(part[1]), part.end()
            if None not in map(value, names):
                told.append(filled(part[1] if names else part[0], required))
        return "".join([*told, filled(self.text[place:], required)])

    def messages(
        self,
        messages: Sequence[Message],
        label: Any,
        row: Mapping[str, Any],
        datasource: str,
        known: Judged = UNJUDGED,
    ) -> list[Message]:
        """Returns a conversation whose last user message is what the teacher reads in its place.

        Raises:
            DataError: there is no user message, or the row lacks what the template names.
        """
        last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is None:
            raise DataError(f"A prompt of {datasource!r} has no user message for {SETTING}.")
        told = {**messages[last], "content": self.about(_content(messages[last]), label, row, datasource, known)}
        return [*messages[:last], told, *messages[last + 1 :]]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _as_text(value: Any) -> str:
    """Returns a column's value as text; of messages, such as a demonstration, what they say, a line each."""
    if isinstance(value, list) and value and all(isinstance(each, Mapping) and "content" in each for each in value):
        return "\n".join(filter(None, map(_content, value)))
    return str(value)


def without_thinking(reply: str) -> str:
    """Returns a reply without what stands between <think> and </think>, also where its prompt ends with the first.

    >>> without_thinking("<think>2 + 2</think>\\n4"), without_thinking("2 + 2</think> 4"), without_thinking("4 ")
    ('4', '4', '4')
    """
    return _THOUGHT.sub("", reply).rpartition("</think>")[2].strip()


def _always(text: str) -> set[str]:
    """Returns the names of the places that are in no part that may be left out."""
    return places(_PART.sub("", text))


@frozen
class Telling:
    """Writes what a teacher reads that is told of judged replies; its tokens are those that `codec` gives them. Of what
    the reward says the last `longest` tokens are told."""

    template: TeacherTemplate
    codec: ChatCodec
    longest: int

    def __call__(self, prompt: Prompt, passed_reply: str | None, feedback: str | None) -> tuple[int, ...] | None:
        """Returns the tokens that the teacher reads in the place of `prompt`; None where a reply of which this is known
        is not taught."""
        known = {
            PASSED_REPLY: passed_reply,
            PASSED_ANSWER: without_thinking(passed_reply) if passed_reply else None,
            FEEDBACK: self._end(feedback) if feedback else None,
        }
        if not self.template.teaches(known):
            return None
        about = prompt.label, prompt.metadata, prompt.datasource, known
        if prompt.messages:
            return self.codec.render(self.template.messages(prompt.messages, *about)).token_ids
        return self.codec.encode_prompt(self.template.about(prompt.text, *about))

    def _end(self, feedback: str) -> str:
        tokens = self.codec.encode(feedback)
        return feedback if len(tokens) <= self.longest else self.codec.decode(tokens[-self.longest :])
