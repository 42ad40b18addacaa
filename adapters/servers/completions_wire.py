"""OpenAI's `POST /v1/completions`: texts, or their token ids, that the model continues without a chat template.

`min_tokens`, `stop_token_ids` and `return_token_ids` are as in vLLM, so that another rollgrad may sample here; that
names the tokens that end a reply besides `ignore_eos`, which changes nothing here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollgrad.adapters.servers.guard import HttpError, error_body
from rollgrad.adapters.servers.openai_wire import (
    MOST_CHOICES,
    MOST_LIKELY,
    SHAPING,
    CompletionChunks,
    head_of,
    token_usage,
)
from rollgrad.adapters.servers.sampling_fields import MAX_STOPS, read_all, refuse_others, sampling_of, stops
from rollgrad.adapters.servers.wire import (
    MAX_COUNT,
    OPENAI_FIELDS,
    Call,
    Decode,
    EventStream,
    Wire,
    bad,
    call_of,
    count,
    read,
)
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.generation import StopReason

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **SHAPING,
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
}
"""Settings with the values that change nothing; any other is refused."""


MOST_REPLIES = 1024
"""Largest number of replies to all prompts of a request, each of which is sampled at the same time."""


class CompletionsWire(Wire):
    """The `Wire` of OpenAI's completions."""

    fields = OPENAI_FIELDS.union(
        NEUTRAL, ("prompt", "max_tokens", "min_tokens", "stop", "stop_token_ids", "n", "best_of", "logprobs")
    )

    def decode(self, body: Mapping[str, Any]) -> Call:
        """Parses the body of a completion."""
        settings = read_all(
            lambda: refuse_others(body, {**NEUTRAL, "best_of": (body.get("n") or 1,)}),
            lambda: read(body, "stream_options", dict),
            **sampling_of(body, "max_tokens"),
            stop_strings=lambda: stops(body, "stop"),
            top_logprobs=lambda: count(body, "logprobs", 0, MOST_LIKELY),
            min_new_tokens=lambda: count(body, "min_tokens", 0),
            stop_token_ids=lambda: _stop_token_ids(body),
            choices=lambda: count(body, "n", 1, MOST_CHOICES),
        )
        choices, prompts = settings.pop("choices") or 1, _prompts(body.get("prompt"))
        if len(prompts) * choices > MOST_REPLIES:
            raise bad(
                f"prompt has {len(prompts)} prompts and n is {choices}, which makes {len(prompts) * choices} replies, "
                f"but a request may have {MOST_REPLIES} at most: send several.",
                param="prompt",
            )
        return call_of(body, settings, prompts=prompts, choices=choices)

    def encode(self, call: Call, replies: Sequence[ChatReply], call_id: str, decode: Decode) -> dict[str, Any]:
        """Returns a `text_completion`."""
        choices = [
            _choice(call, index, reply, decode, str(reply.parsed.message["content"]))
            for index, reply in enumerate(replies)
        ]
        if call.body.get("return_token_ids"):
            for choice, reply in zip(choices, replies, strict=True):
                choice["prompt_token_ids"] = list(reply.prompt_token_ids)
        return {**_head(call, call_id), "choices": choices, "usage": token_usage(replies, call.choices)}

    def events(self, call: Call, call_id: str) -> EventStream:
        """Returns the stream of `text_completion` events."""
        return _Chunks(call, _head(call, call_id))

    def error(self, error: HttpError) -> dict[str, Any]:
        """Returns an error body in OpenAI's form."""
        return error_body(error)


class _Chunks(CompletionChunks):
    def start(self, read: int) -> Iterator[str]:
        yield from ()

    def piece(self, field: str, text: str, choice: int) -> Iterator[str]:
        yield self._of_choice(index=choice, text=text, logprobs=None, finish_reason=None)

    def finish(self, replies: Sequence[ChatReply], decode: Decode) -> Iterator[str]:
        for index, reply in enumerate(replies):
            yield self._of_choice(**_choice(self._call, index, reply, decode, ""))
        yield from self._end(replies)


def _prompts(given: Any) -> list[str | tuple[int, ...]]:
    """Returns the prompts of a body: a text or token ids, or a list of such."""
    several = isinstance(given, list) and any(isinstance(one, str | list) for one in given)
    prompts = []
    for one in given if several else [given]:
        if not isinstance(one, str | list) or not one:
            told = "prompt must be a text, or the token ids of one, or a list of such, and none of them empty."
            raise bad(told, param="prompt")
        prompts.append(one if isinstance(one, str) else _token_ids(one, "prompt"))
    return prompts


def _token_ids(given: Any, where: str) -> tuple[int, ...]:
    given = [] if given is None else given
    if not isinstance(given, list) or not all(type(token) is int and 0 <= token <= MAX_COUNT for token in given):
        raise bad(f"{where} must be token ids, whole numbers from 0 on.", param=where)
    return tuple(given)


def _stop_token_ids(body: Mapping[str, Any]) -> tuple[int, ...] | None:
    found = _token_ids(body.get("stop_token_ids"), "stop_token_ids")
    if len(found) > MAX_STOPS:
        told = f"stop_token_ids has {len(found)} ids, but it may have {MAX_STOPS} at most."
        raise bad(told, param="stop_token_ids")
    return found or None


def _head(call: Call, call_id: str) -> dict[str, Any]:
    return head_of(call, f"cmpl-{call_id}", "text_completion")


def _choice(call: Call, index: int, reply: ChatReply, decode: Decode, text: str) -> dict[str, Any]:
    stopped = reply.generation.stop_reason is StopReason.STOP
    choice = {
        "index": index,
        "text": text,
        "logprobs": None if call.body.get("logprobs") is None else _logprobs(reply, decode),
        "finish_reason": "stop" if stopped else "length",
    }
    if call.body.get("return_token_ids"):
        choice["token_ids"] = list(reply.generation.token_ids)
    return choice


def _logprobs(reply: ChatReply, decode: Decode) -> dict[str, Any]:
    tokens = [decode([token_id]) for token_id in reply.generation.token_ids]
    places = [0]
    for token in tokens:
        places.append(places[-1] + len(token))
    top_logprobs: list[dict[str, float]] = []
    for each in reply.generation.top_logprobs:
        top_logprobs.append({})
        for one, logprob in each:
            top_logprobs[-1].setdefault(decode([one]), logprob)  # of tokens with one text the likeliest
    return {
        "tokens": tokens,
        "token_logprobs": list(reply.generation.logprobs),
        "top_logprobs": top_logprobs or None,
        "text_offset": places[:-1],
    }
