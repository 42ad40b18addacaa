"""Images in messages, and their rendering by a model's processor.

Invariant: the tokens that stand for an image, and its tensors, are those of the processor itself. Does not own: files
of images (`image_files.py`), the text around images (`template_codec.py`), nor what a model makes of them
(`adapters/models/torch/layers/images.py`).
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import frozen
from torch import Tensor

from rollgrad.adapters.chat.image_files import blank, image_bytes, opened
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.episodes.images import Image, PlacedImage, PlacedImages
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.errors import CheckpointError, ConfigurationError, ImageError, MissingExtraError

IMAGE_PARTS = ("image", "image_url")
"""Types of the parts of a message that hold an image."""

NOT_COMPARED = ("gemma3",)
"""Types of models whose tokens of an image see each other, which not all of vLLM's attention computes; those of Gemma 4
do so by a setting."""

WITHOUT_ADAPTERS = ("llava_onevision",)
"""Types of models with images beside which vLLM computes no adapters (its classes without `SupportsLoRA`)."""

VIDEO_PART = "video_processor"
"""Name of a processor's part for videos, which transformers makes with torchvision alone."""

OF_TEXT = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
"""Names of the results of a processor that are of a text."""


@frozen(kw_only=True)
class RenderedImage:
    """An image, and the text of the tokens that stand for it."""

    image: Image
    text: str


class ImageRenderer:
    """Renders images by `processor`, a transformers processor of a model that sees images."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.mark: str = processor.image_token
        """Text that a chat template writes in the place of an image."""
        self.mark_token: int = processor.tokenizer.convert_tokens_to_ids(self.mark)
        """That text's token."""
        self.settings = hashlib.sha256(processor.to_json_string().encode()).digest()
        """Hash of what the processor makes of images: equal ones make equal tensors."""

    def inputs(self, text: str, data: bytes) -> dict[str, Tensor]:
        """Returns the model's arguments for a text with one marked image, as the processor makes them."""
        found = self._processor(images=[opened(data)], text=[text], return_tensors="pt", add_special_tokens=False)
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def sequence(self, text: str, data: bytes) -> tuple[tuple[int, ...], PlacedImages]:
        """Returns the same text as tokens, and the image among them."""
        rendered = self.render(data)
        before, after = text.split(self.mark)
        encoded = self._processor.tokenizer(
            before + rendered.text + after, add_special_tokens=False, return_offsets_mapping=True
        )
        places = placed_tokens(encoded["offset_mapping"], [(len(before), len(before) + len(rendered.text))])
        ((start, stop),) = places
        return tuple(encoded["input_ids"]), (PlacedImage(image=rendered.image, start=start, stop=stop),)

    def render(self, data: bytes) -> RenderedImage:
        """Returns an image from the bytes of its file.

        Raises:
            ImageError: it is none, or the processor refuses it.
        """
        picture = opened(data)
        size = " x ".join(map(str, picture.size))
        with foreign_code(
            lambda words: ImageError(f"The model's processor refuses an image of {size} pixels: {words}")
        ):
            found = self._processed([picture])
            ((replacement,),) = found["text_replacement_offsets"]
        tensors = {name: value for name, value in found.items() if name not in OF_TEXT and isinstance(value, Tensor)}
        digest = hashlib.sha256(self.settings + data).hexdigest()
        return RenderedImage(image=Image(digest=digest, data=data, tensors=tensors), text=replacement["replacement"])

    def check_count(self, images: int) -> None:
        """Checks that a text may have `images` images, each of which is rendered by itself.

        Raises:
            ImageError: it has several, which the processor renders in another way than one that is alone.
        """
        if images > 1 and not self._alike:
            raise ImageError(
                f"There are {images} images, which the model's processor renders together, in another way than one "
                "that is alone: one image a prompt is what is computed for this model."
            )

    @cached_property
    def _alike(self) -> bool:
        """Whether an image is rendered alike alone and among several."""
        picture = opened(blank())
        ((alone,),), (several,) = (
            self._processed(pictures)["text_replacement_offsets"] for pictures in ([picture], [picture, picture])
        )
        return all(each["replacement"] == alone["replacement"] for each in several)

    def _processed(self, pictures: Sequence[Any]) -> Any:
        """Returns what the processor makes of the images of one text, which has nothing else."""
        return self._processor(
            images=[pictures],
            text=[self.mark * len(pictures)],
            return_tensors="pt",
            return_text_replacement_offsets=True,
            add_special_tokens=False,
        )


