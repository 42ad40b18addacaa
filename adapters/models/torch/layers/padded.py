"""The forward pass of models that cannot be packed: sequences side by side, shorter ones padded on the right.

In a causal model no token sees those after it, so padding on the right changes nothing and needs no mask, whatever the
layers compute: linear attention, state spaces, convolutions. Sequences share no prompt.
Does not own: the check that padding changes nothing (`compatibility.py`).
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import structlog
import torch
from attrs import evolve
from torch import Tensor, nn

from rollgrad.adapters.models.torch.kernels.attention import sdpa_on
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.kernels.row_widths import row_widths
from rollgrad.adapters.models.torch.layers.attention import backbone, check_keywords
from rollgrad.adapters.models.torch.layers.layout import Layout, Node
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)

ATTENTION = "rollgrad_padded"
"""Name under which the attention of padded sequences is registered."""

MOST_TOKENS = 8192
"""Tokens of a pass without gradients at most, padding included: bounds its memory."""


def is_padded(model: Any) -> bool:
    """Returns whether a causal language model, or its backbone, is computed padded."""
    return bool(getattr(backbone(model), "computed_padded", False))


def mark_padded(model: Any, reason: str) -> None:
    """Has a model computed padded from now on, and says why."""
    backbone(model).computed_padded = True
    log.warning(
        f"{type(model).__name__} is computed with padding, exactly but slower, each sequence with its whole prompt: "
        f"{reason.rstrip('.')}."
    )


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface by its own call of SDPA, which ignores what it does not know.

    Raises:
        ConfigurationError: the model sets a keyword that changes the result and that SDPA does not compute.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    check_keywords(module, kwargs, ("s_aux", "softcap"))
    with sdpa_on(query):
        out: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **(kwargs | {"dropout": 0.0}))[
            0
        ]
    return out, None


def check_rows(model: Any) -> None:
    """Checks that a model computes each row of a pass as if it were alone, and its gradient.

    Raises:
        ConfigurationError: it does not.
    """
    config = model.config.get_text_config()
    if "indexed_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigurationError(
            "it attends to the keys with the highest scores, and which of equal ones it takes depends on the shape of "
            "a pass."
        )
    if config.model_type == "reformer":
        raise ConfigurationError("its code has gradients in train mode alone, in which it drops out activations.")


def use_own_attention(model: Any) -> None:
    """Switches a model to the attention of its own code, which is right by definition and keeps all scores."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")


def use_fast_attention(model: Any) -> None:
    """Switches a model to SDPA, where its code lets it; its forward pass raises where that is something else."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if model._can_set_attn_implementation():
        AttentionInterface.register(ATTENTION, attention_forward)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        model.set_attn_implementation(ATTENTION)


@torch.no_grad()
def use_exact_attention(model: Any) -> None:
    """Switches a model to SDPA where that computes all that its attention asks for, else to its own: transformers would
    have SDPA leave out the caps of Gemma 2's scores without a word."""
    use_fast_attention(model)
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    except ConfigurationError:
        use_own_attention(model)


def padded_layout(model: Any, batch: PackedBatch) -> Layout:
    """Returns the layout of a batch: its sequences are the nodes, padding included, and nodes of one width are a pass.

    Where processes share the model's weights each makes one pass: they gather them together, layer by layer, and would
    wait for ever for one that makes fewer passes.

    Args:
        model: a causal language model, or its backbone.
        batch: the tokens.
    """
    # By ZeRO, or as DTensors, which during a forward pass those outside of the layers are not.
    divided = any(hasattr(parameter, "ds_id") or hasattr(parameter, "placements") for parameter in model.parameters())
    starts, lengths = batch.starts_S.tolist(), batch.lengths_S.tolist()
    sequences = [batch.tokens_N[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    layout, order = _rows(sequences, one_pass=divided)
    index_N = torch.empty(batch.token_count, dtype=torch.int64)
    for node, index in zip(layout.nodes, order, strict=True):
        own = slice(starts[index], starts[index] + lengths[index])
        index_N[own] = torch.arange(node.start, node.start + lengths[index])
    return evolve(layout, index_N=index_N)


def _rows(sequences: Sequence[Tensor], *, one_pass: bool = False) -> tuple[Layout, list[int]]:
    """Returns a layout of sequences as rows, the longest first, and the index of the sequence in each row.

    Args:
        sequences: the tokens of each.
        one_pass: whether all rows have one width.
    """
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]), reverse=True)
    widths = [*row_widths([len(sequences[index]) for index in order], one_pass=one_pass)]
    tokens: list[Tensor] = []
    for index, width in zip(order, widths, strict=True):
        own = sequences[index]
        # The last token again: one that stands for an image or a mask might compute something else.
        tokens += [own, own[-1:].expand(width - len(own))]
    ends = [*itertools.accumulate(widths)]
    layout = Layout(
        tokens_M=torch.cat(tokens),
        positions_M=torch.cat([torch.arange(width) for width in widths]),
        index_N=torch.arange(ends[-1]),
        nodes=tuple(Node(end - width, width) for end, width in zip(ends, widths, strict=True)),
    )
    return layout, order


def padded_outputs(model: Any, layout: Layout, *, most: int | None = None, **settings: Any) -> Iterator[Any]:
    """Yields the output of the model's backbone for each pass; its rows, laid end to end, are the layout's tokens.

    Args:
        model: a causal language model, or its backbone.
        layout: result of `padded_layout`.
        most: tokens of a pass at most, where it has several rows; None is no limit.
        **settings: arguments of the backbone.
    """
    device, begin = next(model.parameters()).device, 0
    for width, members in itertools.groupby(node.length for node in layout.nodes):
        left = len([*members])
        while left:
            rows = left if most is None else min(left, max(1, most // width))
            tokens_RT = layout.tokens_M[begin : begin + rows * width].view(rows, width)
            yield backbone(model)(input_ids=to_device(tokens_RT, device), use_cache=False, **settings)
            begin += rows * width
            left -= rows


def padded_hidden(model: Any, sequences: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yields the index of each sequence and its last hidden states [length, H], by passes of at most `MOST_TOKENS`
    tokens."""
    layout, order = _rows(sequences)
    places = iter(order)
    for output in padded_outputs(model, layout, most=MOST_TOKENS):
        for hidden_TH in output.last_hidden_state:
            index = next(places)
            yield index, hidden_TH[: len(sequences[index])]


def require_packed(model: Any, setting: str, size: int) -> None:
    """Refuses a model that is computed padded, whose sequences or heads `size` processes are to divide.

    Raises:
        ConfigurationError: it is.
    """
    if is_padded(model):
        raise ConfigurationError(
            f"{setting} is {size}, but {type(model).__name__} is computed with padding, which processes do not divide "
            f"so: leave --{setting} out."
        )
