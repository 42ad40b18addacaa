"""OpenAI's completions: what is refused, and the log-probs of an answer."""

from typing import Any

import pytest

from rollgrad.adapters.servers.completions_wire import CompletionsWire
from rollgrad.adapters.servers.guard import HttpError
from rollgrad.adapters.servers.sampling_fields import MAX_STOPS
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import ParsedReply

WIRE = CompletionsWire()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"stop_token_ids": list(range(MAX_STOPS + 1))}, "stop_token_ids has 65 ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be token ids"),
        ({"prompt": []}, "prompt must be a text"),
        ({"prompt": ["a", ""]}, "none of them empty"),
        ({"prompt": ["a", 1]}, "prompt must be a text"),
        ({"prompt": [[1], [-1]]}, "prompt must be token ids"),
        ({"prompt": ["a"] * 9, "n": 128}, "9 prompts and n is 128, which makes 1152 replies"),
        ({"echo": True}, "echo is true"),
        ({"response_format": {"type": "json_object"}}, "response_format is"),
        ({"min_p": 0.1}, "min_p is 0.1"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(more: dict[str, Any], named: str) -> None:
    with pytest.raises(HttpError, match=named):
        WIRE.decode({"prompt": "a", **more})


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2]], [(1, 2)]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_prompts_are_texts_or_token_ids_or_lists_of_them(given: Any, prompts: list[Any]) -> None:
    assert list(WIRE.decode({"prompt": given}).prompts) == prompts


def test_of_tokens_with_one_text_the_likeliest_is_told() -> None:
    call = WIRE.decode({"prompt": "a", "logprobs": 3})
    generation = Generation(
        token_ids=[200],
        logprobs=[-3.0],
        versions=[0],
        stop_reason=StopReason.STOP,
        top_logprobs=[[(65, -0.5), (201, -1.0), (200, -3.0)]],
    )
    message = {"role": "assistant", "content": "?"}
    reply = ChatReply(parsed=ParsedReply(message=message), generation=generation, prompt_token_ids=(1,))
    body = WIRE.encode(call, [reply], "x", lambda ids: bytes(ids).decode(errors="replace"))
    (likeliest,) = body["choices"][0]["logprobs"]["top_logprobs"]
    assert likeliest == {"A": -0.5, "\ufffd": -1.0}