def placed_tokens(borders: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the tokens (the first, and the one after the last) of each span of characters; `borders` are the
    characters of each token."""
    starts, stops = [start for start, _ in borders], [stop for _, stop in borders]
    return [(bisect_left(starts, first), bisect_left(stops, last) + 1) for first, last in spans]


def has_images(message: Message) -> bool:
    """Returns whether a part of a message is an image."""
    return image_count(message) > 0


def image_count(message: Message) -> int:
    """Returns the number of a message's parts that are images."""
    content = message.get("content")
    return sum(map(is_image, content)) if isinstance(content, list) else 0


def is_image(part: Any) -> bool:
    """Returns whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def bare(message: Message) -> Message:
    """Returns a message with a bare part in the place of each image."""
    if not has_images(message):
        return message
    return {**message, "content": [{"type": "image"} if is_image(part) else part for part in message["content"]]}


def image_sources(messages: Sequence[Message]) -> list[Any]:
    """Returns where the images of messages are, in their order."""
    parts = [part for message in messages if has_images(message) for part in message["content"]]
    return [_source(part) for part in parts if is_image(part)]


def with_sources(message: Message, change: Callable[[Any], Any]) -> Message:
    """Returns a message with images, whose sources are what `change` makes of them."""
    parts = [{"type": "image", "image": change(_source(p))} if is_image(p) else p for p in message["content"]]
    return {**message, "content": parts}


def named_images(messages: Sequence[Message]) -> list[Message]:
    """Returns messages with a bare part in the place of each image that is no path but a file's content, for logs."""
    return [
        {**message, "content": [{"type": "image"} if _is_content(part) else part for part in message["content"]]}
        if has_images(message)
        else message
        for message in messages
    ]


def _is_content(part: Any) -> bool:
    source = _source(part) if is_image(part) else ""
    return not isinstance(source, str | Path) or str(source).startswith("data:")


def without_images(messages: Sequence[Message]) -> tuple[list[Message], list[bytes]]:
    """Returns the messages with a bare part in the place of each image, and the images' files in their order.

    Raises:
        ImageError: an image cannot be read.
    """
    return [*map(bare, messages)], [image_bytes(source) for source in image_sources(messages)]


def _source(part: Mapping[str, Any]) -> Any:
    """Returns where the image of a part is, as OpenAI's clients or transformers write it."""
    url = part.get("image_url")
    written = (part.get(name) for name in ("image", "path", "url", "base64"))
    return next((value for value in written if value is not None), url.get("url") if isinstance(url, Mapping) else url)


def load_processor(name_or_path: str, tokenizer: Any, *, flag: str) -> Any:
    """Returns the processor of a model that sees images, with `tokenizer` as its tokenizer. Where torchvision is not
    installed it is without its part for videos.

    Raises:
        CheckpointError: the model has none; `flag` names it.
    """
    from transformers.models.auto.processing_auto import AutoProcessor
    from transformers.utils import is_torchvision_available

    with foreign_code(
        lambda words: CheckpointError(
            f"{flag} is {name_or_path!r}, whose processor of images cannot be loaded: {words}"
        )
    ):
        if is_torchvision_available():
            processor = AutoProcessor.from_pretrained(name_or_path)
        else:
            kind = _processor_class(name_or_path)
            # SmolVLM's processor requires the argument.
            absent = {VIDEO_PART: None} if VIDEO_PART in kind.get_attributes() else {}
            processor = without_videos(kind).from_pretrained(name_or_path, **absent)
    if getattr(processor, "image_token", None) is None:
        raise CheckpointError(
            f"{flag} is {name_or_path!r}, whose {type(processor).__name__} takes no images: name a model that sees "
            "images, or leave --data.image_key out."
        )
    processor.tokenizer = tokenizer
    return processor


def sees_images(name_or_path: str) -> bool:
    """Returns whether a model has a part for images, by its settings."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(name_or_path)
    except (OSError, ValueError):  # the tokenizer alone of a server's model, or one that transformers does not know
        return False
    return type(config) in transformers.PROCESSOR_MAPPING and getattr(config, "vision_config", None) is not None


def check_compared(name_or_path: str) -> None:
    """Checks that vLLM computes the images of a model's prompts as the trainer does, as far as is known.

    Raises:
        ConfigurationError: it does not.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(name_or_path)
    kind = config.model_type
    if kind in NOT_COMPARED or getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision":
        raise ConfigurationError(
            f"vLLM samples from {name_or_path!r}, a {kind}, whose images it has not been shown to compute as the "
            "trainer does: sample with the embedded engine (--rollout.engine embedded), or leave out --data.image_key."
        )


def check_vllm_images(name_or_path: str, *, adapters: bool = False) -> None:
    """Checks that a vLLM in this environment can be given the images of a model's prompts, and its `adapters` without
    its weights.

    Raises:
        ConfigurationError: it computes them otherwise than the trainer, as far as is known, or takes no adapters.
        MissingExtraError: it makes the whole processor, whose part for videos needs a package that is not installed.
    """
    import transformers
    from transformers.utils import is_torchvision_available

    check_compared(name_or_path)
    kind = transformers.AutoConfig.from_pretrained(name_or_path).model_type
    if adapters and kind in WITHOUT_ADAPTERS:
        raise ConfigurationError(
            f"actor.lora.sync is adapter and the model is {name_or_path!r}, a {kind}, beside which vLLM computes no "
            "adapters: leave out --actor.lora.sync."
        )
    if not is_torchvision_available() and VIDEO_PART in _processor_class(name_or_path).get_attributes():
        raise MissingExtraError(
            f"vLLM makes the whole processor of {name_or_path!r}, whose part for videos needs torchvision: pip install "
            "torchvision, or sample with the embedded engine (--rollout.engine embedded)."
        )


def _processor_class(name_or_path: str) -> Any:
    """Returns transformers' class of a model's processor."""
    import transformers
    from transformers.models.auto.processing_auto import processor_class_from_name

    kind = transformers.PROCESSOR_MAPPING[type(transformers.AutoConfig.from_pretrained(name_or_path))]
    return processor_class_from_name(kind) if isinstance(kind, str) else kind


def without_videos(kind: Any) -> Any:
    """Returns a class of processors that needs no part for videos."""

    def attributes(cls: Any) -> list[str]:
        return [name for name in kind.get_attributes() if name != VIDEO_PART]

    return type(kind.__name__, (kind,), {"get_attributes": classmethod(attributes), "__init__": kind.__init__})
