"""Images in the answers of tools: whether a chat template writes them there, and reading them where it does.

Templates of some models write the answer of a tool as a text, or its parts that are texts alone. Does not own: which
tools there are, nor the tokens of images (`template_codec.py`).
"""

from collections.abc import Callable
from typing import Any

import structlog

from rollgrad.adapters.chat.image_files import image_bytes, png
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.domain.episodes.messages import IMAGE_MARK, ToolCall, assistant_message, tool_message
from rollgrad.domain.errors import DataError, RollgradError

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
"""A tool, such as one that answers with an image."""

log = structlog.get_logger()


def writes_tool_images(codec: TemplateCodec) -> bool:
    """Returns whether the template of a codec that renders images writes one in the answer of a tool."""
    import PIL.Image

    call = ToolCall(id="000000000", name="look", arguments={})
    answer = tool_message(call, IMAGE_MARK, [png(PIL.Image.new("RGB", (1, 1)))])
    try:
        codec.write([{"role": "user", "content": "Look!"}, assistant_message("", tool_calls=[call]), answer], [LOOK])
    except DataError:
        return False
    return True


def tool_image_reader(
    codec: TemplateCodec, error: Callable[[str], RollgradError], remedy: str
) -> Callable[[Any], bytes]:
    """Returns what reads an image of a tool's answer (`ToolEnvironment.read_image`). Where the template writes none,
    which is logged, it raises an `error` instead; `remedy` says what to do."""
    if writes_tool_images(codec):
        return image_bytes
    log.warning("images in the answers of tools are refused", reason="the chat template writes none there")

    def refused(image: Any) -> bytes:
        raise error(f"A tool answered with an image, but the chat template writes none in tools' answers: {remedy}.")

    return refused
