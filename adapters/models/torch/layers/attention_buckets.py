"""Nodes of a forest padded into buckets of similar shape, for kernels that take rows of one width.

Padding is inside the attention only. Does not own: which kernel computes a bucket (`attention.py`).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rollgrad.adapters.models.torch.kernels.copied_rows import CopiedRows
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.kernels.row_widths import PADDING_TOLERANCE
from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
from rollgrad.adapters.models.torch.layers.layout import Node

Kernel = Callable[..., Tensor]
"""`dense` or `varlen` of `kernels/attention.py`."""

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


class Bucket:
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
        self._copied_queries = CopiedRows(query_token.flatten(), device, real_query.flatten())
        self._copied_keys = CopiedRows(key_token.flatten(), device, real_key.flatten())
        self.query_token, self.key_token = self._copied_queries.row_K, self._copied_keys.row_K
        self.query_position = to_device(torch.where(real_query, prefix_length[:, None] + q, 0), device)
        self.token_M = to_device(query_token[real_query], device)
        self.slot_M = to_device(real_query.flatten().nonzero()[:, 0], device)
        # Without a prefix padding keys come after every real query, so causality alone hides them.
        self._causal = not any(node.prefix_length for node in nodes)
        self._dtype = dtype
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, kernel: Kernel, q_M: Tensor, k_M: Tensor, v_M: Tensor, form: ScoreForm) -> Tensor:
        """Returns [rows * queries, Hq, E], padding rows included."""
        heads, dim = q_M.shape[1:]
        key_heads = k_M.shape[1]
        fold = heads // key_heads if self.rows * self.queries * self.keys <= FOLD_LIMIT else 1
        q = self._copied_queries.of(q_M).view(self.rows, self.queries, heads // fold, fold, dim)
        k = self._copied_keys.of(k_M).view(self.rows, self.keys, key_heads, dim).transpose(1, 2)
        width = v_M.shape[2]  # in multi-head latent attention it differs from the keys'
        v = self._copied_keys.of(v_M).view(self.rows, self.keys, key_heads, width).transpose(1, 2)
        if self._causal and form.window is None:
            q = q.view(self.rows, self.queries, heads, dim).transpose(1, 2)
            out = kernel(q, k, v, scaling=form.scaling, sinks=self._sinks(form.sinks_H, 1))
            return out.transpose(1, 2).reshape(self.rows * self.queries, heads, width)
        q = q.permute(0, 2, 3, 1, 4).reshape(self.rows, heads // fold, fold * self.queries, dim)
        mask, sinks = self._mask(form.window, fold), self._sinks(form.sinks_H, fold)
        out = kernel(q, k, v, scaling=form.scaling, mask=mask, sinks=sinks)
        out = out.view(self.rows, heads // fold, fold, self.queries, width).permute(0, 3, 1, 2, 4)
        return out.reshape(self.rows * self.queries, heads, width)

    def _sinks(self, sinks_H: Tensor | None, fold: int) -> Tensor | None:
        """Returns the scores of the sinks [Hq / fold, fold * queries]."""
        return None if sinks_H is None else sinks_H.repeat_interleave(self.queries).view(-1, fold * self.queries)

    def _mask(self, window: int | None, fold: int) -> Tensor:
        """Returns the additive mask [rows, 1, fold * queries, keys], made once for all layers."""
        if (window, fold) not in self._masks:
            k = torch.arange(self.keys, device=self.query_position.device)
            position = self.query_position[:, :, None]
            visible = k <= position  # padding keys come after every real query
            if window is not None:
                visible &= k > position - window
            mask = torch.zeros(visible.shape, dtype=self._dtype, device=k.device)
            mask.masked_fill_(~visible, float("-inf"))
            self._masks[window, fold] = mask[:, None].repeat(1, 1, fold, 1)
        return self._masks[window, fold]


def blocks(node: Node, window: int | None) -> Iterator[Node]:
    """Yields a node in blocks of queries with the keys that these see: a mask has scores of keys, too, that are hidden
    from a query. Without a prefix or a window there is no mask."""
    if node.length * node.keys <= SMALL_BUCKET or (window is None and not node.prefix):
        yield node
    else:
        yield from _seen_parts(node, window, BLOCK)


def slices(node: Node, window: int | None, most: int) -> Iterator[Node]:
    """Yields parts of a node with at most `most` scores a head, and the keys that they see."""
    seen = node.keys if window is None else min(node.keys, window + LEAST_QUERIES)
    yield from _seen_parts(node, window, max(LEAST_QUERIES, most // seen))


def chunks(node: Node, size: int) -> Iterator[Node]:
    """Yields the parts of a node that are in one chunk of `size` tokens of its path each, with the keys that are."""
    begin = 0
    while begin < node.length:
        chunk = (node.prefix_length + begin) // size
        end = min(node.length, (chunk + 1) * size - node.prefix_length)
        yield node.part(begin, end, chunk * size)
        begin = end


def _seen_parts(node: Node, window: int | None, queries: int) -> Iterator[Node]:
    """Yields parts of a node with `queries` queries each, with the keys that they see."""
    for begin in range(0, node.length, queries):
        first = 0 if window is None else max(0, node.prefix_length + begin - window + 1)
        yield node.part(begin, min(begin + queries, node.length), first)


def bucketed(nodes: Sequence[Node], most: int | None = None) -> list[list[Node]]:
    """Returns nodes in buckets of similar shape, largest first; those of several nodes have at most `most` scores.

    A node joins the last bucket if both have a prefix or neither has, and if that takes little padding.
    """
    buckets: list[list[Node]] = []
    scores = longest = 0  # of the last bucket: scores without padding, and queries of its longest node
    for node in sorted(nodes, key=lambda n: (n.prefix_length == 0, n.keys, n.length), reverse=True):
        if buckets:
            first = buckets[-1][0]  # it has the most keys
            joined_scores, joined_longest = scores + node.length * node.keys, max(longest, node.length)
            padded = (len(buckets[-1]) + 1) * joined_longest * first.keys
            allowed = (node.prefix_length == 0) == (first.prefix_length == 0) and (most is None or padded <= most)
            little = padded <= PADDING_TOLERANCE * joined_scores and padded - joined_scores <= MOST_PADDING
            if allowed and (little or padded <= SMALL_BUCKET):
                buckets[-1].append(node)
                scores, longest = joined_scores, joined_longest
                continue
        buckets.append([node])
        scores, longest = node.length * node.keys, node.length
    return buckets
