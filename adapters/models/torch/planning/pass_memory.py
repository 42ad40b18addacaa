"""Measures what a pass of a model holds beside its weights, without computing anything: on the meta device tensors have
shapes and no numbers, and their bytes are counted while they live.

The output embedding is left out: its slices are counted by `application.settings.memory_plan_passes`. Passes are over
text: what a tower holds of images is not counted.
Does not own: what kernels keep (`uncomputed.py`), nor models whose code asks what a tensor's numbers are, which cannot
be measured so.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from rollgrad.adapters.models.torch.adapter_dropout import AdapterDropout
from rollgrad.adapters.models.torch.layers.attention import ATTENTION, backbone, install_attention
from rollgrad.adapters.models.torch.layers.images import model_factory
from rollgrad.adapters.models.torch.layers.layout import Node
from rollgrad.adapters.models.torch.layers.norms import rms_norms
from rollgrad.adapters.models.torch.layers.padded import use_exact_attention, use_own_attention
from rollgrad.adapters.models.torch.layers.recurrence import Convolution, ForestRecurrence, Scan
from rollgrad.adapters.models.torch.layers.recurrent_layers import recurrent_types
from rollgrad.adapters.models.torch.offloading import PlainTransfers, transfers_of
from rollgrad.adapters.models.torch.planning.like_layers import LikeLayers, Span, together
from rollgrad.adapters.models.torch.planning.uncomputed import (
    MEASURED_RESULT,
    UncomputedAttention,
    UncomputedNorm,
    UncomputedProducts,
    grouped_product,
)
from rollgrad.adapters.models.torch.recomputation import ATTENTION as KEPT
from rollgrad.adapters.models.torch.recomputation import PRODUCTS as LINEAR
from rollgrad.adapters.models.torch.recomputation import Recomputation
from rollgrad.application.settings.model_shape import PassMemory, Points
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)
aten = torch.ops.aten

PRODUCTS = {**LINEAR, aten.bmm.default: 0, aten.baddbmm.default: 1}
"""Products of matrices, and which of their arguments is the left factor."""

ROUNDING = 1.05
"""Factor for what allocators round up and kernels work with."""

PACKED = (16, 1024, 4096, 16384)
"""Tokens of the passes that are measured: of few the peak is gradients of weights, of many activations."""

ROWS = (1, 8)
"""Sequences of the passes that are measured of a model that is computed padded."""


States = Callable[[int, int], Tensor]
"""Function from a number of sequences and their common length to their last hidden states."""


def measured_passes(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    longest: int,
    prompt: int | None = None,
    checkpointing: Checkpointing = Checkpointing.OFF,
    offloads: bool = False,
    judges: bool = False,
) -> PassMemory | None:
    """Returns what passes of a model hold; None where its code cannot run without numbers.

    Args:
        name: hub name or directory; its settings alone are read.
        dtype: number format.
        device: where the model would compute.
        longest: tokens of the longest sequence. The memory of a model that is computed padded grows with it, too.
        prompt: tokens of the longest prompt, of which an engine computes many; None measures no passes over prompts.
        checkpointing: which activations training recomputes.
        offloads: whether training keeps inputs of layers in the machine's memory; they count if that is the device's
        own. judges: whether it is a reward model, which is not trained and has texts side by side (`reward_model.py`).
    """
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(str(Path(name).expanduser()))
    # Inputs that are moved are on their device while the layer after theirs computes.
    for shorter in (False,) if offloads else (True, False):
        with torch.device("meta"):
            model = model_factory(settings).from_config(settings, dtype=dtype).eval()
        try:
            layers = LikeLayers(model, shorter=shorter)
            if judges:
                return _judging(layers, longest)
            found = _measured(layers, device, longest=longest, checkpointing=checkpointing, offloads=offloads)
            if prompt is None or found.padded:
                return found
            return evolve(found, prompted=_prompted(layers, device, prompt))
        except Exception as error:  # a model's code may do anything that has no meaning without numbers
            log.debug(f"Passes of {type(model).__name__} cannot be measured without weights: {error}")
    return None


def _measured(
    layers: LikeLayers, device: torch.device, *, longest: int, checkpointing: Checkpointing, offloads: bool
) -> PassMemory:
    model = layers.model
    states = partial(_states, model, device)
    try:
        if device.type == "cuda":
            _normalise_as_on_a_gpu(model)
        install_attention(model)
        padded, shapes = False, _shapes(longest)
        scored = [_scored(layers, states, *shape) for shape in shapes]
    except ConfigurationError:
        use_own_attention(model)
        padded, shapes = True, [(rows, longest) for rows in ROWS]
        scored = [_scored(layers, states, *shape) for shape in shapes]
    recomputation = Recomputation(
        model,
        AdapterDropout(model),
        checkpointing,
        offloads=offloads,
        transfers=transfers_of if device.type == "cpu" else _Elsewhere,
        attention=KEPT | {MEASURED_RESULT},
    )
    passes = []
    for shape in shapes:
        with recomputation.during(model):
            passes.append(_trained(layers, states, *shape))
    found = _found(shapes, scored, padded=padded)
    # Without recomputation a backward pass has two products for each of the forward pass.
    again = passes[-1][1].flops / math.prod(shapes[-1]) - 3 * found.flops
    return evolve(
        found,
        saved=_points(shapes, [saved for saved, _ in passes]),
        trained=_points(shapes, [both.rise for _, both in passes]),
        recomputed=max(0.0, again),
    )


def _prompted(layers: LikeLayers, device: torch.device, prompt: int) -> Points:
    shapes, states = _shapes(prompt), partial(_states, layers.model, device)
    return _points(shapes, [_scored(layers, states, *shape).rise for shape in shapes])


def _normalise_as_on_a_gpu(model: Any) -> None:
    """Has the norms that a GPU's kernel computes (`norms.py`) keep what it keeps, and compute nothing."""
    for norm in rms_norms(model):
        norm.forward = partial(UncomputedNorm.apply, norm.weight)


