"""Padding-free attention for transformers models.

`ATTENTION` is registered with transformers' attention interface. A forward pass hands it a plan through the keyword
`attention_plan`; the plan alone knows which tokens attend to which, so the model sees one row of tokens and no cache.
Instead of masks the model gets `LayerMask`s, which say how far a layer looks back. `ForestAttention` is the plan
of a training pass or a prefill; the decoding plan lives with the engine.
"""

import itertools
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Protocol

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.nn import functional

from rollgrad.adapters.models.torch.kernels.attention import dense, has_varlen, varlen
from rollgrad.adapters.models.torch.kernels.capped import SLICE, capped_attention
from rollgrad.adapters.models.torch.kernels.copied_rows import CopiedRows
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.kernels.query_scales import install_query_scales, scaled_by_position
from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
from rollgrad.adapters.models.torch.layers.attention_buckets import Bucket, Kernel, blocks, bucketed, chunks, slices
from rollgrad.adapters.models.torch.layers.layer_plans import loses_plans, note_plans, noted_plan
from rollgrad.adapters.models.torch.layers.layout import Node
from rollgrad.adapters.models.torch.layers.norms import install_norms
from rollgrad.adapters.models.torch.layers.recurrence import ForestRecurrence
from rollgrad.adapters.models.torch.layers.recurrent_layers import (
    RECURRENT,
    TOKENWISE,
    check_recurrent_layers,
    install_recurrence,
    scans_without_plan,
)
from rollgrad.adapters.models.torch.layers.rotary import install_rotary
from rollgrad.domain.errors import ConfigurationError

ATTENTION = "rollgrad"
"""Name under which the attention is registered."""

RESULT_CHANGING = ("position_bias", "indices", "cache")
"""Keywords of transformers' attention interface that change the result when set and that no plan computes: biases,
sparse key selection, paged caches."""

CHUNKED = "chunked_attention"
"""Type of layers in which a token sees none of the chunks before its own."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention", CHUNKED})
"""Types of layers in which tokens interact through attention alone, over all of the past or a part of it."""


@frozen
class LayerMask:
    """Placeholder of a causal mask: each token sees the last `window` tokens up to itself, or all of them (None); in a
    layer of type `CHUNKED`, those of its chunk of `window` tokens."""

    window: int | None


def layer_mask(*, local_size: int | None = None, **kwargs: Any) -> LayerMask:
    """Implements transformers' mask interface; `local_size` is the width of a sliding window, or of a chunk."""
    return LayerMask(local_size)


def backbone(model: Any) -> Any:
    """Returns the part of a causal language model that computes the last hidden states; given that part, it itself."""
    base = model.base_model
    return getattr(model, "model", model) if base is model else base  # Llama 4 names a wrong base_model_prefix


class AttentionPlan(Protocol):
    """Decides, for one forward pass, which tokens each token attends to."""

    compiles: bool
    """Whether compiled layers (`compiling.py`) are used in the pass, where there are any."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: ScoreForm) -> Tensor:
        """Attends with query [B, Hq, T, D], key [B, Hkv, T, D] and value [B, Hkv, T, E]; returns [B, T, Hq, E]."""
        ...


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | None,
    *,
    attention_plan: AttentionPlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    query_positions: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface by an `AttentionPlan`. Some models pass a layer's window to its
    attention (`sliding_window`), others only to its mask; some scale queries by their positions (`query_scales.py`).

    Raises:
        ConfigurationError: the model sets a keyword that changes the result and that no plan supports.
    """
    check_keywords(module, kwargs)
    if s_aux is not None and softcap is not None:
        raise ConfigurationError(
            f"{type(module).__name__} passes softcap and s_aux to its attention, which packed training does not "
            "compute together."
        )
    attention_plan = noted_plan() if attention_plan is None else attention_plan
    if attention_plan is None:
        raise ConfigurationError("its code does not hand keywords on to its attention, which packed training needs.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query_positions is not None:
        query = scaled_by_position(module, query, query_positions)
    layer = int(module.layer_idx or 0)  # type: ignore[arg-type]  # layers that share their attention leave it out
    masked = None if attention_mask is None else attention_mask.window
    chunk, masked = (masked, None) if _kind(module, layer) == CHUNKED else (None, masked)
    window = masked if sliding_window is None else min(sliding_window, masked or sliding_window)
    form = ScoreForm(scale, window, sinks_H=s_aux, cap=softcap, chunk=chunk)
    return attention_plan.attend(layer, query, key, value, form), None


def _kind(module: nn.Module, layer: int) -> str | None:
    """Returns the type of the layer of an attention, where its settings name types."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    return kinds[layer] if layer < len(kinds) else None


def check_keywords(module: nn.Module, keywords: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Checks what a model hands to transformers' attention interface beside queries, keys and values.

    Raises:
        ConfigurationError: it sets a keyword that changes the result, `RESULT_CHANGING` or one of the `others`.
    """
    unknown = [name for name in (*RESULT_CHANGING, *others) if keywords.get(name) is not None]
    if keywords.get("is_causal") is False:
        unknown.append("is_causal=False")
    if unknown:
        raise ConfigurationError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which packed training does not "
            "compute."
        )


