"""Prompts with images as a vLLM behind a URL takes them: their files, and one placeholder for each, in whose place the
server puts the tokens that stand for the image.

Invariant: these are the tokens that the prompt has there, or its reply is refused; a placeholder that the policy itself
sampled stands for no image. Does not own: how an image is read (`adapters/chat/image_files.py`).
"""

import asyncio
from typing import Any

from attrs import evolve

from rollgrad.adapters.chat.image_files import portable
from rollgrad.domain.episodes.generation import GenerationRequest
from rollgrad.domain.episodes.images import Image
from rollgrad.domain.errors import ConfigurationError, DataError


async def data_uris(request: GenerationRequest) -> list[str]:
    """Returns the images of a request in data URIs, in their order.

    Raises:
        ImageError: one is too large as a file that every reader of images understands alike.
    """
    return list(await asyncio.gather(*(asyncio.to_thread(_data_uri, placed.image) for placed in request.images)))


def _data_uri(image: Image) -> str:
    return evolve(image, data=portable(image.data)).data_uri


def image_fields(request: GenerationRequest, uris: list[str], placeholder: int, features: str) -> dict[str, Any]:
    """Returns the fields of a request with images.

    Args:
        request: its images are those of `uris`.
        uris: the images, in data URIs.
        placeholder: token that stands for one image in what the server is sent.
        features: name of what shares the features of images; others compute them again.

    Raises:
        DataError: the policy sampled a placeholder before one of the images.
    """
    images = zip(request.images, uris, strict=True)
    return {
        "token_ids": _collapsed(request, placeholder),
        # By its uuid vLLM keeps an image's features, which are other ones when the tower has learned.
        "content_parts": [
            {"type": "image_url", "url": uri, "uuid": f"{placed.image.digest}-{features}"} for placed, uri in images
        ],
        "return_token_ids": True,
    }


def _collapsed(request: GenerationRequest, placeholder: int) -> list[int]:
    """Returns the prompt with one placeholder in the place of each image."""
    prompt = request.prompt_token_ids
    tokens: list[int] = []
    end = 0
    for placed in request.images:
        between = prompt[end : placed.start]
        if placeholder in between:  # the server takes the first that it finds for the next image
            raise DataError(
                f"The prompt has the token {placeholder}, which stands for images, before an image that it does not "
                "stand for, and servers cannot tell them apart: sample with the embedded engine, or with a vLLM that "
                "rollgrad starts."
            )
        tokens += [*between, placeholder]
        end = placed.stop
    return [*tokens, *prompt[end:]]


def check_expanded(answer: Any, request: GenerationRequest, url: str) -> None:
    """Checks that the server read the tokens and images of a request as they are.

    Raises:
        ConfigurationError: it did not.
    """
    theirs = answer.get("prompt_token_ids") or []
    found = (answer.get("mm_placeholders") or {}).get("image") or []
    places = [(place["offset"], place["offset"] + place["length"]) for place in found]
    if tuple(theirs) != request.prompt_token_ids or places != [(each.start, each.stop) for each in request.images]:
        raise ConfigurationError(
            f"The server {url} read {len(theirs)} tokens for a prompt with images that has "
            f"{len(request.prompt_token_ids)}, or others: it takes no images as vLLM 0.32 does, or another model's, so "
            "serve this model with vLLM 0.32 or later, or sample with the embedded engine."
        )
