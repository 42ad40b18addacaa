"""A GPU that is none: tensors with numbers, computed on the CPU, that say they are on a CUDA device and refuse what a
real one refuses. Whole code paths run on it, so that a tensor that somebody forgot to move is found without a GPU.
Does not pretend: kernels' rounding, memory, streams, several GPUs, nor activations that are computed again.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

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
    *(aten.repeat_interleave.Tensor, aten.equal.default),
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
        if func in WAITS:
            WAITED[str(func)] += 1
        plain, named = tree_map(numbers_of, (args, kwargs))
        result = computed(func, plain, named)
        if func._schema.is_mutable and isinstance(result, Tensor):
            return kwargs.get("out", args[0])
        return tree_map(lambda x: OnGPU(x) if isinstance(x, Tensor) else x, result)


WAITED: Counter[str] = Counter()
"""How often the CPU has waited for the GPU, by operation."""


def numbers_of(value: Any) -> Any:
    return value.numbers if isinstance(value, OnGPU) else value


def check_devices(func: Any, args: Any, kwargs: Any) -> None:
    """Raises what CUDA raises where tensors are on two devices, or of formats that it does not multiply."""
    given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
    others = [x for x in given if not isinstance(x, OnGPU) and x.ndim]
    if func in INDEXING and isinstance(args[0], OnGPU):
        others = [x for x in others if x.dtype == torch.bool or x.is_floating_point()]
    if others and func not in ACROSS:
        raise AssertionError(f"{func} got tensors of the CPU beside those of the GPU: {[x.shape for x in others]}")
    if func in PRODUCTS and any(not x.is_floating_point() for x in given):
        raise AssertionError(f"{func} of whole numbers has no kernel for a GPU")


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Computes an operation on the CPU, also one that only a GPU has."""
    if func is aten.mm.dtype:
        a, b, dtype = args
        assert a.dtype == b.dtype
        assert a.dtype in (torch.float16, torch.bfloat16)
        assert dtype == torch.float32
        return a.to(dtype) @ b.to(dtype)
    if func is aten.histc.default and not args[0].is_floating_point():  # which a CPU does not count
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    if func is aten._scaled_dot_product_efficient_attention.default:
        return efficient_attention(*args, **kwargs)
    return func(*args, **kwargs)


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, compute_log_sumexp: bool, *, scale: float
) -> tuple[Tensor, ...]:
    """Computes what the memory-efficient kernel does, with the demands that it makes of its mask."""
    assert query.dtype == key.dtype == value.dtype
    assert query.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if bias is not None:
        assert bias.dtype == query.dtype
        assert bias.shape == scores.shape
        assert bias.stride(-1) == 1
        step = 16 // bias.element_size()
        assert all(
            stride % step == 0 for stride, size in zip(bias.stride()[:3], bias.shape[:3], strict=True) if size > 1
        )
        scores = scores + bias
    sums = scores.logsumexp(3)
    out = ((scores - sums[..., None]).exp() @ value.float()).to(query.dtype)
    rows = -(-query.shape[2] // 32) * 32
    padded = functional.pad(sums, (0, rows - query.shape[2])) if compute_log_sumexp else sums.new_empty(0)
    # The kernel lays its result out by tokens, then heads.
    return out.transpose(1, 2).contiguous().transpose(1, 2), padded, torch.tensor(0), torch.tensor(0)


class ToGPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return OnGPU(tensor.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return on_cpu(gradient)


class ToCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        return tensor.numbers.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return OnGPU(gradient)


def on_cpu(tensor: Tensor) -> Tensor:
    return tensor.numbers if isinstance(tensor, OnGPU) else tensor


def moved(tensor: Tensor, device: torch.device, *, copy: bool) -> Tensor:
    if isinstance(tensor, OnGPU) == (device.type == "cuda"):
        return tensor.clone() if copy else tensor
    if device.type == "cuda":
        return ToGPU.apply(tensor)  # type: ignore[no-untyped-call,no-any-return]
    WAITED["to cpu"] += 1
    return ToCPU.apply(tensor)  # type: ignore[no-untyped-call,no-any-return]


ANSWERS = {Tensor.device.__get__: CUDA, Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False}  # type: ignore[attr-defined]
"""Answers of a tensor of the pretended GPU about itself, by the getter of the attribute."""


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
                return torch.autograd.backward(first)
        if func in (Tensor.cpu, Tensor.cuda):
            return moved(first, CPU if func is Tensor.cpu else CUDA, copy=False)
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        if func is Tensor.tolist and isinstance(first, OnGPU):
            WAITED["tolist"] += 1
            return first.numbers.tolist()
        if func is Tensor.numpy and isinstance(first, OnGPU):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        device = kwargs.pop("device", None)
        kwargs.pop("pin_memory", None)
        if device is None:
            return func(*args, **kwargs)
        made = func(*args, **kwargs, device=CPU if torch.device(device).type == "cuda" else device)
        return moved(made, torch.device(device), copy=False) if torch.device(device).type != "meta" else made

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        other = next((x for x in args if isinstance(x, Tensor)), kwargs.get("other"))
        device = kwargs.get("device", next((x for x in args if isinstance(x, (str, torch.device))), None))
        dtype = kwargs.get("dtype", next((x for x in args if isinstance(x, torch.dtype)), None))
        if other is not None:
            device, dtype = (CUDA if isinstance(other, OnGPU) else CPU), other.dtype
        result = tensor if device is None else moved(tensor, torch.device(device), copy=bool(kwargs.get("copy")))
        if dtype is not None and result.dtype != dtype:
            result = Tensor.to(result, dtype)
        elif kwargs.get("copy") and result is tensor:
            result = tensor.clone()
        return result


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **settings: Any
) -> Tensor:
    """Computes torch's scaled dot-product attention, which looks at the device itself."""
    given = [x for x in (query, key, value, attn_mask) if x is not None]
    assert all(isinstance(x, OnGPU) for x in given)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    if attn_mask is not None:
        assert attn_mask.dtype in (query.dtype, torch.bool)
        assert query.shape[1] == key.shape[1], "no fused kernel takes a mask and shares heads"
    query, key, value, *mask = (ToCPU.apply(x) for x in given)
    out = functional.scaled_dot_product_attention(query, key, value, *mask, **settings)
    return ToGPU.apply(out)  # type: ignore[no-untyped-call,no-any-return]


def varlen_attention(library: Callable[..., Any]) -> Callable[..., Tensor]:
    """Returns what computes as torch's `varlen_attn` does, with its signature and FlashAttention's demands."""
    signature = inspect.signature(library)

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs).arguments
        query, key, value, cu_seq_q, cu_seq_k = (given[n] for n in ("query", "key", "value", "cu_seq_q", "cu_seq_k"))
        assert {x.dtype for x in (query, key, value)} <= {query.dtype} & {torch.float16, torch.bfloat16}
        assert {x.dtype for x in (cu_seq_q, cu_seq_k)} == {torch.int32}
        assert {x.device for x in (query, key, value, cu_seq_q, cu_seq_k)} == {CUDA}
        assert all(x.stride(-1) == 1 and x.shape[-1] % 8 == 0 for x in (query, key, value))
        shares = query.shape[1] != key.shape[1]
        assert given.get("enable_gqa", shares) is shares  # which torch 2.11 sees without being told
        q, k, v = (moved(x, CPU, copy=False).float() for x in (query, key, value))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        left, right = given["window_size"]
        assert right == 0
        outputs = []
        ends = zip(*(pairwise(on_cpu(cu).tolist()) for cu in (cu_seq_q, cu_seq_k)), strict=True)
        for (q0, q1), (k0, k1) in ends:
            assert q1 - q0 <= given["max_q"]
            assert k1 - k0 <= given["max_k"]
            last = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
            place = torch.arange(k1 - k0)
            hidden = (place > last) | ((place < last - left) if left >= 0 else torch.tensor(False))
            scores = torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1]) * given["scale"]
            outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[k0:k1]))
        return moved(torch.cat(outputs).to(query.dtype), CUDA, copy=False)

    return attend


class PretendingWorker(ThreadPoolExecutor):
    """A thread that finds the pretended GPU, too."""

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Runs `work` in the thread."""

        def pretending() -> Any:
            with Pretending():
                return work(*args, **kwargs)

        return super().submit(pretending)


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
    import torch.nn.attention.varlen as library

    from rollgrad.adapters.engines.embedded import step_graphs
    from rollgrad.adapters.models.torch import kernels

    WAITED.clear()
    kernels._widest_head.cache_clear()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.MonkeyPatch.context() as patch, Pretending():
        for name, answer in {
            "get_device_capability": (9, 0),
            "get_device_properties": SimpleNamespace(total_memory=MEMORY),
            "mem_get_info": (MEMORY, MEMORY),
            "empty_cache": None,
            "synchronize": None,
        }.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        patch.setattr(kernels, "_installed", lambda package: False)
        patch.setattr(library, "varlen_attn", varlen_attention(library.varlen_attn))
        patch.setattr(step_graphs, "CudaCapture", Captured)
        yield WAITED
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    kernels._widest_head.cache_clear()