def check_layers(model: Any) -> None:
    """Checks that all layers of a transformers model can go through a plan.

    Raises:
        ConfigurationError: the model's code does not go through transformers' attention interface, or it has layers
            through which packed sequences would see each other.
    """
    others = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - LAYER_TYPES
    if others - RECURRENT - TOKENWISE:
        raise ConfigurationError(
            f"it has layers of type {', '.join(sorted(others))}, which packed training does not know."
        )
    check_recurrent_layers(model)
    if not model._can_set_attn_implementation():
        raise ConfigurationError(
            "its code does not use transformers' attention interface, which packed training needs."
        )


def install_attention(model: Any) -> None:
    """Switches a transformers model to `ATTENTION`, and its norms and rotary embeddings to what a GPU computes faster.

    Raises:
        ConfigurationError: `check_layers` refuses the model.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    check_layers(model)
    outside_of_graphs = torch.compiler.disable(attention_forward)  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION, outside_of_graphs)
    AttentionMaskInterface.register(ATTENTION, layer_mask)
    install_norms(model)
    install_rotary(model)
    install_recurrence(model)
    install_query_scales(model)
    if loses_plans(backbone(model)) or scans_without_plan(model):
        note_plans(backbone(model))
    use_attention(model, ATTENTION)


def use_attention(model: Any, name: str) -> None:
    """Switches a language model to the attention that transformers knows by `name`; a tower of images keeps its own."""
    text = model.config.get_text_config()
    parts = {part: getattr(model.config, part, None) for part in model.config.sub_configs}
    others = {part: config for part, config in parts.items() if config is not None and config is not text}
    kept = {part: config._attn_implementation for part, config in others.items()}
    model.set_attn_implementation({"": name, **dict.fromkeys(parts, name), **kept})


class ForestAttention:
    """Each node's queries are the last of its path: query i sees path tokens up to its own position.

    On a GPU in half precision one variable-length call serves all nodes. Elsewhere nodes of similar size are padded
    into buckets, inside the attention only, and each bucket is one SDPA call; the grouped query heads that share a key
    head are folded into the query axis, so keys are never repeated. A model may need both: its layers' heads can
    differ in width.
    """

    dense, varlen, capped = staticmethod(dense), staticmethod(varlen), staticmethod(capped_attention)
    """The kernels."""
    compiles = True

    def __init__(self, nodes: Sequence[Node], *, device: torch.device, dtype: torch.dtype) -> None:
        self._nodes, self._device, self._dtype = nodes, device, dtype
        self.recurrence = ForestRecurrence(nodes, device=device)
        self._padded: dict[int | None, tuple[list[Bucket], Tensor]] = {}
        self._sliced: dict[tuple[int, int | None], list[Bucket]] = {}
        self._chunked: dict[int, ForestAttention] = {}

    def has_varlen(self, query: Tensor) -> bool:
        """Returns whether one variable-length call computes these queries."""
        return has_varlen(query.device, query.dtype, query.shape[-1])

    @cached_property
    def _flat(self) -> "_FlatIndex":
        return _FlatIndex(self._nodes, self._device)

    def _buckets(self, window: int | None) -> tuple[list[Bucket], Tensor]:
        """Returns buckets, and where each token's row is when they are laid end to end; made once for all layers."""
        if window not in self._padded:
            parts = [part for node in self._nodes for part in blocks(node, window)]
            buckets = [Bucket(alike, self._device, self._dtype) for alike in bucketed(parts)]
            order = torch.cat([bucket.token_M for bucket in buckets])
            inverse_M = torch.empty_like(order)
            offsets = itertools.accumulate((bucket.rows * bucket.queries for bucket in buckets[:-1]), initial=0)
            inverse_M[order] = torch.cat([b.slot_M + offset for b, offset in zip(buckets, offsets, strict=True)])
            self._padded[window] = buckets, inverse_M
        return self._padded[window]

    def _slices(self, heads: int, window: int | None) -> list[Bucket]:
        """Returns parts of the nodes with at most `SLICE` scores of all heads."""
        if (heads, window) not in self._sliced:
            most = SLICE // heads
            parts = [part for node in self._nodes for part in slices(node, window, most)]
            buckets = [Bucket(alike, self._device, self._dtype) for alike in bucketed(parts, most)]
            self._sliced[heads, window] = buckets
        return self._sliced[heads, window]

    def _within_chunks(self, size: int) -> "ForestAttention":
        """Returns this plan over nodes that end where chunks do, and see nothing before their chunk."""
        if size not in self._chunked:
            plan = self._chunked[size] = copy(self)
            vars(plan).pop("_flat", None)
            plan._nodes = [part for node in self._nodes for part in chunks(node, size)]
            plan._padded, plan._sliced = {}, {}
        return self._chunked[size]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: ScoreForm) -> Tensor:
        """Implements `AttentionPlan.attend`; B is 1 and T is the M of the layout."""
        if form.chunk is not None:
            within = self._within_chunks(form.chunk)
            return within.attend(layer, query, key, value, evolve(form, chunk=None))
        q_M, k_M, v_M = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        if form.cap is not None:
            parts = self._slices(query.shape[1], form.window)
            return self.capped(q_M, k_M, v_M, parts, scaling=form.scaling, window=form.window, cap=form.cap)[None]
        if self.has_varlen(query):
            return self._flat.attend(self.varlen, q_M, k_M, v_M, form).unsqueeze(0)
        buckets, inverse_M = self._buckets(form.window)
        outputs = [bucket.attend(self.dense, q_M, k_M, v_M, form) for bucket in buckets]
        flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat.index_select(0, inverse_M)[None]


