"""Padding-free attention for transformers models.

`ATTENTION` is registered with transformers' attention interface. A forward pass hands it a plan through the keyword
`attention_plan`; the plan alone knows which tokens attend to which, so the model sees one row of tokens and no cache.
Instead of masks the model gets `LayerMask`s, which say how far a layer looks back. `ForestAttention` is the plan
of a training pass or a prefill; the decoding plan lives with the engine.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional

from rollgrad.adapters.models.torch.capped import SLICE, capped_attention
from rollgrad.adapters.models.torch.kernels import dense, has_varlen, varlen
from rollgrad.adapters.models.torch.layout import Node
from rollgrad.adapters.models.torch.recurrence import ForestRecurrence
from rollgrad.adapters.models.torch.recurrent_layers import (
    RECURRENT,
    TOKENWISE,
    check_recurrent_layers,
    install_recurrence,
)
from rollgrad.adapters.models.torch.row_widths import PADDING_TOLERANCE
from rollgrad.domain.errors import ConfigurationError

ATTENTION = "rollgrad"
"""Name under which the attention is registered."""

RESULT_CHANGING = ("position_bias", "indices", "cache")
"""Keywords of transformers' attention interface that change the result when set and that no plan computes: biases,
sparse key selection, paged caches."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Types of layers in which tokens interact through attention alone, over all of the past or a window of it."""


@frozen
class LayerMask:
    """Placeholder of a causal mask: each token sees the last `window` tokens up to itself, or all of them (None)."""

    window: int | None


def layer_mask(*, local_size: int | None = None, **kwargs: Any) -> LayerMask:
    """Implements transformers' mask interface; `local_size` is the width of a sliding window."""
    return LayerMask(local_size)


@frozen(eq=False)
class ScoreForm:
    """What the attention of a layer has beside scaled products of queries and keys, and a softmax of them."""

    sinks_H: Tensor | None = None
    """For each query head the score of one more key, which all queries see and whose value is 0 (`sinks.py`)."""
    cap: float | None = None
    """Score s counts as cap * tanh(s / cap) (`capped.py`)."""


PLAIN = ScoreForm()


def backbone(model: Any) -> Any:
    """Returns the part of a causal language model that computes the last hidden states; given that part, it itself."""
    base = model.base_model
    return getattr(model, "model", model) if base is model else base  # Llama 4 names a wrong base_model_prefix


class AttentionPlan(Protocol):
    """Decides, for one forward pass, which tokens each token attends to."""

    compiles: bool
    """Whether compiled layers (`compiling.py`) are used in the pass, where there are any."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        form: ScoreForm = PLAIN,
    ) -> Tensor:
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface by an `AttentionPlan`. Some models pass a layer's window to its
    attention (`sliding_window`), others only to its mask.

    Raises:
        ConfigurationError: the model sets a keyword that changes the result and that no plan supports.
    """
    check_keywords(module, kwargs)
    if s_aux is not None and softcap is not None:
        raise ConfigurationError(
            f"{type(module).__name__} passes softcap and s_aux to its attention, which packed training does not "
            "compute together."
        )
    if attention_plan is None:
        raise ConfigurationError("its code does not hand keywords on to its attention, which packed training needs.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    masked = None if attention_mask is None else attention_mask.window
    window = masked if sliding_window is None else min(sliding_window, masked or sliding_window)
    form = ScoreForm(sinks_H=s_aux, cap=softcap)
    return attention_plan.attend(int(module.layer_idx), query, key, value, scale, window, form), None  # type: ignore[arg-type]


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
    """Switches a transformers model to `ATTENTION`.

    Raises:
        ConfigurationError: `check_layers` refuses the model.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    check_layers(model)
    outside_of_graphs = torch.compiler.disable(attention_forward)  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION, outside_of_graphs)
    AttentionMaskInterface.register(ATTENTION, layer_mask)
    install_recurrence(model)
    use_attention(model, ATTENTION)


def use_attention(model: Any, name: str) -> None:
    """Switches a language model to the attention that transformers knows by `name`; a tower of images keeps its own."""
    text = model.config.get_text_config()
    parts = {part: getattr(model.config, part, None) for part in model.config.sub_configs}
    others = {part: config for part, config in parts.items() if config is not None and config is not text}
    kept = {part: config._attn_implementation for part, config in others.items()}
    model.set_attn_implementation({"": name, **dict.fromkeys(parts, name), **kept})


Kernel = Callable[..., Tensor]
"""`dense` or `varlen`."""


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
        self._padded: dict[int | None, tuple[list[_Bucket], Tensor]] = {}
        self._sliced: dict[tuple[int, int | None], list[_Bucket]] = {}

    def has_varlen(self, query: Tensor) -> bool:
        """Returns whether one variable-length call computes these queries."""
        return has_varlen(query.device, query.dtype, query.shape[-1])

    @cached_property
    def _flat(self) -> "_FlatIndex":
        return _FlatIndex(self._nodes, self._device)

    def _buckets(self, window: int | None) -> tuple[list["_Bucket"], Tensor]:
        """Returns buckets, and where each token's row is when they are laid end to end; made once for all layers."""
        if window not in self._padded:
            blocks = [block for node in self._nodes for block in _blocks(node, window)]
            buckets = [_Bucket(members, self._device, self._dtype) for members in _bucketed(blocks)]
            order = torch.cat([bucket.token_M for bucket in buckets])
            inverse_M = torch.empty_like(order)
            offsets = itertools.accumulate((bucket.rows * bucket.queries for bucket in buckets[:-1]), initial=0)
            inverse_M[order] = torch.cat([b.slot_M + offset for b, offset in zip(buckets, offsets, strict=True)])
            self._padded[window] = buckets, inverse_M
        return self._padded[window]

    def _slices(self, heads: int, window: int | None) -> "list[_Bucket]":
        """Returns parts of the nodes with at most `SLICE` scores of all heads."""
        if (heads, window) not in self._sliced:
            most = SLICE // heads
            parts = [part for node in self._nodes for part in _slices(node, window, most)]
            buckets = [_Bucket(alike, self._device, self._dtype) for alike in _bucketed(parts, most)]
            self._sliced[heads, window] = buckets
        return self._sliced[heads, window]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        form: ScoreForm = PLAIN,
    ) -> Tensor:
        """Implements `AttentionPlan.attend`; B is 1 and T is the M of the layout."""
        q_M, k_M, v_M = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        if form.cap is not None:
            slices = self._slices(query.shape[1], window)
            return self.capped(q_M, k_M, v_M, slices, scaling=scaling, window=window, cap=form.cap)[None]
        if self.has_varlen(query):
            return self._flat.attend(self.varlen, q_M, k_M, v_M, scaling, window, form.sinks_H).unsqueeze(0)
        buckets, inverse_M = self._buckets(window)
        outputs = [bucket.attend(self.dense, q_M, k_M, v_M, scaling, window, form.sinks_H) for bucket in buckets]
        flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat.index_select(0, inverse_M)[None]


