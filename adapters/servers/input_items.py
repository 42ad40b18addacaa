"""Items of OpenAI's responses that stand for a conversation, as `GET /v1/responses/{id}/input_items` lists them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollgrad.adapters.servers.wire import bad
from rollgrad.domain.episodes.messages import Message

PAGE_ITEMS, MOST_ITEMS = 20, 100
"""Items of a page, unless a client asks for others, and at most; both are OpenAI's."""

Item = dict[str, Any]


def input_items(name: str, said: Sequence[Message]) -> list[Item]:
    """Returns the items of a conversation, in its order; `name` is the id of its response, from which theirs are made,
    so that a client finds the next page by one of them."""
    items = [item for message in said for item in _items(message)]
    kinds = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
    return [{"id": f"{kinds[item['type']]}_{name}_{place}", **item} for place, item in enumerate(items)]


def page_of(items: Sequence[Item], asked: Mapping[str, str]) -> dict[str, Any]:
    """Returns a page of items, the latest first unless `order` is `asc`: the `limit` ones behind the item `after`.

    Raises:
        HttpError: a parameter is none that OpenAI knows, or there is no such item.
    """
    order, limit, after = asked.get("order", "desc"), asked.get("limit", str(PAGE_ITEMS)), asked.get("after")
    if order not in ("asc", "desc"):
        raise bad(f"order is {order[:60]!r}, but it must be asc or desc.", param="order")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MOST_ITEMS:
        raise bad(f"limit is {limit[:60]!r}, but it must be a number from 1 to {MOST_ITEMS}.", param="limit")
    ordered = [*items] if order == "asc" else [*reversed(items)]
    places = {item["id"]: place for place, item in enumerate(ordered)}
    if after is not None and after not in places:
        raise bad(f"after is {after[:60]!r}, but no item of this response has that id.", param="after")
    start = 0 if after is None else places[after] + 1
    stop = start + int(limit)
    page = ordered[start:stop]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": stop < len(ordered)}


def _items(message: Message) -> list[Item]:
    role, content = message["role"], message.get("content") or ""
    if role == "tool":
        output = content if isinstance(content, str) else _parts(content)
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}]
    if role != "assistant":
        return [{"type": "message", "role": role, "status": "completed", "content": _parts(content)}]
    items: list[Item] = []
    if thought := message.get("reasoning_content"):
        items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]})
    if content:
        said: Item = {"type": "output_text", "text": content, "annotations": []}
        items.append({"type": "message", "role": role, "status": "completed", "content": [said]})
    for call in message.get("tool_calls") or ():
        named, arguments = call["function"]["name"], call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        head = {"type": "function_call", "call_id": call["id"], "status": "completed"}
        items.append({**head, "name": named, "arguments": text})
    return items


def _parts(content: Any) -> list[Item]:
    """Returns the parts of a text, or of texts and images."""
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    return [
        {"type": "input_image", "image_url": part["image"], "detail": "auto"}
        if part["type"] == "image"
        else {"type": "input_text", "text": part["text"]}
        for part in content
    ]
