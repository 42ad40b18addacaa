"""One reply of a chat model: sampling, streaming and parsing it."""

from collections.abc import Callable

from attrs import frozen

from rollgrad.application.episodes.ledger import Prepared
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams
from rollgrad.domain.episodes.messages import ParsedReply
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.chat_codec import ChatCodec, ReplyStream
from rollgrad.domain.ports.rollout_engine import RolloutEngine

PREFILL_TOKENS = 64
"""Number of last prompt tokens that the parser gets: the generation prompt, with opened thinking, fits into them."""

OnPiece = Callable[[str, str], None]
"""Function called with (field, text) pieces of a reply as they are sampled; the field is `content` or
`reasoning_content`."""


@frozen(kw_only=True, eq=False)
class ChatReply:
    """One reply, with its tokens. `prompt_token_ids` is the engine's input; `stopped_by` the client's stop text that
    ended the reply."""

    parsed: ParsedReply
    generation: Generation
    prompt_token_ids: tuple[int, ...]
    stopped_by: str | None = None


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
    request = GenerationRequest(prompt_token_ids=prepared.token_ids, params=params, keep=True)
    generation = await engine.generate(request, on_token=on_token)
    if not generation.token_ids:
        raise EngineError(f"The engine ended the request ({generation.stop_reason}) before its first token.")
    return generation


async def sample_reply(
    engine: RolloutEngine,
    codec: ChatCodec,
    prepared: Prepared,
    params: SamplingParams,
    *,
    on_piece: OnPiece | None = None,
) -> ChatReply:
    """Samples a chat message in reply to `prepared`; raises like `sample_tokens`."""
    prompt = codec.decode(prepared.token_ids[-PREFILL_TOKENS:], special_tokens=True)
    if on_piece is None:
        generation = await sample_tokens(engine, prepared, params)
    else:
        stream = codec.stream(prompt, prepared.tools)
        generation = await sample_tokens(engine, prepared, params, on_token=_listener(stream, on_piece))
        for name, text in stream.finish():
            on_piece(name, text)
    text = codec.decode(generation.token_ids, special_tokens=True)
    parsed = codec.parse(text, prompt, prepared.tools)
    return ChatReply(parsed=parsed, generation=generation, prompt_token_ids=prepared.token_ids)


def _listener(stream: ReplyStream, on_piece: OnPiece) -> Callable[[int], None]:
    def hear(token_id: int) -> None:
        for name, text in stream.feed(token_id):
            on_piece(name, text)

    return hear