class _Bucket:
    """Nodes padded to one shape: `rows` x `queries` against `rows` x `keys`."""

    def __init__(self, nodes: Sequence[Node], device: torch.device, dtype: torch.dtype) -> None:
        self.rows = len(nodes)
        self.queries = max(node.length for node in nodes)
        self.keys = max(node.keys for node in nodes)
        start, length, prefix_length = torch.tensor([[n.start, n.length, n.prefix_length] for n in nodes]).unbind(1)
        q = torch.arange(self.queries)[None]
        k = torch.arange(self.keys)[None]
        key_token = start[:, None].repeat(1, self.keys)
        for row, node in enumerate(nodes):
            key_token[row, : node.keys] = node.path()
        real_key = k < (prefix_length + length)[:, None]
        real_query = q < length[:, None]
        query_token = torch.where(real_query, start[:, None] + q, start[:, None])
        self.query_token = query_token.flatten().to(device)
        self.key_token = key_token.flatten().to(device)
        self.query_position = torch.where(real_query, prefix_length[:, None] + q, 0).to(device)
        self.token_M = query_token[real_query].to(device)
        self.slot_M = real_query.flatten().nonzero()[:, 0].to(device)
        # Without a prefix padding keys come after every real query, so causality alone hides them.
        self._causal = not any(node.prefix_length for node in nodes)
        self._real_key = real_key.to(device)
        self._dtype = dtype
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(
        self,
        kernel: Kernel,
        q_M: Tensor,
        k_M: Tensor,
        v_M: Tensor,
        scaling: float,
        window: int | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Returns [rows * queries, Hq, E], padding rows included."""
        heads, dim = q_M.shape[1:]
        key_heads = k_M.shape[1]
        fold = heads // key_heads if self.rows * self.queries * self.keys <= FOLD_LIMIT else 1
        q = q_M.index_select(0, self.query_token).view(self.rows, self.queries, heads // fold, fold, dim)
        k = k_M.index_select(0, self.key_token).view(self.rows, self.keys, key_heads, dim).transpose(1, 2)
        width = v_M.shape[2]  # in multi-head latent attention it differs from the keys'
        v = v_M.index_select(0, self.key_token).view(self.rows, self.keys, key_heads, width).transpose(1, 2)
        if self._causal and window is None:
            q = q.view(self.rows, self.queries, heads, dim).transpose(1, 2)
            out = kernel(q, k, v, scaling=scaling, sinks=self._sinks(sinks_H, 1))
            return out.transpose(1, 2).reshape(self.rows * self.queries, heads, width)
        q = q.permute(0, 2, 3, 1, 4).reshape(self.rows, heads // fold, fold * self.queries, dim)
        out = kernel(q, k, v, scaling=scaling, mask=self._mask(window, fold), sinks=self._sinks(sinks_H, fold))
        out = out.view(self.rows, heads // fold, fold, self.queries, width).permute(0, 3, 1, 2, 4)
        return out.reshape(self.rows * self.queries, heads, width)

    def _sinks(self, sinks_H: Tensor | None, fold: int) -> Tensor | None:
        """Returns the scores of the sinks [Hq / fold, fold * queries]."""
        return None if sinks_H is None else sinks_H.repeat_interleave(self.queries).view(-1, fold * self.queries)

    def _mask(self, window: int | None, fold: int) -> Tensor:
        """Returns the additive mask [rows, 1, fold * queries, keys], made once for all layers."""
        if (window, fold) not in self._masks:
            k = torch.arange(self.keys, device=self._real_key.device)
            position = self.query_position[:, :, None]
            visible = (k <= position) & self._real_key[:, None]
            if window is not None:
                visible &= k > position - window
            mask = torch.zeros(visible.shape, dtype=self._dtype, device=k.device)
            mask.masked_fill_(~visible, float("-inf"))
            self._masks[window, fold] = mask[:, None].repeat(1, 1, fold, 1)
        return self._masks[window, fold]


def _blocks(node: Node, window: int | None) -> Iterator[Node]:
    """Yields a node in blocks of queries with the keys that these see: a mask has scores of keys, too, that are hidden
    from a query. Without a prefix or a window there is no mask."""
    if node.length * node.keys <= SMALL_BUCKET or (window is None and not node.prefix):
        yield node
    else:
        yield from _seen_parts(node, window, BLOCK)


def _slices(node: Node, window: int | None, most: int) -> Iterator[Node]:
    """Yields parts of a node with at most `most` scores a head, and the keys that they see."""
    seen = node.keys if window is None else min(node.keys, window + LEAST_QUERIES)
    yield from _seen_parts(node, window, max(LEAST_QUERIES, most // seen))


def _seen_parts(node: Node, window: int | None, queries: int) -> Iterator[Node]:
    """Yields parts of so many queries of a node, with the keys that they see."""
    for begin in range(0, node.length, queries):
        first = 0 if window is None else max(0, node.prefix_length + begin - window + 1)
        yield node.part(begin, min(begin + queries, node.length), first)


def _bucketed(nodes: Sequence[Node], most: int | None = None) -> list[list[Node]]:
    """Returns nodes in buckets of similar shape, largest first; those of several nodes have at most `most` scores."""
    buckets: list[list[Node]] = []
    area = longest = 0
    for node in sorted(nodes, key=lambda n: (n.prefix_length == 0, n.keys, n.length), reverse=True):
        if buckets:
            first, rows = buckets[-1][0], len(buckets[-1]) + 1  # the first has most keys
            padded, real = rows * max(longest, node.length) * first.keys, area + node.length * node.keys
            alike = (node.prefix_length == 0) == (first.prefix_length == 0) and (most is None or padded <= most)
            little = padded <= PADDING_TOLERANCE * real and padded - real <= MOST_PADDING
            if alike and (little or padded <= SMALL_BUCKET):
                buckets[-1].append(node)
                area, longest = real, max(longest, node.length)
                continue
        buckets.append([node])
        area, longest = node.length * node.keys, node.length
    return buckets


SMALL_BUCKET = 1 << 17
"""Score-matrix entries a head below which padding costs less than another call: about 0.3 ms of a CPU core."""

MOST_PADDING = 1 << 20
"""Score-matrix entries a head that padding adds to a bucket at most: a few more calls cost less."""

BLOCK = 512
"""Queries of a block."""

FOLD_LIMIT = 1 << 21
"""Mask entries up to which repeating the mask for folded heads is cheaper than repeating keys for them."""


LEAST_QUERIES = 16
"""Queries of a slice at least, if its node has as many."""


class _FlatIndex:
    """Nodes end to end, as the variable-length kernel takes them."""

    def __init__(self, nodes: Sequence[Node], device: torch.device) -> None:
        self.key_token = torch.cat([node.path() for node in nodes]).to(device)
        self.max_q = max(n.length for n in nodes)
        self.max_k = max(n.keys for n in nodes)
        self.cu_q = _cumulative([n.length for n in nodes], device)
        self.cu_k = _cumulative([n.keys for n in nodes], device)

    def attend(
        self,
        kernel: Kernel,
        q_M: Tensor,
        k_M: Tensor,
        v_M: Tensor,
        scaling: float,
        window: int | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Returns [M, Hq, E]."""
        k, v = (x.index_select(0, self.key_token) for x in (k_M, v_M))
        place = (self.cu_q, self.cu_k, self.max_q, self.max_k)
        return kernel(q_M, k, v, *place, scaling=scaling, window=window, sinks_H=sinks_H)


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device=device, dtype=torch.int32)