def _judging(layers: LikeLayers, longest: int) -> PassMemory:
    shapes, states = [(rows, longest) for rows in ROWS], partial(_texts, layers.model)
    with UncomputedProducts():
        with _Alive(layers.model):  # which answers the questions of its code
            use_exact_attention(layers.model)
        return _found(shapes, [_scored(layers, states, *shape) for shape in shapes], padded=True)


def _found(shapes: Sequence[tuple[int, int]], scored: Sequence[Span], *, padded: bool) -> PassMemory:
    return PassMemory(
        scored=_points(shapes, [span.rise for span in scored]),
        padded=padded,
        flops=scored[-1].flops / math.prod(shapes[-1]),
    )


def _shapes(longest: int) -> list[tuple[int, int]]:
    """Returns of passes of sequences of one length, at most `longest`, how many each has, and how long they are."""
    return [(math.ceil(tokens / longest), min(tokens, longest)) for tokens in sorted({*PACKED, longest})]


def _points(shapes: Sequence[tuple[int, int]], found: Sequence[int]) -> Points:
    held = dict(zip((rows * length for rows, length in shapes), found, strict=True))
    return tuple((tokens, math.ceil(ROUNDING * held[tokens])) for tokens in sorted(held))


@torch.no_grad()
def _scored(layers: LikeLayers, states: States, rows: int, length: int) -> Span:
    """Returns what was counted in a pass without gradients, of `rows` sequences of `length` tokens each."""
    alive = _Alive(layers.model)
    with alive, layers.marking(alive):
        states(rows, length)
    return together(layers.stretched(alive.taken()))


def _trained(layers: LikeLayers, states: States, rows: int, length: int) -> tuple[int, Span]:
    """Returns the bytes at the end of a forward pass whose gradients follow, and what was counted in both passes.
    Gradients of weights are counted while they are computed."""
    handles = [p.register_post_accumulate_grad_hook(_drop) for p in layers.model.parameters() if p.requires_grad]
    alive = _Alive(layers.model)
    try:
        with alive:
            with layers.marking(alive):
                found = states(rows, length)
            forward = layers.stretched(alive.taken())
            total = found.sum()
            del found
            total.backward()  # type: ignore[no-untyped-call]
            backward = layers.stretched(alive.taken(), backward=True)
    finally:
        for handle in handles:
            handle.remove()
    return together(forward).change, together([*forward, *backward])


