"""Files of images come from anywhere: what is none is a sentence, and nothing else is read or run."""

import io
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rollgrad.adapters.chat.image_files import LEAST_PIXELS, MOST_PIXELS, check_pixels, image_bytes, opened
from rollgrad.adapters.chat.pictures import check_vllm_images, named_images
from rollgrad.adapters.chat.tool_images import writes_tool_images
from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.episodes.messages import ToolCall, assistant_message, tool_message
from rollgrad.domain.errors import ConfigurationError, DataError
from tests.tiny_vision import codec_of, picture, save_tiny_vlm, tiny_vlm


@pytest.mark.parametrize("mode", ["CMYK", "F", "I", "YCbCr", "LA", "P"])
def test_a_decoded_image_of_any_colors_is_read(mode: str) -> None:
    assert opened(image_bytes(Image.new(mode, (20, 10)))).size == (20, 10)


@pytest.mark.parametrize("path", ["/dev/zero", "a\0b.png", "~nobody-of-this-name/a.png", "."])
def test_a_path_of_no_file_is_a_sentence(path: str) -> None:
    with pytest.raises(DataError, match=r"The image .* (is no file|cannot be read)"):
        image_bytes(path)


def test_no_program_is_run() -> None:
    written = io.BytesIO()
    Image.new("RGB", (20, 10)).save(written, format="EPS")
    with pytest.raises(DataError, match="PostScript, which is not run"):
        image_bytes(written.getvalue())


def wide(width: int, height: int) -> bytes:
    """A file of few bytes: the pixels of a header, with none behind it."""
    written = io.BytesIO()
    Image.new("1", (1, 1)).save(written, format="PNG")
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    chunk = b"IHDR" + size + written.getvalue()[24:29]
    return written.getvalue()[:12] + chunk + zlib.crc32(chunk).to_bytes(4, "big") + written.getvalue()[33:]


def test_pixels_of_several_images_are_bounded_by_their_headers() -> None:
    check_pixels([wide(9_000, 9_000), wide(9_000, 9_000)])
    for images in ([wide(9_000, 9_000)] * 3, [picture((200, 0, 0))] * (MOST_PIXELS // LEAST_PIXELS + 1)):
        with pytest.raises(DataError, match="more than 178,956,970 pixels together"):
            check_pixels(images)
    with pytest.raises(DataError, match="cannot be read"):
        check_pixels([b"none"])


def test_whatever_a_decoder_raises_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("of a broken file")

    monkeypatch.setattr(Image.Image, "convert", broken)
    for source in (picture((200, 0, 0)), Image.new("RGB", (20, 10))):
        with pytest.raises(DataError, match=r"cannot be read: .*of a broken file"):
            image_bytes(source)


def test_adapters_that_vllm_does_not_compute_beside_images_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.is_torchvision_available", lambda: True)
    path = save_tiny_vlm("llava_onevision", tmp_path)
    check_vllm_images(path)
    with pytest.raises(ConfigurationError, match=r"llava_onevision, beside .*leave out --actor\.lora\.sync"):
        check_vllm_images(path, adapters=True)


def test_logs_name_images_and_hold_none() -> None:
    def message(*parts: Mapping[str, Any]) -> dict[str, Any]:
        return {"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}

    path = {"type": "image", "image": "a.png"}
    files = [
        {"type": "image", "image": b"file"},
        {"type": "image", "image": {"bytes": b"file", "path": None}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    (logged,) = named_images([message(path, *files)])
    assert logged == message(path, *[{"type": "image"}] * 3)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    "written",
    [
        "{{ message['content'] }}",
        "{{ message['content'] | tojson }}",
        "{{ message['content'][0]['text'] }}",
        "{{ message['content'].index('text') }}",  # which raises ValueError for a list
    ],
)
def test_a_template_that_writes_answers_of_tools_as_texts_is_found_out(written: str) -> None:
    _, processor = tiny_vlm("qwen2_5_vl")
    text_of_tools = f"{{% if tools and message['role'] == 'tool' %}}{written}{{% elif message['content'] is string %}}"
    template = processor.tokenizer.chat_template.replace("{% if message['content'] is string %}", text_of_tools)
    assert template != processor.tokenizer.chat_template
    processor.tokenizer.chat_template = template
    assert not writes_tool_images(codec_of(processor))


@pytest.mark.parametrize("knows_tools", [False, True])
def test_answers_of_tools_show_their_images(knows_tools: bool) -> None:
    """Also where the tools are described in the system's message, and answers are the user's; images stand where the
    answers have them, whether the conversation is continued or rendered anew."""
    _, processor = tiny_vlm("qwen2_5_vl")
    if knows_tools:
        processor.tokenizer.chat_template = "{% if tools %}{% endif %}" + processor.tokenizer.chat_template
    codec = codec_of(processor)
    assert writes_tool_images(codec)
    calls = [ToolCall(id=f"{number}", name="look", arguments={}) for number in range(2)]
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look!"}]
    called = assistant_message("", tool_calls=calls)
    red, blue = picture((200, 0, 0)), picture((0, 0, 200))
    answers = [tool_message(calls[0], "here [image]!", [red]), tool_message(calls[1], "[image]", [blue])]
    whole = codec.render([*asked, called, *answers], [TOOL])
    assert [placed.image.data for placed in whole.images] == [red, blue]
    assert ("<tool_response>" in whole.text) != knows_tools

    sampled = codec.encode("<|im_end|>")
    added = codec.continued([*asked, called], answers, [TOOL], reply_token_ids=sampled)
    assert added is not None

    def texts(token_ids: tuple[int, ...], images: PlacedImages) -> list[tuple[str, str]]:
        """The text before each image, and that of its own tokens."""
        return [
            (
                codec.decode(token_ids[: place.start])[-6:],
                codec.decode(token_ids[place.start : place.stop], special_tokens=True),
            )
            for place in images
        ]

    assert texts(added.token_ids, added.images) == texts(whole.token_ids, whole.images)
    assert whole.token_ids[-len(added.token_ids) :] == added.token_ids
