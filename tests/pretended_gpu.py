"""A GPU that is none: tensors with numbers, computed on the CPU, that say they are on a CUDA device and refuse what a
real one refuses. Whole code paths run on it, so that a tensor that somebody forgot to move is found without a GPU.
Does not pretend: kernels' rounding, memory, streams, several GPUs, nor activations that are computed again.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
MEMORY = 4 * 2**30
aten = torch.ops.aten

ACROSS = {aten.copy_.default, aten._foreach_copy_.default}
"""Operations that take tensors of both devices."""

INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
"""Operations whose indices may be on the CPU."""

PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.addmm_.default, aten.baddbmm.default}
"""Products of matrices, which a GPU has of no whole numbers."""

WAITS = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default),
    *(aten.equal.default, aten._unique2.default, aten.bincount.default),
    *(aten.item.default, aten.is_nonzero.default),  # which are heard of in inference mode alone
}
"""Operations for whose result the CPU waits until the GPU has computed it."""


class OnGPU(Tensor):
    """A tensor of the pretended GPU; `numbers` are a CPU's."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "OnGPU":
        made = Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=CPU,  # torch without CUDA knows no other; the mode below says otherwise
        )
        made.numbers = numbers
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGPU({self.numbers})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Says that it is a wrapper, by which modules that are moved keep their parameters."""
        return ["numbers"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: None, size: Any, stride: Any) -> "OnGPU":
        return OnGPU(inner["numbers"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_devices(func, args, kwargs)
        WAITED.update(waits(func, args, kwargs))
        plain, named = tree_map(numbers_of, (args, kwargs))
        result = computed(func, plain, named)
        if func._schema.is_mutable and isinstance(result, Tensor):
            return kwargs.get("out", args[0])
        with torch.inference_mode(False):  # torch 2.11 takes no wrapper made in it for a view of a tensor that was not
            return tree_map(lambda x: OnGPU(x) if isinstance(x, Tensor) else x, result)


REPEATS = {aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor}
"""Operations for which the CPU waits unless it is told how long their results are."""

TO_GPU, TO_CPU = "to gpu", "to cpu"
"""Copies for which the CPU waits: all but those between pinned memory and the GPU that are told to be `non_blocking`
(`copy_kernel_cuda` in `aten/src/ATen/native/cuda/Copy.cu`)."""

WAITED: Counter[str] = Counter()
"""How often the CPU has waited for the GPU, by operation."""

PINNED: "WeakTensorKeyDictionary[Tensor, bool]" = WeakTensorKeyDictionary()
"""Tensors in pinned memory of the CPU."""


def waits(func: Any, args: Any, kwargs: Any) -> Iterator[str]:
    """Yields what the CPU waits for in an operation."""
    if func in WAITS or (func in REPEATS and kwargs.get("output_size") is None):
        yield str(func)
    if func is aten.copy_.default and isinstance(args[0], OnGPU) != isinstance(args[1], OnGPU):
        there = isinstance(args[0], OnGPU)
        kept = args[1] if there else args[0]
        if kept.ndim and not (kept in PINNED and (args[2:] == (True,) or kwargs.get("non_blocking"))):
            yield TO_GPU if there else TO_CPU
    if func in INDEXING and isinstance(args[0], OnGPU):
        for index in (x for x in args[1] if x is not None):
            if not isinstance(index, OnGPU):
                yield TO_GPU
            # One value is put where a mask says so without the places.
            elif index.dtype == torch.bool and (func is aten.index.Tensor or args[2].numel() > 1):
                yield "places of a mask"


def numbers_of(value: Any) -> Any:
    return value.numbers if isinstance(value, OnGPU) else value


def check_devices(func: Any, args: Any, kwargs: Any) -> None:
    """Raises what CUDA raises where tensors are on two devices, or of formats that it does not multiply."""
    given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
    others = [x for x in given if not isinstance(x, OnGPU) and x.ndim]
    if func in INDEXING and isinstance(args[0], OnGPU):
        others = [x for x in others if x.dtype == torch.bool or x.is_floating_point()]
    if func is aten.scatter.src and not isinstance(args[0], OnGPU) and not args[0].any():
        others = [x for x in others if x is not args[0]]  # zeros that torch 2.11 makes in C++ for a gradient of topk
    if others and func not in ACROSS:
        raise AssertionError(f"{func} got tensors of the CPU beside those of the GPU: {[x.shape for x in others]}")
    if func in PRODUCTS and any(not x.is_floating_point() for x in given):
        raise AssertionError(f"{func} of whole numbers has no kernel for a GPU")


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Computes an operation on the CPU, also one that only a GPU has."""
    if func in (aten.mm.dtype, aten.bmm.dtype):
        a, b, dtype = args
        assert a.dtype == b.dtype
        assert a.dtype in (torch.float16, torch.bfloat16)
        assert dtype == torch.float32
        return a.to(dtype) @ b.to(dtype)
    if func is aten.histc.default and not args[0].is_floating_point():  # which a CPU does not count
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    if func in kernels_of_a_gpu():
        return kernels_of_a_gpu()[func](*args, **kwargs)
    return func(*args, **kwargs)


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """Computes what the memory-efficient kernel does, with the demands that it makes of its mask."""
    assert dropout == 0
    scores = efficient_scores(query, key, value, bias, is_causal, scale)
    sums = scores.logsumexp(3)
    out = ((scores - sums[..., None]).exp() @ value.float()).to(query.dtype)
    rows = -(-query.shape[2] // 32) * 32 - query.shape[2]
    padded = functional.pad(sums, (0, rows), value=torch.inf) if compute_log_sumexp else sums.new_empty(0)
    # The kernel lays its result out by tokens, then heads.
    return out.transpose(1, 2).contiguous().transpose(1, 2), padded, torch.tensor(0), torch.tensor(0)


def efficient_scores(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    assert query.dtype == key.dtype == value.dtype
    assert query.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert all(x.stride(-1) == 1 and x.shape[3] % 8 == 0 for x in (query, key, value))
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if is_causal:
        assert bias is None
        assert query.shape[2] == key.shape[2]
        return scores.masked_fill(~torch.ones(scores.shape[2:], dtype=torch.bool).tril(), -torch.inf)
    if bias is not None:
        assert bias.dtype == query.dtype
        assert bias.shape == scores.shape
        assert bias.stride(-1) == 1
        step = 16 // bias.element_size()
        assert all(
            stride % step == 0 for stride, size in zip(bias.stride()[:3], bias.shape[:3], strict=True) if size > 1
        )
        scores = scores + bias
    return scores


def efficient_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout: float,
    wanted: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float,
) -> tuple[Tensor | None, ...]:
    check_deterministic()
    assert dropout == 0
    assert (*wanted,) == (True, True, True, False)
    scores = efficient_scores(query, key, value, bias, is_causal, scale)
    count = query.shape[2]
    assert sums.shape == (*query.shape[:2], -(-count // 32) * 32)
    assert sums.is_contiguous()
    assert bool(sums[..., count:].isposinf().all()), "keys of queries that are not there would have gradients"
    assert all(x.stride(-1) == 1 for x in (gradient, out))
    return *recomputed_gradients(gradient, query, key, value, out, scores, sums[..., :count], scale), None


def check_deterministic() -> None:
    """Fails where kernels are to be deterministic, but torch chooses those of attention that are not."""
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "torch warns, and computes otherwise"


def recomputed_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, scores: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """The gradients as the kernels compute them: from scores, and the sums and the result that they are given."""
    assert gradient.dtype == out.dtype == query.dtype
    assert gradient.shape == out.shape
    g, q, k, v, o = (x.float() for x in (gradient, query, key, value, out))
    weights = (scores - sums[..., None]).exp()
    of_scores = weights * (g @ v.transpose(-2, -1) - (g * o).sum(-1, keepdim=True)) * scale
    found = of_scores @ k, of_scores.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ g
    return tuple(x.to(query.dtype) for x in found)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float,
    window: Sequence[int],
    grouped: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes what the operation below torch's `varlen_attn` does, with FlashAttention's demands."""
    from rollgrad.adapters.models.torch.kernels.attention import SINCE_2_12

    assert grouped is (SINCE_2_12 and query.shape[1] != key.shape[1])  # torch 2.11 is not told
    outputs, sums = [], []
    for _, _, v, scores, _ in flash_sequences(query, key, value, cu_q, cu_k, max_q, max_k, is_causal, scale, window):
        sums.append(scores.logsumexp(2))
        outputs.append(((scores - sums[-1][..., None]).exp() @ v).transpose(0, 1))
    return torch.cat(outputs).to(query.dtype), torch.cat(sums, 1), torch.zeros(2, dtype=torch.uint64)


def flash_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float,
    window: Sequence[int],
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, tuple[slice, slice]]]:
    """Yields q [H, Q, D], k and v [H, K, D] and scores [H, Q, K] of each sequence, and its places."""
    for x in (query, key, value):
        assert x.ndim == 3
        assert x.stride(-1) == 1
        assert x.dtype == query.dtype
        assert x.dtype in (torch.float16, torch.bfloat16)
        assert x.shape[2] == query.shape[2]
        assert x.shape[2] % 8 == 0
        assert x.shape[2] <= 256
    assert query.shape[1] % key.shape[1] == 0
    left, right = window
    assert right == 0
    assert is_causal is (left == -1)
    ends = []
    for cu, x, longest in ((cu_q, query, max_q), (cu_k, key, max_k)):
        assert cu.dtype == torch.int32
        assert cu.is_contiguous()
        assert (int(cu[0]), int(cu[-1]), int(cu.diff().max())) == (0, len(x), longest)
        ends.append([slice(*pair) for pair in pairwise(cu.tolist())])
    for of_q, of_k in zip(*ends, strict=True):
        q = query[of_q].float().transpose(0, 1)
        k, v = (x[of_k].float().transpose(0, 1).repeat_interleave(len(q) // x.shape[1], 0) for x in (key, value))
        last = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        place = torch.arange(k.shape[1])
        hidden = (place > last) | ((place < last - left) if left >= 0 else torch.tensor(False))
        yield q, k, v, (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf), (of_q, of_k)


def flash_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums_HQ: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    state: Tensor,
    scale: float,
    window: Sequence[int],
) -> tuple[Tensor, ...]:
    check_deterministic()
    assert state.dtype == torch.uint64
    assert (sums_HQ.dtype, sums_HQ.shape) == (torch.float32, (query.shape[1], query.shape[0]))
    assert all(x.is_contiguous() for x in (gradient, out, sums_HQ))
    found: list[list[Tensor]] = [[], [], []]
    for q, k, v, scores, (of_q, _) in flash_sequences(
        query, key, value, cu_q, cu_k, max_q, max_k, is_causal, scale, window
    ):
        g, o = (x[of_q].float().transpose(0, 1) for x in (gradient, out))
        parts = recomputed_gradients(g, q, k, v, o, scores, sums_HQ[:, of_q], scale)
        for kept, part, heads in zip(found, parts, (len(q), key.shape[1], key.shape[1]), strict=True):
            kept.append(part.unflatten(0, (heads, -1)).sum(1).transpose(0, 1))
    return tuple(torch.cat(kept).to(query.dtype) for kept in found)


@cache
def kernels_of_a_gpu() -> dict[Any, Callable[..., Any]]:
    """Returns doubles of operations that only a GPU has."""
    import torch.nn.attention.varlen  # which registers the operations

    return {
        aten._scaled_dot_product_efficient_attention.default: efficient_attention,
        aten._scaled_dot_product_efficient_attention_backward.default: efficient_attention_backward,
        torch.ops.torch_attn._varlen_attn.default: flash_attention,
        torch.ops.torch_attn._varlen_attn_backward.default: flash_attention_backward,
    }


class ToGPU(torch.autograd.Function):
    """Moves a tensor, and its gradient back; `waits` says whether the CPU does."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, waits: bool) -> Tensor:
        ctx.waits = waits
        WAITED.update([TO_GPU] * waits)
        return OnGPU(tensor.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        WAITED.update([TO_CPU] * ctx.waits)
        return on_cpu(gradient), None


class ToCPU(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, waits: bool) -> Tensor:
        ctx.waits = waits
        WAITED.update([TO_CPU] * waits)
        return tensor.numbers.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        WAITED.update([TO_GPU] * ctx.waits)
        return OnGPU(gradient), None


def on_cpu(tensor: Tensor) -> Tensor:
    return tensor.numbers if isinstance(tensor, OnGPU) else tensor


def moved(tensor: Tensor, device: torch.device, *, copy: bool, waits: bool = True) -> Tensor:
    if isinstance(tensor, OnGPU) == (device.type == "cuda"):
        return tensor.clone() if copy else tensor
    to = ToGPU if device.type == "cuda" else ToCPU
    return to.apply(tensor, waits)  # type: ignore[no-untyped-call,no-any-return]


ANSWERS = {Tensor.device.__get__: CUDA, Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False}  # type: ignore[attr-defined]
"""Answers of a tensor of the pretended GPU about itself, by the getter of the attribute."""


VIEWS = {Tensor.__getitem__, Tensor.expand, Tensor.expand_as, Tensor.view}


class Pretending(TorchFunctionMode):
    """Lets the functions of torch find the pretended GPU inside the block, in this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, OnGPU) and func in ANSWERS:
            return ANSWERS[func]
        if func is functional.scaled_dot_product_attention and isinstance(first, OnGPU):
            return dense_attention(*args, **kwargs)
        if func is Tensor.backward:
            with self:  # a mode is off inside the functions that it hears of, and what they call would not find it
                return torch.autograd.backward(first, kwargs["gradient"])
        if func in (Tensor.storage, Tensor.untyped_storage, Tensor.data_ptr) and isinstance(first, OnGPU):
            return func(first.numbers)  # by which tensors that share memory are known
        if func in (Tensor.cpu, Tensor.cuda):
            return moved(first, CPU if func is Tensor.cpu else CUDA, copy=False)
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        if func is Tensor.tolist and isinstance(first, OnGPU):
            WAITED[TO_CPU] += 1
            return first.numbers.tolist()
        if func is Tensor.numpy and isinstance(first, OnGPU):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if func in VIEWS and isinstance(first, OnGPU) and torch.is_inference_mode_enabled():
            # A wrapper that was made outside, such as a parameter, has no views in inference mode.
            with torch.inference_mode(first.is_inference()), torch.no_grad():
                return func(*args, **kwargs)
        if func is Tensor.pin_memory:
            PINNED[copied := first.clone()] = True
            return copied
        device = kwargs.pop("device", None)
        pinned = kwargs.pop("pin_memory", False)
        if device is None or (pinned and torch.device(device).type == "cpu"):
            made = func(*args, **kwargs)
            if pinned:
                PINNED[made] = True
            return made
        if func is torch.tensor:  # of numbers that may be on the GPU, each of which it waits for
            args = (tree_map(numbers_of, first), *args[1:])
        made = func(*args, **kwargs, device=CPU if torch.device(device).type == "cuda" else device)
        filled = func is not torch.tensor  # by a kernel, with numbers that are not the CPU's
        return (
            made
            if torch.device(device).type == "meta"
            else moved(made, torch.device(device), copy=False, waits=not filled)
        )

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        other = next((x for x in args if isinstance(x, Tensor)), kwargs.get("other"))
        device = kwargs.get("device", next((x for x in args if isinstance(x, (str, torch.device))), None))
        dtype = kwargs.get("dtype", next((x for x in args if isinstance(x, torch.dtype)), None))
        if other is not None:
            device, dtype = (CUDA if isinstance(other, OnGPU) else CPU), other.dtype
        copy, waits = bool(kwargs.get("copy")), not (kwargs.get("non_blocking") and tensor in PINNED)
        result = tensor if device is None else moved(tensor, torch.device(device), copy=copy, waits=waits)
        if dtype is not None and result.dtype != dtype:
            result = Tensor.to(result, dtype)
        elif kwargs.get("copy") and result is tensor:
            result = tensor.clone()
        return result


BACKWARD = torch.autograd.function.BackwardCFunction.apply


def backward_with_zeros(node: Any, *gradients: Any) -> Any:
    """Computes gradients; of an output that nothing depends on torch has made zeros on the CPU."""
    zeros = [type(x) is Tensor and x.ndim > 0 and not bool(x.any()) for x in gradients]
    if any(zeros) and any(isinstance(x, OnGPU) for x in (*gradients, *node.saved_tensors)):
        gradients = tuple(OnGPU(x) if zero else x for x, zero in zip(gradients, zeros, strict=True))
    with Pretending():
        return BACKWARD(node, *gradients)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **settings: Any
) -> Tensor:
    """Computes torch's scaled dot-product attention, which looks at the device itself."""
    given = [x for x in (query, key, value, attn_mask) if x is not None]
    assert all(isinstance(x, OnGPU) for x in given)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    fused = torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled()
    if query.requires_grad and fused:
        check_deterministic()
    if attn_mask is not None:
        assert attn_mask.dtype in (query.dtype, torch.bool)
        assert query.shape[1] == key.shape[1], "no fused kernel takes a mask and shares heads"
    query, key, value, *mask = (ToCPU.apply(x, False) for x in given)
    out = functional.scaled_dot_product_attention(query, key, value, *mask, **settings)
    return ToGPU.apply(out, False)  # type: ignore[no-untyped-call,no-any-return]


def submit_pretending(pool: ThreadPoolExecutor, work: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Runs `work` in a thread of `pool`, which finds the pretended GPU, too."""

    def pretending() -> Any:
        with Pretending():
            return work(*args, **kwargs)

    return SUBMIT(pool, pretending)


SUBMIT = ThreadPoolExecutor.submit


class Captured:
    """Captures a step of decoding by keeping its function, in which a CUDA graph could not wait for the GPU."""

    def __call__(self, compute: Callable[[Any], Tensor], inputs: Any) -> tuple[Tensor, Callable[[], object]]:
        """Implements `Capture`."""
        waited = WAITED.copy()

        def captured() -> Tensor:
            with pytest.MonkeyPatch.context() as patch:  # transformers asks, and leaves out what would wait
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                return compute(inputs)

        result = captured()
        assert not WAITED - waited, f"{WAITED - waited}: nothing that is captured may wait for the GPU"
        return result, lambda: result.copy_(captured())


@contextmanager
def pretended_gpu() -> Iterator[Counter[str]]:
    """Pretends that there is a GPU inside the block; yields how often the CPU has waited for it."""
    from rollgrad.adapters.engines.embedded import step_graphs
    from rollgrad.adapters.models.torch.kernels import attention as kernels
    from rollgrad.adapters.models.torch.kernels import fusing

    WAITED.clear()
    kernels.widest_head.cache_clear()
    fusing.fused.cache_clear()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.MonkeyPatch.context() as patch, Pretending():
        patch.setattr(ThreadPoolExecutor, "submit", submit_pretending)
        patch.setattr(torch.autograd.function.BackwardCFunction, "apply", backward_with_zeros)
        for name, answer in {
            "is_available": True,
            "is_initialized": True,
            "is_current_stream_capturing": False,
            "is_bf16_supported": True,
            "device_count": 1,
            "get_device_capability": (9, 0),
            "get_device_properties": SimpleNamespace(total_memory=MEMORY),
            "mem_get_info": (MEMORY, MEMORY),
            "empty_cache": None,
            "ipc_collect": None,
            "synchronize": None,
        }.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
        patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        patch.setattr(kernels, "_installed", lambda package: False)
        patch.setattr(step_graphs, "CudaCapture", Captured)
        patch.setattr(fusing, "compiled", lambda function: function)
        yield WAITED
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    kernels.widest_head.cache_clear()
    fusing.fused.cache_clear()
