"""Prompts with images as vLLM's input, whose tokens are the trainer's.

vLLM's own processor makes what the model takes of each image, from its file, and the tokens that stand for it.
Invariant: these are the tokens that the prompt has in the image's place, or the request is refused; a placeholder that
the policy itself sampled stands for no image.
Does not own: how an image is read (`adapters/chat/image_files.py`).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollgrad.adapters.chat.image_files import opened
from rollgrad.domain.episodes.images import PlacedImage, PlacedImages
from rollgrad.domain.errors import ConfigurationError


async def engine_input(llm: Any, tokens: Sequence[int], images: PlacedImages, salt: str) -> Any:
    """Returns vLLM's input of a prompt.

    Args:
        llm: an `AsyncLLM`.
        tokens: the prompt, with all tokens that stand for images.
        images: images among the tokens.
        salt: tells requests that share keys, values and features of images from others.

    Raises:
        ConfigurationError: vLLM has other tokens for an image than the model's processor.
    """
    prompt = list(tokens)
    found = await asyncio.gather(*(_of_image(llm, prompt, placed) for placed in images))

    from vllm.inputs.engine import mm_input, tokens_input
    from vllm.multimodal.inputs import MultiModalKwargsItems

    if not images:
        return tokens_input(prompt, cache_salt=salt)
    return mm_input(
        prompt_token_ids=prompt,
        mm_kwargs=MultiModalKwargsItems({"image": [item for item, _ in found]}),
        # By this name vLLM keeps an image's features, which are other ones when the tower has learned.
        mm_hashes={"image": [f"{placed.image.digest}-{salt}" for placed in images]},
        mm_placeholders={"image": [place for _, place in found]},
        cache_salt=salt,
    )


async def _of_image(llm: Any, prompt: list[int], placed: PlacedImage) -> tuple[Any, Any]:
    """Returns vLLM's item of an image, which its cache has for all requests with that image, and its place in the
    prompt."""
    config, image = llm.model_config.hf_config, placed.image
    asked = {
        "prompt_token_ids": [config.image_token_id],
        "multi_modal_data": {"image": [await asyncio.to_thread(opened, image.data)]},
        "multi_modal_uuids": {"image": [image.digest]},
    }
    # Its other cache knows what its processes have kept, unless a request ended on its way to them.
    (rendered,) = await llm.renderer.render_cmpl_async([asked], skip_mm_cache=True)
    theirs, mine = rendered["prompt_token_ids"], prompt[placed.start : placed.stop]
    if theirs != mine:
        raise ConfigurationError(
            f"vLLM has {len(theirs)} tokens for an image that the model's processor has {len(mine)} for, or others: it "
            "computes this model's images differently, so sample with --rollout.engine embedded."
        )
    (item,), (place,) = rendered["mm_kwargs"]["image"], rendered["mm_placeholders"]["image"]
    return item, replace(place, offset=placed.start + place.offset)
