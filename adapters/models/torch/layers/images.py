"""Forward passes of models that see images.

A model's own code computes the features of images and puts them in the place of placeholder tokens, in the order of the
tokens. This module tells it which tokens stand for which images, and gives it position ids.
Invariants: a pass over tokens without images is the text model's; a placeholder token that the policy sampled itself
stands for no image. Where processes share a batch, each computes the features of all its images, and hands those of its
own tokens to its language model. Does not own: reading images (`adapters/chat/image_files.py`).
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.layers.attention import AttentionPlan, backbone
from rollgrad.adapters.models.torch.layers.classifier import is_vision_language
from rollgrad.adapters.models.torch.layers.layout import Layout
from rollgrad.adapters.models.torch.layers.sequence_parallel import SequenceShare
from rollgrad.adapters.models.torch.layers.unread_positions import unread_positions
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.images import PlacedImages


def run_body(
    model: Any,
    tokens_BT: Tensor,
    positions: Tensor,
    plan: AttentionPlan,
    images: PlacedImages = (),
    share: SequenceShare | None = None,
    **settings: Any,
) -> Any:
    """Returns the output of a language model's body for tokens [B, T], which may be on another device.

    Args:
        model: a model with packed attention installed.
        tokens_BT: the tokens; with images, or a `share` of them, B is 1.
        positions: position ids [B, T], or [K, B, T] of a model with K numbers a position.
        plan: decides which tokens each token attends to.
        images: the images among the tokens of the only row.
        share: the tokens that this process computes; None is all.
        settings: other arguments of the model.
    """
    body, weight = backbone(model), next(model.parameters())
    tokens, places = (to_device(each, weight.device) for each in (tokens_BT, positions))
    arguments = {"use_cache": False, "attention_plan": plan, **settings}
    if not images:
        with unread_positions():
            return body(input_ids=_share(tokens, share), position_ids=_share(places, share), **arguments)
    real = tokens.clone()
    real[~placeholders(model, tokens[0], images)[None] & (tokens == body.config.image_token_id)] = 0
    tensors = joined_tensors(images, weight.device, weight.dtype)
    with _embedded_as(body, tokens), _divided(body, share):
        return body(input_ids=real, position_ids=places, **tensors, **arguments)


def placeholders(model: Any, tokens_T: Tensor, images: PlacedImages) -> Tensor:
    """Returns a mask [T] of the tokens that a model replaces by the features of `images`."""
    inside_T = torch.zeros(len(tokens_T), dtype=torch.bool)
    for placed in images:
        inside_T[placed.start : placed.stop] = True
    token: int = backbone(model).config.image_token_id
    return inside_T.to(tokens_T.device) & tokens_T.eq(token)


@contextmanager
def _embedded_as(body: Any, tokens: Tensor) -> Iterator[None]:
    """Makes a model embed `tokens` inside the block, whatever tokens it is given: it takes each placeholder that it is
    given for a part of an image."""
    handle = body.get_input_embeddings().register_forward_pre_hook(lambda module, given: (tokens,))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _divided(body: Any, share: SequenceShare | None) -> Iterator[None]:
    """Makes the language model of `body` compute this process's tokens alone inside the block, given all."""

    if share is None:
        yield
        return

    def shared(module: Any, arguments: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        own: dict[str, Any] = {"position_ids": _share(given["position_ids"], share)}
        own["inputs_embeds"] = share.of(given["inputs_embeds"][0])[None]
        if given.get("deepstack_visual_embeds") is not None:  # Qwen3-VL adds features of images to its first layers too
            seen_M = given["visual_pos_masks"][0]
            features, _ = share.actions(seen_M.nonzero()[:, 0])
            own["visual_pos_masks"] = share.of(seen_M)[None]
            own["deepstack_visual_embeds"] = [layer[features] for layer in given["deepstack_visual_embeds"]]
        return arguments, {**given, **own}

    handle = body.get_decoder().register_forward_pre_hook(shared, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _share(column: Tensor, share: SequenceShare | None) -> Tensor:
    """Returns this process's tokens of a column [..., T]."""
    return column if share is None else share.of(column.movedim(-1, 0)).movedim(0, -1)


def joined_tensors(images: PlacedImages, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the tensors of all images end to end, by the names of the model's arguments. Those of images with several
    parts are filled up with zeros, which models leave out."""
    names = images[0].image.tensors.keys()
    joined = {name: _stacked([placed.image.tensors[name] for placed in images]) for name in names}
    return {
        name: to_device(tensor.to(dtype) if tensor.is_floating_point() else tensor, device)
        for name, tensor in joined.items()
    }


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        lacking = [most - size for most, size in zip(shape, tensor.shape[1:], strict=True)]
        padded.append(functional.pad(tensor, [side for size in reversed(lacking) for side in (0, size)]))
    return torch.cat(padded)


def model_factory(config: Any, *, images: bool = False) -> Any:
    """Returns the class of transformers that loads a causal language model with these settings: another one if it also
    sees images, which for some (Qwen3.5) counts only with `images`."""
    import transformers

    text = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not (images and leaves_tower_out(config))
    sees = is_vision_language(config) and not text
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def leaves_tower_out(config: Any) -> bool:
    """Returns whether the files of a model have a tower for images that the class which loads it for texts has not:
    that of Qwen3.5 as a language model."""
    import transformers

    text, whole = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = type(config)
    return kind in text and kind in whole and text[kind] is not whole[kind]


def freeze_tower(model: Any) -> None:
    """Freezes what makes a language model's input of images: all of the model but its decoder and its embeddings."""
    if getattr(model.config, "vision_config", None) is None:
        return
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    of_text = {parameter for part in parts if part is not None for parameter in part.parameters()}
    for parameter in model.parameters():
        if parameter not in of_text:
            parameter.requires_grad_(False)


def batch_positions(model: Any, batch: PackedBatch, layout: Layout) -> Tensor | None:
    """Returns the model's position ids [K, 1, M] of a batch with images; None if its position is the number of tokens
    before a token, as in text."""
    if not batch.images_S or not has_own_positions(model):
        return None
    of_sequences = []
    for images, start, length in zip(batch.images_S, batch.starts_S.tolist(), batch.lengths_S.tolist(), strict=True):
        of_sequences.append(own_positions(model, batch.tokens_N[start : start + length], images))
    positions_KN = torch.cat(of_sequences, dim=1)
    positions_KM = torch.zeros(len(positions_KN), len(layout.tokens_M), dtype=torch.int64)
    positions_KM[:, layout.index_N] = positions_KN
    return positions_KM[:, None]


def has_own_positions(model: Any) -> bool:
    """Returns whether positions of a model depend on images: whether it has several numbers a position, such as the
    time, height and width of Qwen's."""
    return hasattr(backbone(model), "get_rope_index")


def own_positions(model: Any, tokens_T: Tensor, images: PlacedImages) -> Tensor:
    """Returns the position ids [K, T] of a sequence, of a model that `has_own_positions`."""
    if not images:
        return torch.arange(len(tokens_T)).expand(3, -1)
    body = backbone(model)
    known = inspect.signature(body.get_rope_index).parameters
    sizes = [name for name in images[0].image.tensors if name in known]  # not the pixels, which take megabytes
    positions_K1T, _ = body.get_rope_index(
        input_ids=tokens_T[None],
        mm_token_type_ids=placeholders(model, tokens_T, images).int()[None],
        **{name: _stacked([placed.image.tensors[name] for placed in images]) for name in sizes},
    )
    positions_KT: Tensor = positions_K1T[:, 0]
    return positions_KT
