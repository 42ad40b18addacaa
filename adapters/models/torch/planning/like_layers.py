"""Layers of a model that are alike hold alike: a pass over a few of each kind is stretched to one over all.

A pass is divided into spans, one for each layer. Of each kind of layer the first two are kept, because the first of a
kind may make what the others use, such as masks. A layer that is left out counts as much as the second.
Does not own: what a span holds (`pass_memory.py`).
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from attrs import frozen
from torch import Tensor, nn

from rollgrad.adapters.models.torch.layers.attention import backbone
from rollgrad.adapters.models.torch.loading.weight_shards import layer_stacks

KEPT = 2
"""Layers of a kind that are kept."""

PLACES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx"})
"""Names of the attributes that say which layer a module is of."""


@frozen
class Span:
    """Part of a pass: by how many bytes it rises above those at its start, at most and at its end, and its FLOPs."""

    rise: int
    change: int
    flops: int


def together(spans: Iterable[Span]) -> Span:
    """Returns the span of spans that follow each other."""
    rise = change = flops = 0
    for span in spans:
        rise, change, flops = max(rise, change + span.rise), change + span.change, flops + span.flops
    return Span(rise, change, flops)


class Marked(Protocol):
    """A pass that is divided into spans."""

    def mark(self) -> None:
        """Ends a span."""
        ...

    def mark_soon(self) -> None:
        """Ends a span before the next operation."""
        ...


class LikeLayers:
    """Makes a model on the meta device `shorter`: the first layers stay, as many as have all kinds of layers.

    Where its layers are not found, or are all unlike, it stays as it is.
    """

    def __init__(self, model: Any, *, shorter: bool = True) -> None:
        self.model = model
        self._kept: nn.ModuleList | None = None
        self._stands_for: list[int] = []
        count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
        stacks = [stack for stack in layer_stacks(backbone(model)) if len(stack) == count]
        if not shorter or len(stacks) != 1 or _shares_weights(stacks[0]):
            return
        kinds = [_kind(layer) for layer in stacks[0]]
        kept = _needed(kinds)
        if kept < len(kinds):
            last = {kind: place for place, kind in enumerate(kinds[:kept])}
            self._stands_for = [place if place < kept else last[kind] for place, kind in enumerate(kinds)]
            self._kept = stacks[0]
            del self._kept[kept:]

    @contextmanager
    def marking(self, marked: Marked) -> Iterator[None]:
        """Ends a span where a layer begins in the forward pass inside the block, and after the last one; and in its
        backward pass where the gradient of what lies before or after a layer is there."""
        if self._kept is None:
            yield
            return
        forward = True

        def begins(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            if forward:  # a backward pass may compute a layer again
                marked.mark()
                _mark_gradient(marked, (*positional, *named.values()))

        def ends(_: Any, __: Any, result: Any) -> None:
            if forward:
                marked.mark_soon()  # when the model's code has let the layer's input go
                _mark_gradient(marked, result if isinstance(result, tuple) else (result,))

        with ExitStack() as stack:
            for layer in self._kept:
                stack.callback(layer.register_forward_pre_hook(begins, with_kwargs=True).remove)
            stack.callback(self._kept[-1].register_forward_hook(ends).remove)
            yield
            forward = False

    def stretched(self, spans: Sequence[Span], *, backward: bool = False) -> list[Span]:
        """Returns the spans of a pass over all layers, given those of one over the layers that are kept: one before
        the layers, one a layer, from the last in a backward pass, and one after them.

        Raises:
            ValueError: these are not the spans of such a pass.
        """
        if self._kept is None:
            return [*spans]
        before, *own, after = spans
        if len(own) != len(self._kept):
            raise ValueError(
                f"A pass over {len(self._kept)} layers has {len(own)} spans between the first and the last"
            )
        step = -1 if backward else 1
        return [before, *(own[::step][place] for place in self._stands_for[::step]), after]


def _mark_gradient(marked: Marked, tensors: Iterable[Any]) -> None:
    """Ends a span when the gradient of the first of `tensors` that will have one is there."""
    found = (tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad)
    if (tensor := next(found, None)) is not None:
        tensor.register_hook(lambda _: marked.mark())  # type: ignore[no-untyped-call]


def _needed(kinds: Sequence[Hashable]) -> int:
    """Returns how many layers from the first on have `KEPT` of each kind, or all of it."""
    seen: dict[Hashable, list[int]] = {}
    for place, kind in enumerate(kinds):
        seen.setdefault(kind, []).append(place)
    return 1 + max(places[:KEPT][-1] for places in seen.values())


def _kind(layer: nn.Module) -> Hashable:
    """Returns all that tells a layer from others but its place: classes, shapes of weights and plain attributes."""
    parts = []
    for path, part in layer.named_modules():
        weights = [(name, weight.shape) for name, weight in part._parameters.items() if weight is not None]
        plain = {
            name: repr(value)
            for name, value in vars(part).items()
            if isinstance(value, bool | int | float | str | None) and name not in PLACES
        }
        parts.append((path, type(part), tuple(weights), tuple(plain.items())))
    return tuple(parts)


def _shares_weights(layers: nn.ModuleList) -> bool:
    """Returns whether layers share weights, whose gradients are held until the first of them is reached."""
    own = [weight for layer in layers for weight in layer.parameters()]
    return len(own) > len(set(own))
