"""Check that packed passes over images compute the same as a transformers model, and what of a model images need.

Two images of different sizes, each between two texts, are tokenised by the model's processor and computed by the model
itself, one after the other; then in one pack, the first twice. The comparison costs five passes of the tower and the
language model over a small image.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from rollgrad.adapters.models.torch.heads.logits import logit_form
from rollgrad.adapters.models.torch.layers.attention import install_attention, use_attention
from rollgrad.adapters.models.torch.layers.image_attention import make_plan
from rollgrad.adapters.models.torch.layers.images import batch_positions, run_body
from rollgrad.adapters.models.torch.layers.layout import build_layout
from rollgrad.adapters.models.torch.layers.padded import is_padded
from rollgrad.adapters.models.torch.loading.compatibility import TOLERANCE, foreign_code, logit_gap
from rollgrad.adapters.models.torch.loading.weight_shards import together, whole_layers
from rollgrad.domain.batches.examples import pack_sequences
from rollgrad.domain.episodes.examples import WeightedTokens
from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.errors import ConfigurationError, DataError

SIZES = ((48, 32), (32, 64))
"""Width and height of the two images, in pixels; processors enlarge them to what they need."""


class Renderer(Protocol):
    """Renders texts with images, as the model's processor does and as prompts are rendered."""

    mark: str

    def inputs(self, text: str, data: bytes) -> dict[str, Tensor]:
        """Returns the model's arguments for a text with one image."""
        ...

    def sequence(self, text: str, data: bytes) -> tuple[tuple[int, ...], PlacedImages]:
        """Returns the same text as tokens and the image among them."""
        ...


def check_images(model: Any, renderer: Renderer, name_or_path: str, flag: str) -> None:
    """Compares passes over images.

    Args:
        model: one with packed attention installed; processes that divide its weights all compare.
        renderer: renderer with the model's processor.
        name_or_path: name or directory of the model, which `flag` sets.
        flag: command-line flag to name in errors.

    Raises:
        ConfigurationError: tokens or logits differ, or the model's code fails.
    """
    try:
        if getattr(model.config, "image_token_id", None) is None:
            raise ConfigurationError("it sees no images")
        if is_padded(model):
            raise ConfigurationError("it is computed with padding, which images are not")
        with whole_layers(model):
            _compare(model, renderer)
    except (ConfigurationError, DataError) as error:
        raise ConfigurationError(
            f"{flag} is {name_or_path!r}, a {type(model).__name__} whose images packed training does not compute as it "
            f"does ({str(error).rstrip('.')}): choose another {flag}, or leave out --data.image_key."
        ) from error


def _compare(model: Any, renderer: Renderer) -> None:
    files = [_picture(*size) for size in SIZES]
    texts = [f"What is {renderer.mark} to see?", f"And what in {renderer.mark}, then?"]
    pairs = list(zip(texts, files, strict=True))
    with torch.no_grad(), foreign_code():
        expected = []
        with _own_attention(model):
            for text, file in pairs:
                inputs = {name: value.to(model.device) for name, value in renderer.inputs(text, file).items()}
                expected.append((inputs["input_ids"][0].tolist(), model(**inputs, use_cache=False).logits[0].float()))
        found = [renderer.sequence(text, file) for text, file in pairs]
        for (tokens, _), (ids, _) in zip(found, expected, strict=True):
            if list(tokens) != ids:
                raise ConfigurationError("tokens differ from its processor's")
        gap = max(
            logit_gap(mine_TV, theirs_TV)
            for mine_TV, (_, theirs_TV) in zip(
                _packed_logits(model, [*found, found[0]]), [*expected, expected[0]], strict=True
            )
        )
    allowed = TOLERANCE[next(model.parameters()).dtype]
    if not gap <= allowed:
        raise ConfigurationError(
            f"logits of packed sequences differ from its own by {gap:.2g} of their spread, more than rounding's "
            f"{allowed:.2g}"
        )


def _packed_logits(model: Any, sequences: list[tuple[tuple[int, ...], PlacedImages]]) -> list[Tensor]:
    """Returns logits_TV of each sequence, by one pass over all of them."""
    batch = pack_sequences(
        [
            WeightedTokens(
                token_ids_T=torch.tensor(tokens),
                weights_T=torch.tensor([0.0] * (len(tokens) - 1) + [1.0]),
                prompt_length=1,
                images=images,
            )
            for tokens, images in sequences
        ],
        group_ids=list(range(len(sequences))),
        sample_ids=[0] * len(sequences),
    )
    layout, head = build_layout(batch), model.get_output_embeddings()
    positions = batch_positions(model, batch, layout)
    output = run_body(
        model,
        layout.tokens_M[None],
        layout.positions_M[None] if positions is None else positions,
        make_plan(model, layout),
        layout.images,
    )
    logits_MV = logit_form(model).logits(output.last_hidden_state[0], together(head.weight), head.bias)
    return list(torch.split(logits_MV[layout.index_N.to(logits_MV.device)], batch.lengths_S.tolist()))


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    """Lets the language model attend by transformers' own code inside the block."""
    use_attention(model, "eager")
    try:
        yield
    finally:
        install_attention(model)


def small_image() -> bytes:
    """Returns the file of a small image."""
    return _picture(*SIZES[0])


def _picture(width: int, height: int) -> bytes:
    """Returns a picture in the format PPM, whose pixels all differ."""
    levels = (torch.arange(width * height * 3) * 37 % 251).to(torch.uint8)
    written = io.BytesIO(f"P6 {width} {height} 255\n".encode())
    written.seek(0, io.SEEK_END)
    written.write(bytes(levels.tolist()))
    return written.getvalue()
