"""The content of messages as clients write it: texts, and images."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollgrad.adapters.servers.wire import bad

IMAGE_KINDS = ("image_url", "input_image", "image")
"""Types of the parts of a message that are images: of OpenAI's two wires, and of Anthropic's."""


def content_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str | list[dict[str, str]]:
    """Returns a message's content: its text, or its parts where some are images, whose files are data URIs.

    Raises:
        HttpError: the content has another form.
    """
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return text_of(content, where, kinds)
    return [
        {"type": "image", "image": image_of(part, where)}
        if _is_image(part)
        else {"type": "text", "text": text_of([part], where, kinds)}
        for part in content
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_KINDS


def image_of(part: Mapping[str, Any], where: str) -> str:
    """Returns the data URI of an image, as OpenAI's or Anthropic's clients write it. Nothing else is read: a client
    must not make the server open its own files or fetch pages.

    Raises:
        HttpError: the image is something else.
    """
    source, url = part.get("source"), part.get("image_url")
    if isinstance(source, dict) and source.get("type") == "base64":
        written: Any = f"data:{source.get('media_type')};base64,{source.get('data')}"
    else:
        written = url.get("url") if isinstance(url, dict) else url
    if not isinstance(written, str) or not written.startswith("data:"):
        raise bad(
            f"{where} has an image without its content: send it in base64, as a data URI, for nothing is fetched here."
        )
    return written


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Returns the text of a message's content: a text, or a list of text parts.

    Raises:
        HttpError: the content has another form.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"{where} must be a text or a list of parts.")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        field = "refusal" if kind == "refusal" else "text"  # a model's words that OpenAI's clients send back
        if kind not in (*kinds, "refusal") or not isinstance(part.get(field), str):
            raise bad(f"{where} has a part of type {kind!r}, but only text is read there.")
        texts.append(part[field])
    return "".join(texts)
