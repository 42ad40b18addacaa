"""Requests of clients for replies: what they ask for, how they are told apart, and how they are refused."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.messages import Message, ReplyForm, texts
from rollgrad.domain.errors import RollgradError
from rollgrad.domain.ports.chat_codec import ToolSchema

CHARACTERS_PER_TOKEN = 32
"""Largest average number of characters of a token: prose has 3 to 5, and runs of spaces, the longest tokens, about
20."""

CHOICE_STRIDE = 2**16
"""Distance between the seeds of the replies to one request; the turns of one have neighbouring seeds. It is below 2^32,
as torch's generator on a CPU reads the last 32 bits of a seed alone."""


def _nothing(tokens: int) -> None:
    """Does nothing."""


@frozen(kw_only=True)
class ChatRequest:
    """A request for one reply."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    changes: Mapping[str, Any] = field(factory=dict)
    """Sampling settings that the client names (fields of `SamplingParams`)."""
    form: ReplyForm | None = None
    """Form that the reply must have; None for any."""
    prompt: str | tuple[int, ...] | None = None
    """Text or token ids to be continued without a chat template, instead of messages."""
    choice: int = 0
    """Number of the reply among several to one request, which differ in their seeds."""
    role: str = ""
    """Who replies, of several in an episode (`Trajectory.role`)."""
    follows: int | None = None
    """Turn of a session that the conversation continues, if its client has said which, of turns that say the same."""
    on_read: Callable[[int], None] = _nothing
    """Is told the number of tokens that the engine is given, before it samples."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the reply, and are not part of it."""
        return tuple(self.changes.get("stop_strings", ()))

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Returns the client's settings over `defaults`."""
        params = evolve(defaults, **self.changes)
        return evolve(params, seed=(params.seed + self.choice * CHOICE_STRIDE) % 2**63)


class RefusedError(RollgradError, RuntimeError):
    """The session takes no more requests, or not this one. `kind`: sealed, turn_limit, context_length,
    conflict, busy or unsupported."""

    def __init__(self, message: str, kind: str = "sealed") -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.kind)


@frozen(kw_only=True)
class Origin:
    """Identity of a request: its `key`, the `digest` of its body, and whether it repeats an earlier one
    (`is_retry`)."""

    key: str
    digest: str
    is_retry: bool = False


@frozen(kw_only=True)
class SessionLimits:
    """Limits of one session: replies, and tokens of one history (None: the model's positions)."""

    max_turns: int
    max_tokens: int | None = None


def check_length(request: ChatRequest, max_tokens: int) -> None:
    """Refuses a conversation that is too long by its characters, so that no time is spent on tokenising it.

    Raises:
        RefusedError: it has more than CHARACTERS_PER_TOKEN characters for each of `max_tokens`.
    """
    messages = list(map(_without_images, request.messages))
    characters = sum(map(len, texts([messages, request.tools, request.prompt])))
    if characters > max_tokens * CHARACTERS_PER_TOKEN:
        sentence = (
            f"The conversation has {characters} characters, which leaves no room for a reply within the {max_tokens} "
            "tokens that it may have: shorten it."
        )
        raise RefusedError(sentence, "context_length")


def _without_images(message: Message) -> Message:
    """Returns a message without its images, whose files have more characters than tokens stand for them."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [part for part in content if part.get("type") != "image"]}
