"""Attention of models in which the tokens of an image see each other, such as Gemma 3's and Gemma 4's.

Invariant: tokens of texts attend as a `ForestAttention` lets them; each run of tokens that stand for a part of an image
sees what is before it, as far as the layer looks back, and all of itself. In Gemma 4 that is so in layers with windows
alone, and a token sees of its own image, too, what comes before it only as far as the layer looks back.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.models.torch.kernels.attention import dense
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
from rollgrad.adapters.models.torch.layers.attention import AttentionPlan, ForestAttention, backbone
from rollgrad.adapters.models.torch.layers.layout import Layout, Node
from rollgrad.adapters.models.torch.layers.queries import Queries, all_queries
from rollgrad.domain.errors import ConfigurationError

SETTING, IN_WINDOWS = "use_bidirectional_attention", "vision"
"""Setting of language models, and its value in those in which the tokens of an image see each other in windows."""


def make_plan(model: Any, layout: Layout, queries: Queries | None = None) -> AttentionPlan:
    """Returns the plan of a model's pass over a layout, with some of its `queries` alone: keys and values are then in
    the order of their numbers."""
    weight, queries = next(model.parameters()), queries or all_queries(layout)
    forest = ForestAttention(queries.nodes, device=weight.device, dtype=weight.dtype)
    if not layout.images or not sees_whole_images(model):
        return forest
    every = [ImageRun(*each, queries, weight.device, weight.dtype) for each in image_runs(model, layout)]
    runs = [run for run in every if len(run.token_Q)]
    return ImageAttention(forest, runs, windowed=sees_images_in_windows(model)) if runs else forest


def sees_whole_images(model: Any) -> bool:
    """Returns whether the tokens of an image see each other, for which the model's own code is told which they are."""
    told = "token_type_ids" in inspect.signature(backbone(model).forward).parameters
    return told or sees_images_in_windows(model)


def sees_images_in_windows(model: Any) -> bool:
    """Returns whether they do so in layers with windows alone."""
    return getattr(model.config.get_text_config(), SETTING, None) == IN_WINDOWS


def image_runs(model: Any, layout: Layout) -> Iterator[tuple[Node, int, int]]:
    """Yields each run of neighbouring tokens of a layout that stand for an image, the first and the one after the last,
    and the node that it is in."""
    token = backbone(model).config.image_token_id
    for placed in layout.images:
        node = next(each for each in layout.nodes if each.start <= placed.start < each.start + each.length)
        seen = layout.tokens_M[placed.start : placed.stop].eq(token).int()
        changes = torch.diff(seen, prepend=seen.new_zeros(1), append=seen.new_zeros(1)).tolist()
        starts, stops = ([place for place, change in enumerate(changes) if change == kind] for kind in (1, -1))
        for start, stop in zip(starts, stops, strict=True):
            yield node, placed.start + start, placed.start + stop


class ImageRun:
    """Those of the tokens `start` to `stop` (half-open) of a layout, which are in `node`, that have `queries`, and all
    that they see."""

    def __init__(
        self, node: Node, start: int, stop: int, queries: Queries, device: torch.device, dtype: torch.dtype
    ) -> None:
        first, last = (node.prefix_length + place - node.start for place in (start, stop))
        place_Q = queries.place_M[start:stop]
        asking_Q = place_Q < queries.count
        self.token_Q = to_device(place_Q[asking_Q], device)
        self._key_token_K = to_device(queries.place_M[node.path()[:last]], device)
        self._position_Q = to_device(torch.arange(first, last)[asking_Q], device)
        self._first, self._dtype = first, dtype

    def attend(self, q_M: Tensor, k_M: Tensor, v_M: Tensor, form: ScoreForm, *, windowed: bool) -> Tensor:
        """Returns [Q, Hq, E]; with `windowed` the window counts in the image, too."""
        q, k, v = (
            x.index_select(0, index).transpose(0, 1)[None]
            for x, index in ((q_M, self.token_Q), (k_M, self._key_token_K), (v_M, self._key_token_K))
        )
        sinks = None if form.sinks_H is None else form.sinks_H[:, None].expand(-1, len(self.token_Q))
        mask = self._mask(form.window, windowed)
        return dense(q, k, v, scaling=form.scaling, mask=mask, sinks=sinks)[0].transpose(0, 1)

    def _mask(self, window: int | None, windowed: bool) -> Tensor:
        """Returns the additive mask [1, 1, Q, K]."""
        key_K = torch.arange(len(self._key_token_K), device=self._key_token_K.device)
        oldest_Q = self._position_Q - (len(key_K) if window is None else window)
        hidden_QK = key_K <= oldest_Q[:, None]
        if not windowed:
            hidden_QK = hidden_QK & (key_K < self._first)
        mask = torch.zeros(hidden_QK.shape, dtype=self._dtype, device=key_K.device)
        return mask.masked_fill(hidden_QK, float("-inf"))[None, None]


class ImageAttention(AttentionPlan):
    """Attends as `forest` does, but for `runs` of the tokens of images; with `windowed` in layers with windows alone,
    which count in images, too."""

    compiles = True

    def __init__(self, forest: ForestAttention, runs: Sequence[ImageRun], *, windowed: bool = False) -> None:
        self._forest, self._runs, self._windowed = forest, runs, windowed

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: ScoreForm) -> Tensor:
        """Implements `AttentionPlan.attend`; B is 1 and T is the M of the layout, or of the queries their number."""
        if form.cap is not None:
            raise ConfigurationError(
                "A model that caps scores, and whose images' tokens see each other, is not computed: choose "
                "another model, or leave --data.image_key out."
            )
        attended = self._forest.attend(layer, query, key, value, form)
        if self._windowed and form.window is None:
            return attended
        q_M, k_M, v_M = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        seen = [run.attend(q_M, k_M, v_M, form, windowed=self._windowed) for run in self._runs]
        tokens = torch.cat([run.token_Q for run in self._runs])
        return attended.index_copy(1, tokens, torch.cat(seen)[None])
