"""OpenAI's `POST /v1/chat/completions`: bodies, chunks and errors.

Settings that are not supported (penalties, biases) are refused with one sentence, not ignored.
`return_token_ids` adds the token ids of prompt and reply, as vLLM does.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollgrad.adapters.servers.content import content_of, text_of
from rollgrad.adapters.servers.guard import HttpError, error_body
from rollgrad.adapters.servers.sampling_fields import read_all, refuse_others, sampling_of, stops
from rollgrad.adapters.servers.wire import (
    OPENAI_FIELDS,
    Call,
    Decode,
    EventStream,
    Wire,
    arguments_of,
    bad,
    call_of,
    calls_of,
    count,
    each,
    messages_of,
    read,
    text_schema,
    tool_of,
    tools_and_form,
    usage_of,
)
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.messages import Message, call_entry

SHAPING: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "thinking_token_budget": (),
    "logits_processors": ([],),
    "structured_outputs": (),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
}
"""Settings of both completions, some of them vLLM's, with the values that change nothing."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **SHAPING,
    "ignore_eos": (False,),
    "functions": ([],),
    "modalities": (["text"],),
    "web_search_options": (),
    "echo": (False,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "documents": ([],),
}
"""Settings with the values that change nothing; any other is refused."""
MOST_CHOICES = 128
MOST_LIKELY = 20
"""Largest number of likely tokens at each place, OpenAI's."""
DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": keep-alive\n\n"
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")


class OpenAIWire(Wire):
    """The `Wire` of OpenAI's chat completions."""

    fields = OPENAI_FIELDS.union(
        NEUTRAL,
        ("messages", "max_completion_tokens", "max_tokens", "stop", "n"),
        ("logprobs", "response_format", "reasoning_effort"),
    )

    def decode(self, body: Mapping[str, Any]) -> Call:
        """Parses the body of a chat completion."""
        settings = read_all(
            lambda: refuse_others(body, NEUTRAL),
            lambda: read(body, "stream_options", dict),
            **sampling_of(body, "max_completion_tokens", "max_tokens"),
            stop_strings=lambda: stops(body, "stop"),
            top_logprobs=lambda: _top_logprobs(body),
            choices=lambda: count(body, "n", 1, MOST_CHOICES),
        )
        choices = settings.pop("choices") or 1
        messages = messages_of(body)
        described = read(body, "response_format", dict, {"type": "text"})
        schema = text_schema(described, "response_format", within="json_schema")
        tools, form = tools_and_form(body, _tool, schema, within="function")
        conversation = each("messages", messages, _message)
        return call_of(body, settings, messages=conversation, tools=tools, form=form, choices=choices)

    def encode(self, call: Call, replies: Sequence[ChatReply], call_id: str, decode: Decode) -> dict[str, Any]:
        """Returns a `chat.completion`."""
        answer: dict[str, Any] = {
            **head_of(call, f"chatcmpl-{call_id}", "chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": _outgoing(reply.parsed.message),
                    "finish_reason": _finish_reason(reply),
                    "logprobs": _logprobs(reply, decode) if call.body.get("logprobs") else None,
                }
                for index, reply in enumerate(replies)
            ],
            "usage": token_usage(replies, call.choices),
        }
        if call.body.get("return_token_ids"):
            answer["prompt_token_ids"] = list(replies[0].prompt_token_ids)
            for choice, reply in zip(answer["choices"], replies, strict=True):
                choice["token_ids"] = list(reply.generation.token_ids)
        return answer

    def events(self, call: Call, call_id: str) -> EventStream:
        """Returns the stream of `chat.completion.chunk` events."""
        return _Chunks(call, head_of(call, f"chatcmpl-{call_id}", "chat.completion.chunk"))

    def error(self, error: HttpError) -> dict[str, Any]:
        """Returns an error body in OpenAI's form."""
        return error_body(error)


class CompletionChunks(EventStream):
    """The parts that streams of both of OpenAI's completions share; every chunk begins with `head`."""

    def __init__(self, call: Call, head: Mapping[str, Any]) -> None:
        self._call, self._head = call, head

    def failed(self, error: HttpError) -> Iterator[str]:
        """Yields the error."""
        yield _event(error_body(error))

    def keep_alive(self) -> str:
        """Returns a comment."""
        return KEEP_ALIVE

    def _of_choice(self, **choice: Any) -> str:
        return _event({**self._head, "choices": [choice]})

    def _end(self, replies: Sequence[ChatReply]) -> Iterator[str]:
        if (self._call.body.get("stream_options") or {}).get("include_usage"):
            yield _event({**self._head, "choices": [], "usage": token_usage(replies, self._call.choices)})
        yield DONE