class _FlatIndex:
    """Nodes end to end, as the variable-length kernel takes them."""

    def __init__(self, nodes: Sequence[Node], device: torch.device) -> None:
        self.keys = sum(node.keys for node in nodes)
        begins = itertools.accumulate((node.length for node in nodes), initial=0)
        # Where no node has a prefix, keys and values are those of the tokens, in their order.
        in_order = all(not node.prefix and node.start == begin for node, begin in zip(nodes, begins, strict=False))
        self._copied = None if in_order else CopiedRows(torch.cat([node.path() for node in nodes]), device)
        self.max_q = max(n.length for n in nodes)
        self.max_k = max(n.keys for n in nodes)
        self.cu_q = _cumulative([n.length for n in nodes], device)
        self.cu_k = _cumulative([n.keys for n in nodes], device)

    def attend(self, kernel: Kernel, q_M: Tensor, k_M: Tensor, v_M: Tensor, form: ScoreForm) -> Tensor:
        """Returns [M, Hq, E]."""
        k, v = (self._of_keys(x) for x in (k_M, v_M))
        place = (self.cu_q, self.cu_k, self.max_q, self.max_k)
        return kernel(q_M, k, v, *place, scaling=form.scaling, window=form.window, sinks_H=form.sinks_H)

    def _of_keys(self, x_M: Tensor) -> Tensor:
        if self._copied is not None:
            return self._copied.of(x_M)
        return x_M if len(x_M) == self.keys else x_M.narrow(0, 0, self.keys)


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return to_device(functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int(), device)
