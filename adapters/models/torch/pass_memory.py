"""Measures what a pass of a model holds beside its weights, without computing anything: on the meta device tensors have
shapes and no numbers, and their bytes are counted while they live.

Attention is taken to keep queries, keys, values and its result, as fused kernels do. The output embedding is left out:
its slices are counted by `application.settings.memory_plan_passes`. Passes are over text: what a tower holds of images
is not counted.
Does not own: models whose code asks what a tensor's numbers are; they cannot be measured so.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from attrs import evolve
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from rollgrad.adapters.models.torch.adapter_dropout import AdapterDropout
from rollgrad.adapters.models.torch.attention import ATTENTION, ForestAttention, backbone, install_attention
from rollgrad.adapters.models.torch.attention_buckets import LEAST_QUERIES
from rollgrad.adapters.models.torch.capped import SLICE
from rollgrad.adapters.models.torch.images import model_factory
from rollgrad.adapters.models.torch.kernels import has_varlen
from rollgrad.adapters.models.torch.layout import Node
from rollgrad.adapters.models.torch.norms import rms_norms
from rollgrad.adapters.models.torch.offloading import PlainTransfers, transfers_of
from rollgrad.adapters.models.torch.padded import use_exact_attention, use_own_attention
from rollgrad.adapters.models.torch.recomputation import ATTENTION as KEPT
from rollgrad.adapters.models.torch.recomputation import PRODUCTS as LINEAR
from rollgrad.adapters.models.torch.recomputation import Recomputation
from rollgrad.adapters.models.torch.recurrence import Convolution, ForestRecurrence, Scan
from rollgrad.adapters.models.torch.recurrent_layers import recurrent_types
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


WORKED = {"forward": (2, 3, 2), "backward": (3, 5, 2)}
"""Copies of a slice's scores, of its queries, and of its keys and values, with which capped attention works at once."""

MEASURED_RESULT = "aten::new_empty_strided"
"""Name of the operation that makes the results of fused attention here, which selective checkpointing keeps."""

States = Callable[[int, int], Tensor]
"""Function that returns the last hidden states of so many sequences of one length."""


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
        longest: tokens of the longest sequence, by which memory grows faster than by the token where a model is
            computed padded.
        prompt: tokens of the longest prompt, of which an engine computes many; None measures no passes over prompts.
        checkpointing: which activations training recomputes.
        offloads: whether it keeps inputs of layers in the machine's memory, which counts where that is the device's.
        judges: whether it is a reward model, which is not trained and has texts side by side (`reward_model.py`).
    """
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(str(Path(name).expanduser()))
    with torch.device("meta"):
        model = model_factory(settings).from_config(settings, dtype=dtype).eval()
    try:
        if judges:
            return _judging(model, longest)
        found = _measured(model, device, longest=longest, checkpointing=checkpointing, offloads=offloads)
        return found if prompt is None or found.padded else evolve(found, prompted=_prompted(model, device, prompt))
    except Exception as error:  # a model's code may do anything that has no meaning without numbers
        log.debug(f"Passes of {type(model).__name__} cannot be measured without weights: {error}")
        return None


def _measured(
    model: Any, device: torch.device, *, longest: int, checkpointing: Checkpointing, offloads: bool
) -> PassMemory:
    states = partial(_states, model, device)
    try:
        if device.type == "cuda":
            _normalise_as_on_a_gpu(model)
        install_attention(model)
        padded, shapes = False, _shapes(longest)
        scored = [_scored(model, states, *shape) for shape in shapes]
    except ConfigurationError:
        use_own_attention(model)
        padded, shapes = True, [(rows, longest) for rows in ROWS]
        scored = [_scored(model, states, *shape) for shape in shapes]
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
            passes.append(_trained(model, states, *shape))
    found = _found(shapes, scored, padded=padded)
    # Without recomputation a backward pass has two products for each of the forward pass.
    again = passes[-1][1].flops / math.prod(shapes[-1]) - 3 * found.flops
    return evolve(
        found,
        saved=_points(shapes, [saved for saved, _ in passes]),
        trained=_points(shapes, [alive.peak for _, alive in passes]),
        recomputed=max(0.0, again),
    )


def _prompted(model: Any, device: torch.device, prompt: int) -> Points:
    shapes = _shapes(prompt)
    return _points(shapes, [_scored(model, partial(_states, model, device), *shape).peak for shape in shapes])


def _normalise_as_on_a_gpu(model: Any) -> None:
    """Has the norms that a GPU's kernel computes (`norms.py`) keep what it keeps, and compute nothing."""
    for norm in rms_norms(model):
        norm.forward = partial(_UncomputedNorm.apply, norm.weight)