class _Chunks(CompletionChunks):
    def start(self, read: int) -> Iterator[str]:
        for choice in range(self._call.choices):
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def piece(self, field: str, text: str, choice: int) -> Iterator[str]:
        yield self._chunk(choice, {field: text})

    def finish(self, replies: Sequence[ChatReply], decode: Decode) -> Iterator[str]:
        for index, reply in enumerate(replies):
            calls = _outgoing_calls(reply.parsed.message)
            if calls:
                yield self._chunk(index, {"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]})
            extra: dict[str, Any] = {}
            if self._call.body.get("logprobs"):
                extra["logprobs"] = _logprobs(reply, decode)
            if self._call.body.get("return_token_ids"):
                extra["token_ids"] = list(reply.generation.token_ids)
            yield self._chunk(index, {}, finish_reason=_finish_reason(reply), **extra)
        yield from self._end(replies)

    def _chunk(self, index: int, delta: Mapping[str, Any], finish_reason: str | None = None, **extra: Any) -> str:
        return self._of_choice(index=index, delta=delta, finish_reason=finish_reason, **extra)


def head_of(call: Call, answer_id: str, kind: str) -> dict[str, Any]:
    """Returns the fields with which an answer, and each chunk of one, begins."""
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": call.model}


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _message(message: Any, index: int) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, dict) or message.get("role") not in KNOWN_ROLES:
        raise bad(f"{where} must be an object whose role is one of {', '.join(KNOWN_ROLES)}.")
    role = "system" if message["role"] == "developer" else message["role"]
    reads = text_of if role in ("assistant", "system") else content_of
    result: dict[str, Any] = {"role": role, "content": reads(message.get("content"), f"{where}.content")}
    if message.get("tool_calls"):
        result["tool_calls"] = [_call(call, where) for call in read(message, "tool_calls", list)]
    for name in ("tool_call_id", "name", "reasoning_content"):
        value = read(message, name, str)
        if value:
            result[name] = value
    return result


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(f"{where}.tool_calls has a call without function.name.")
    return call_entry(str(call.get("id", "")), function["name"], arguments_of(function.get("arguments") or "{}"))


def _top_logprobs(body: Mapping[str, Any]) -> int | None:
    """Returns how many of the most likely tokens a client wants to see.

    Raises:
        HttpError: too many, or the client wants no log-probs.
    """
    value = count(body, "top_logprobs", 0, MOST_LIKELY)
    if value and not body.get("logprobs"):
        raise bad("top_logprobs is set, but logprobs is not: set logprobs to true.", param="top_logprobs")
    return value


def _tool(tool: Any, index: int) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(f"tools[{index}] must be of type function, with function.name: there are no others here.")
    return tool_of(function, "parameters")


def _outgoing(message: Message) -> dict[str, Any]:
    calls = _outgoing_calls(message)
    result: dict[str, Any] = {"role": "assistant", "content": message.get("content") or (None if calls else "")}
    if calls:
        result["tool_calls"] = calls
    if message.get("reasoning_content"):
        result["reasoning_content"] = message["reasoning_content"]
    return result


def _outgoing_calls(message: Message) -> list[dict[str, Any]]:
    return [call_entry(*call) for call in calls_of(message)]


def _finish_reason(reply: ChatReply) -> str:
    if reply.generation.stop_reason is not StopReason.STOP:
        return "length"
    return "tool_calls" if reply.parsed.message.get("tool_calls") else "stop"


def token_usage(replies: Sequence[ChatReply], choices: int) -> dict[str, Any]:
    """Returns the tokens of the prompts and of all replies, `choices` to each prompt in turn, by OpenAI's names, and
    those of the prompts that the engine had kept, if it says so."""
    prompt, completion = usage_of(replies, choices)
    kept = [reply.generation.kept for reply in replies[::choices] if reply.generation.kept is not None]
    details = {"prompt_tokens_details": {"cached_tokens": sum(kept)}} if kept else {}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **details}


def _logprobs(reply: ChatReply, decode: Decode) -> dict[str, Any]:
    return {"content": told_logprobs(reply, decode)}


def told_logprobs(reply: ChatReply, decode: Decode) -> list[dict[str, Any]]:
    """Returns each token of a reply with its log-prob, and the likeliest in its place if they were asked for."""
    generation = reply.generation
    content = [
        {**_token(token_id, logprob, decode), "top_logprobs": []}
        for token_id, logprob in zip(generation.token_ids, generation.logprobs, strict=True)
    ]
    for entry, top_logprobs in zip(content, generation.top_logprobs, strict=False):
        entry["top_logprobs"] = [_token(*pair, decode) for pair in top_logprobs]
    return content


def _token(token_id: int, logprob: float, decode: Decode) -> dict[str, Any]:
    text = decode([token_id])
    part = "\ufffd" in text  # a part of a character, whose bytes are not known here
    return {"token": text, "logprob": logprob, "bytes": None if part else list(text.encode())}