@frozen(kw_only=True)
class StateSizes:
    """The sizes of the states that recurrent layers of a model hand on; 0 of a model without such layers."""

    nbytes: int = 0
    """Bytes of the states of all layers after a sequence."""
    heads: int = 0
    """The greatest common divisor of the layers' heads."""
    columns: int = 0
    """Numbers of a token from which a layer computes its states: those of the layer that reads the most."""


def counted_states(model: Any) -> StateSizes:
    """Returns the sizes of the states of a model on the meta device."""
    if not recurrent_types(model):
        return StateSizes()
    install_attention(model)
    plan = UncomputedAttention(1, 1, torch.device("meta"), model.dtype)
    plan.recurrence = counted = _CountedStates([Node(0, 1)], device=torch.device("meta"))
    ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    with torch.no_grad(), _Alive(model):  # which answers the questions of its code
        backbone(model)(input_ids=ids, use_cache=False, attention_plan=plan)
    return StateSizes(nbytes=counted.nbytes, heads=counted.heads, columns=counted.columns)


class _CountedStates(ForestRecurrence):
    """Counts the states of a pass over one token, and the numbers that a scan reads of it."""

    nbytes = columns = 0

    def convolve(self, convolution: Convolution, x: Tensor, width: int) -> Tensor:
        """Implements `Recurrence.convolve`."""
        self.nbytes += (width - 1) * x.nbytes
        return super().convolve(convolution, x, width)

    def scan_to_ends(self, scan: Scan, columns: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Implements `ForestRecurrence.scan_to_ends`."""
        self.columns = max(self.columns, sum(column.numel() for column in columns))
        result, states = super().scan_to_ends(scan, columns)
        self.nbytes += sum(state.nbytes for state in states)
        return result, states


class _Elsewhere(PlainTransfers):
    """Transfers to memory that is not counted, of any device."""

    def __init__(self, _: torch.device) -> None:
        pass

    def room(self, tensor: Tensor) -> Tensor:
        """Implements `Transfers.room`."""
        with _disable_current_modes():
            return torch.empty_like(tensor)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Implements `Transfers.copy`."""


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _states(model: Any, device: torch.device, rows: int, length: int) -> Tensor:
    """Returns the last hidden states, from which a head reads those that it needs."""
    ids, settings = torch.empty(rows, length, dtype=torch.int64, device="meta"), {}
    if model.config._attn_implementation == ATTENTION:
        ids, settings = ids.view(1, -1), {"attention_plan": UncomputedAttention(rows, length, device, model.dtype)}
    hidden = backbone(model)(input_ids=ids, use_cache=False, **settings).last_hidden_state.flatten(0, 1)
    every: Tensor = hidden.index_select(0, torch.arange(rows * length, device="meta"))
    return every


def _texts(model: Any, rows: int, length: int) -> Tensor:
    """Returns the last hidden states of texts that are filled up to one length."""
    ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
    states: Tensor = backbone(model)(input_ids=ids, attention_mask=ids, use_cache=False).last_hidden_state
    return states


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operations inside have made and that live, and the FLOPs of products; also
    for each of the spans that marks divide a pass into."""

    def __init__(self, model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.flops = 0
        self._begun = self._highest = self._computed = 0
        self._spans: list[Span] = []
        self._ends = False
        self._known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def mark(self) -> None:
        """Implements `Marked.mark`."""
        rise, change = self._highest - self._begun, self.now - self._begun
        self._spans.append(Span(rise, change, self.flops - self._computed))
        self._begun, self._highest, self._computed = self.now, self.now, self.flops

    def mark_soon(self) -> None:
        """Implements `Marked.mark_soon`."""
        self._ends = True

    def taken(self) -> list[Span]:
        """Returns the spans since it was last called, the one that has not ended among them."""
        self.mark()
        taken, self._spans = self._spans, []
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._ends:
            self._ends = False
            self.mark()
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return False  # the answer to a question about numbers, such as whether any token is padding
        compute = grouped_product if func is aten._grouped_mm.default else func
        made = compute(*args, **(kwargs or {}))
        if func in PRODUCTS:
            # The gradient of a group's matrix is of its own rows, which all groups together have once.
            groups = made.shape[0] if func is aten._grouped_mm.default and args[0].dim() == args[1].dim() == 2 else 1
            self.flops += 2 * made.numel() * args[PRODUCTS[func]].shape[-1] // groups
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak, self._highest = max(self.peak, self.now), max(self._highest, self.now)
        weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
