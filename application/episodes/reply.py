"""One reply of a chat model: sampling, streaming and parsing it."""

import asyncio
from collections.abc import Callable

from attrs import evolve, frozen

from rollgrad.application.episodes.turns import Prepared
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams
from rollgrad.domain.episodes.messages import ParsedReply, ReplyForm, assistant_message
from rollgrad.domain.episodes.top_logprobs import TopLogprobs
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.chat_codec import ChatCodec, ReplyStream
from rollgrad.domain.ports.rollout_engine import RolloutEngine

PREFILL_TOKENS = 64
"""Number of last prompt tokens that the parser gets: the generation prompt, with opened thinking, fits into them."""

UNFINISHED = "\ufffd"
"""Character that stands for an incomplete one, whose last bytes are in tokens still to come."""

OnPiece = Callable[[str, str], None]
"""Function called with (field, text) pieces of a reply as they are sampled; the field is `content` or
`reasoning_content`."""


@frozen(kw_only=True, eq=False)
class ChatReply:
    """One reply, with its tokens."""

    parsed: ParsedReply
    generation: Generation
    prompt_token_ids: tuple[int, ...]
    """Input of the engine."""
    stopped_by: str | None = None
    """Stop text of the client that ended the reply."""
    earlier: tuple[int, int] = (0, 0)
    """Numbers of tokens read and sampled for the calls of tools before it, if it answers after some."""
    turn: int | None = None
    """Number in the session that records it."""

    @property
    def read(self) -> int:
        """Number of tokens that the engine was given."""
        return self.earlier[0] + len(self.prompt_token_ids)

    @property
    def sampled(self) -> int:
        """Number of tokens that the engine sampled."""
        return self.earlier[1] + len(self.generation.token_ids)

    def narrowed(self, count: int) -> "ChatReply":
        """Returns it with as many likely tokens at each place as its client asked for: the trainer may want more."""
        told = TopLogprobs.of(self.generation.top_logprobs).narrowed(count) if count else ()
        return evolve(self, generation=evolve(self.generation, top_logprobs=told))


async def sample_tokens(
    engine: RolloutEngine,
    prepared: Prepared,
    params: SamplingParams,
    *,
    on_token: Callable[[int], None] | None = None,
) -> Generation:
    """Samples the reply to `prepared`.

    Raises:
        EngineError: the engine failed, or ended the request before its first token.
    """
    request = GenerationRequest(
        prompt_token_ids=prepared.token_ids,
        params=params,
        keep=True,
        images=prepared.images,
        continues=prepared.continues,
        continues_version=prepared.continues_version,
        known_experts=prepared.known_experts,
    )
    generation = await engine.generate(request, on_token=on_token)
    if not generation.token_ids:
        raise EngineError(f"The engine ended the request ({generation.stop_reason}) before its first token.")
    return evolve(generation, grammar=params.grammar)


async def sample_reply(
    engine: RolloutEngine,
    codec: ChatCodec,
    prepared: Prepared,
    params: SamplingParams,
    *,
    form: ReplyForm | None = None,
    on_piece: OnPiece | None = None,
) -> ChatReply:
    """Samples a chat message in reply to `prepared`, in a form if one is given; raises like `sample_tokens`.

    Raises:
        DataError: this model's replies cannot be given the form.
    """
    prompt = codec.decode(prepared.token_ids[-PREFILL_TOKENS:], special_tokens=True)
    if form is not None:
        # In a thread: a large schema takes a second, for which the event loop must not block.
        params = evolve(params, grammar=await asyncio.to_thread(codec.grammar, form, prompt, prepared.tools))
    told = ""
    if on_piece is None:
        generation = await sample_tokens(engine, prepared, params)
    else:

        def tell(name: str, text: str) -> None:
            nonlocal told
            told += text if name == "content" else ""
            on_piece(name, text)

        stream = codec.stream(prompt, prepared.tools)
        generation = await sample_tokens(engine, prepared, params, on_token=_listener(stream, tell))
        for name, text in stream.finish():
            tell(name, text)
    text = codec.decode(generation.token_ids, special_tokens=True)
    parsed = codec.parse(text, prompt, prepared.tools, form)
    content = str(parsed.message.get("content") or "")
    if on_piece is not None and form is not None and len(content) > len(told) and content.startswith(told):
        on_piece("content", content[len(told) :])  # the stream took a mark inside the prescribed text for a call
    return ChatReply(parsed=parsed, generation=generation, prompt_token_ids=prepared.token_ids)


async def sample_text(
    engine: RolloutEngine,
    codec: ChatCodec,
    prepared: Prepared,
    params: SamplingParams,
    *,
    on_piece: OnPiece | None = None,
) -> ChatReply:
    """Samples the plain text after `prepared`, without a template; raises like `sample_tokens`."""
    pieces = None if on_piece is None else _TextPieces(codec, on_piece)
    generation = await sample_tokens(engine, prepared, params, on_token=None if pieces is None else pieces.hear)
    if pieces is not None:
        pieces.tell()
    text = codec.decode(generation.token_ids)
    return ChatReply(
        parsed=ParsedReply(message=assistant_message(text)),
        generation=generation,
        prompt_token_ids=prepared.token_ids,
    )


class _TextPieces:
    """Decodes a text while its tokens are sampled, each with the tokens before it, on which its text depends."""

    def __init__(self, codec: ChatCodec, on_piece: OnPiece) -> None:
        self._codec, self._on_piece = codec, on_piece
        self._tokens: list[int] = []
        self._start = self._told = 0

    def hear(self, token_id: int) -> None:
        self._tokens.append(token_id)
        if not self._new().endswith(UNFINISHED):
            self.tell()

    def tell(self) -> None:
        text = self._new()
        self._start, self._told = self._told, len(self._tokens)
        if text:
            self._on_piece("content", text)

    def _new(self) -> str:
        known = self._codec.decode(self._tokens[self._start : self._told])
        return self._codec.decode(self._tokens[self._start :])[len(known) :]


def _listener(stream: ReplyStream, on_piece: OnPiece) -> Callable[[int], None]:
    def hear(token_id: int) -> None:
        for name, text in stream.feed(token_id):
            on_piece(name, text)

    return hear