def _judging(model: Any, longest: int) -> PassMemory:
    shapes = [(rows, longest) for rows in ROWS]
    with _UncomputedProducts():
        with _Alive(model):  # which answers the questions of its code
            use_exact_attention(model)
        return _found(shapes, [_scored(model, partial(_texts, model), *shape) for shape in shapes], padded=True)


def _found(shapes: Sequence[tuple[int, int]], scored: Sequence["_Alive"], *, padded: bool) -> PassMemory:
    return PassMemory(
        scored=_points(shapes, [alive.peak for alive in scored]),
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
def _scored(model: Any, states: States, rows: int, length: int) -> "_Alive":
    """Returns what was counted in a pass without gradients, of so many sequences of that length."""
    alive = _Alive(model)
    with alive:
        states(rows, length)
    return alive


def _trained(model: Any, states: States, rows: int, length: int) -> tuple[int, "_Alive"]:
    """Returns the bytes at the end of a forward pass whose gradients follow, and what was counted in both passes.
    Gradients of weights are counted while they are computed."""
    handles = [p.register_post_accumulate_grad_hook(_drop) for p in model.parameters() if p.requires_grad]
    alive = _Alive(model)
    try:
        with alive:
            found = states(rows, length)
            saved = alive.now
            total = found.sum()
            del found
            total.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    return saved, alive


def state_bytes(model: Any) -> int:
    """Returns the bytes of the states after a sequence that the layers of a model on the meta device hand on."""
    if not recurrent_types(model):
        return 0
    install_attention(model)
    plan = _UncomputedAttention(1, 1, torch.device("meta"), model.dtype)
    plan.recurrence = counted = _CountedStates([Node(0, 1)], device=torch.device("meta"))
    ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    with torch.no_grad(), _Alive(model):  # which answers the questions of its code
        backbone(model)(input_ids=ids, use_cache=False, attention_plan=plan)
    return counted.nbytes


class _CountedStates(ForestRecurrence):
    """Counts the states of a pass over one token."""

    nbytes = 0

    def convolve(self, convolution: Convolution, x: Tensor, width: int) -> Tensor:
        """Implements `Recurrence.convolve`."""
        self.nbytes += (width - 1) * x.nbytes
        return super().convolve(convolution, x, width)

    def scan_to_ends(self, scan: Scan, columns: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Implements `ForestRecurrence.scan_to_ends`."""
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
        ids, settings = ids.view(1, -1), {"attention_plan": _UncomputedAttention(rows, length, device, model.dtype)}
    hidden = backbone(model)(input_ids=ids, use_cache=False, **settings).last_hidden_state.flatten(0, 1)
    every: Tensor = hidden.index_select(0, torch.arange(rows * length, device="meta"))
    return every


def _texts(model: Any, rows: int, length: int) -> Tensor:
    """Returns the last hidden states of texts that are filled up to one length."""
    ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
    states: Tensor = backbone(model)(input_ids=ids, attention_mask=ids, use_cache=False).last_hidden_state
    return states


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operations inside have made and that live, and the FLOPs of products."""

    def __init__(self, model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.flops = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return False  # the answer to a question about numbers, such as whether any token is padding
        compute = _grouped_product if func is aten._grouped_mm.default else func
        made = compute(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self.flops += 2 * made.numel() * args[PRODUCTS[func]].shape[-1]
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
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class _UncomputedAttention(ForestAttention):
    """The plan of a training pass on a device, whose kernels keep what they would keep there, and compute nothing."""

    def __init__(self, rows: int, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        nodes = [Node(row * tokens, tokens) for row in range(rows)]
        super().__init__(nodes, device=torch.device("meta"), dtype=dtype)
        self._computing = device

    def has_varlen(self, query: Tensor) -> bool:
        """Implements `ForestAttention.has_varlen`."""
        return has_varlen(self._computing, query.dtype, query.shape[-1])

    def dense(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, **_: Any) -> Tensor:
        """Returns a tensor in the place of the kernel's result, [B, H, Q, E]."""
        if self._computing.type == "cuda":
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
        return _kept(query.transpose(1, 2), key, value, mask).transpose(1, 2)

    def _slices(self, heads: int, window: int | None) -> list[Any]:
        return []

    def capped(self, q_MHD: Tensor, k_MGD: Tensor, v_MGE: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns a tensor in the place of what is computed in slices, [M, H, E]."""
        tokens, heads = q_MHD.shape[:2]
        longest = max(node.length for node in self._nodes)
        share = min(1.0, SLICE / (heads * tokens * longest))
        scores = max(share * tokens, min(tokens, LEAST_QUERIES)) * heads * longest
        # Of one long sequence each slice has all keys.
        keys = max(share, longest / tokens) * (k_MGD.numel() + v_MGE.numel())
        wide = q_MHD.itemsize / 4 if self._computing.type == "cuda" else 1  # a CPU has all in float32
        seen = scores / heads / 4  # a byte for each pair of query and key
        work = [int(a * scores + seen + wide * (b * share * q_MHD.numel() + c * keys)) for a, b, c in WORKED.values()]
        return _kept(q_MHD, k_MGD, v_MGE, work=work)

    def varlen(self, query_QHD: Tensor, key_KGD: Tensor, value_KGE: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns a tensor in the place of the kernel's result, [Q, H, E]."""
        return _kept(query_QHD, key_KGD, value_KGE)


class _UncomputedProducts(TorchFunctionMode):
    """Has torch's scaled dot-product attention keep what a fused kernel keeps, and compute nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_attended if func is functional.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def _attended(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    added = None if attn_mask is None else attn_mask.to(query.dtype)  # torch makes one that is added to scores
    return _kept(query.transpose(1, 2), key, value, added).transpose(1, 2)


def _kept(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, work: Sequence[int] = (0, 0)
) -> Tensor:
    """Returns a tensor of the value's width for each query [..., H, D]; the backward pass keeps all that is given. The
    passes, forward and backward, work with so many numbers in float32."""
    out: Tensor = _Uncomputed.apply(query, key, value, mask, work)  # type: ignore[no-untyped-call]
    return out


def _in_slices(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


def _fused(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    return like.new_empty_strided(shape, strides, dtype=dtype)


class _Uncomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, work: Sequence[int]
    ) -> Tensor:
        ctx.work = work
        working = query.new_empty(work[0], dtype=torch.float32)  # beside the result
        # Selective checkpointing keeps results of fused attention, which are told by this operation here.
        make = _in_slices if any(work) else _fused
        out = make(query, (*query.shape[:-1], value.shape[-1]), query.dtype)
        sums = make(query, query.shape[:-1], torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, sums)
        del working
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        working = query.new_empty(ctx.work[1], dtype=torch.float32)
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del working
        return *gradients, None, None


class _UncomputedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(weight, hidden, hidden.new_empty(*hidden.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        weight, hidden, _ = ctx.saved_tensors
        return torch.empty_like(weight), torch.empty_like(hidden)


def _grouped_product(a: Tensor, b: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Returns a tensor in the place of the product of groups of rows with a matrix each, or of groups of columns with
    rows, whose shape torch tells in bfloat16 alone."""
    if b.ndim == 3:
        return a.new_empty(*a.shape[:-1], b.shape[-1])
    groups = () if offsets is None else (len(offsets),)
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])
