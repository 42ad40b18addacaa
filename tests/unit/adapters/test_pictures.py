"""Files of images come from anywhere: what is none is a sentence, and nothing else is read or run."""

import io
from collections.abc import Mapping
from typing import Any

import pytest
from PIL import Image

from rollgrad.adapters.chat.pictures import image_bytes, named_images, opened
from rollgrad.domain.errors import DataError
from tests.tiny_vision import picture


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


def test_whatever_a_decoder_raises_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("of a broken file")

    monkeypatch.setattr(Image.Image, "convert", broken)
    for source in (picture((200, 0, 0)), Image.new("RGB", (20, 10))):
        with pytest.raises(DataError, match=r"cannot be read: .*of a broken file"):
            image_bytes(source)


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
