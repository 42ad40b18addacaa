"""Attention kernels of torch, chosen so that no GPU gets one that is wrong or builds a plan for each new shape.

`varlen` is FlashAttention over sequences laid end to end, a part of torch: no mask, no padding. `dense` is scaled
dot-product attention, for everything else.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from rollgrad.adapters.models.torch.kernels.capped import capped_dense, capped_with_logsumexp
from rollgrad.adapters.models.torch.kernels.determinism import are_deterministic
from rollgrad.adapters.models.torch.kernels.sinks import (
    HEAD_STEP,
    dense_with_sinks,
    no_sinks,
    varlen_with_sinks,
    widened,
)

log = structlog.get_logger(__name__)

HALF = (torch.float16, torch.bfloat16)
"""Number formats of FlashAttention."""

AMPERE = (8, 0)
"""Compute capability of the oldest GPUs with FlashAttention."""

WIDEST_HEAD = 256
"""Numbers in a head at most, of FlashAttention."""

FASTER = {(9, 0): WIDEST_HEAD, (10, 0): 128}
"""Compute capabilities for which the package flash-attn-4 has kernels, Hopper's and Blackwell's, and the numbers in a
head at most, of those that have them for heads of any width and windows."""

SINCE_2_12 = torch.__version__ >= "2.12"
"""Whether torch wants to be told where queries share keys, and computes with flash-attn-4 where there are windows, as
`varlen` has them. Before, it sees the first for itself, and has no gradients by the second."""

FLASH_ATTENTION_4 = "rollgrad.adapters.models.torch.kernels.flash_attention_4"
"""Module from which torch takes these kernels, and its name of them."""

_CHOICE = threading.RLock()
"""Held while torch computes by chosen kernels: it chooses for the whole process, so that of two threads, such as the
engine's and the trainer's, the last to leave would leave the other's choice behind."""

WITHOUT_CUDNN = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of scaled dot-product attention on a GPU, beside FlashAttention's. cuDNN's, which torch prefers on Hopper,
builds an execution plan of tens of milliseconds for each new shape, and its gradients can be NaN where there is a mask
(pytorch issue 196678)."""


def has_varlen(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Returns whether `varlen` computes heads of `width` numbers in that format on that device."""
    return device.type == "cuda" and dtype in HALF and width <= widest_head(device)


def sdpa_on(query: Tensor) -> AbstractContextManager[None]:
    """Has torch's scaled dot-product attention of these queries choose none but the right kernels of a GPU inside the
    block; they are right elsewhere."""
    if not query.is_cuda:
        return nullcontext()
    if are_deterministic() and query.requires_grad:
        return _choosing([SDPBackend.MATH])  # torch computes gradients by another kernel in a way that is not
    flash = has_varlen(query.device, query.dtype, query.shape[-1])
    return _choosing([SDPBackend.FLASH_ATTENTION, *WITHOUT_CUDNN] if flash else WITHOUT_CUDNN)


@contextmanager
def _choosing(backends: Sequence[SDPBackend]) -> Iterator[None]:
    with _CHOICE, sdpa_kernel([*backends]):
        yield


@cache
def widest_head(device: torch.device) -> int:
    """Returns the largest width of a head that a GPU's FlashAttention computes; 0 where torch has none.

    The first call takes the kernels of flash-attn-4 into use, where that package is installed and has some for the GPU.
    If torch cannot take them, its own kernels stay in use.
    """
    widest, capability = WIDEST_HEAD, torch.cuda.get_device_capability(device)
    if capability in FASTER and _installed("flash-attn-4"):
        try:
            if not SINCE_2_12:
                raise RuntimeError(f"torch {torch.__version__} has no gradients by it, 2.12 has")
            _use_flash_attention_4(device)
            widest = FASTER[capability]
        except Exception as error:  # the package fails in many ways where it does not fit torch or the machine
            log.warning(
                f"flash-attn-4 is installed, but torch cannot use it ({type(error).__name__}: {error}), and computes "
                "with FlashAttention 2: run rollgrad doctor, or uninstall flash-attn-4."
            )
    return widest if torch.backends.cuda.is_flash_attention_available() and capability >= AMPERE else 0


def _use_flash_attention_4(device: torch.device) -> None:
    """Has torch compute FlashAttention by flash-attn-4, if it can: torch itself looks no further than whether the
    package has two functions, and each version of them fits some versions of torch."""
    from torch.nn import attention
    from torch.nn.attention import _fa4

    register = partial(_fa4.register_flash_attention_fa4, module_path=FLASH_ATTENTION_4)
    attention.register_flash_attention_impl(FLASH_ATTENTION_4, register_fn=register)
    attention.activate_flash_attention_impl(FLASH_ATTENTION_4)
    try:
        _attend_once(device)
    except BaseException:
        attention.restore_flash_attention_impl()
        raise


def _attend_once(device: torch.device) -> None:
    """Computes attention and its gradients by the kernels that torch has now.

    Raises:
        ArithmeticError: they are wrong.
    """
    with torch.inference_mode(False), torch.enable_grad():
        query, key, value = (
            torch.ones(16, heads, 128, dtype=torch.bfloat16, device=device, requires_grad=True) for heads in (2, 1, 1)
        )
        ends = torch.tensor([0, 16], dtype=torch.int32, device=device)
        out = varlen(query, key, value, ends, ends, 16, 16, scaling=1.0, window=None)
        gradients = torch.autograd.grad(out.sum(), (query, key, value))
    # Means of ones depend on no score, and of 16 x 2 queries each gives values a weight of 1 in all.
    mean, total = float(out.detach().float().mean()), float(gradients[2][:, :, 0].float().sum())
    if abs(mean - 1) > 0.01 or abs(total / 32 - 1) > 0.01:
        raise ArithmeticError(f"it computes {mean:g} where all values are 1, and {total:g} for a gradient of 32")


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def varlen(
    query_QHD: Tensor,
    key_KGD: Tensor,
    value_KGE: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scaling: float,
    window: int | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Returns attention [Q, H, E] of sequences laid end to end, each query to the keys of its own sequence up to
    itself: the last query of a sequence sees its last key.

    Args:
        query_QHD: queries in half precision.
        key_KGD: keys; G divides H.
        value_KGE: values.
        cu_q: int32, where each sequence's queries begin, and the end of the last.
        cu_k: int32, the same for keys and values.
        max_q: queries of the longest.
        max_k: keys of the longest.
        scaling: factor of the scores.
        window: keys that a query sees at most, itself included; None is all.
        sinks_H: scores of the sinks (`sinks.py`).
    """
    from torch.nn.attention.varlen import varlen_attn

    width = value_KGE.shape[2]
    common = -(-max(key_KGD.shape[2], width) // HEAD_STEP) * HEAD_STEP
    query, key, value = (_in_rows(widened(x, common)) for x in (query_QHD, key_KGD, value_KGE))
    left = -1 if window is None else window - 1
    sharing: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if SINCE_2_12 else {}
    if sinks_H is None and are_deterministic() and query.requires_grad:
        sinks_H = no_sinks(query, query.shape[1])
    if sinks_H is not None:
        place = (cu_q, cu_k, max_q, max_k)
        with_sinks = varlen_with_sinks(query, key, value, sinks_H, *place, scaling=scaling, left=left, sharing=sharing)
        return _narrowed(with_sinks, width)
    out = varlen_attn(
        query,
        key,
        value,
        cu_q,
        cu_k,
        max_q,
        max_k,
        scale=scaling,
        window_size=(left, 0),
        **sharing,
    )
    assert isinstance(out, Tensor)
    return _narrowed(out, width)


def _in_rows(x: Tensor) -> Tensor:
    """Returns heads whose numbers follow each other in memory, as the kernel takes them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _narrowed(out: Tensor, width: int) -> Tensor:
    """Returns the first `width` numbers of heads; those that have no more are not copied in the backward pass, as that
    of `narrow` would."""
    return out if out.shape[-1] == width else out.narrow(-1, 0, width)


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Returns attention [B, H, Q, E] of query [B, H, Q, D] to key [B, G, K, D] and value [B, G, K, E], where G divides
    H. An additive mask broadcasts to [B, H, Q, K]; without a mask each query sees the keys up to its own. `sinks` [H,
    Q] are the scores of each query's sink (`sinks.py`); a `cap`, which needs a mask, limits scores (`capped.py`)."""
    if cap is not None and mask is not None:
        return capped_dense(query, key, value, scaling=scaling, mask=mask, cap=cap)
    shared = query.shape[1] // key.shape[1]
    if query.is_cuda and shared > 1:  # of the kernels that take a mask, or float32, none shares heads by itself
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    if sinks is None and query.is_cuda and are_deterministic() and query.requires_grad:
        sinks = no_sinks(query, *query.shape[1:3])
    if sinks is not None:
        return dense_with_sinks(query, key, value, sinks, scaling=scaling, mask=mask)
    with sdpa_on(query):
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def dense_with_logsumexp(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, mask: Tensor, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Returns attention [B, H, Q, E] as `dense` does where query and key have equally many heads. Also returns the log
    of the sum of its exponentiated scores [B, H, Q], by which attention to parts of the keys is combined; it is
    float32, or in the query's format if that is wider. Where the mask hides all keys of a query, both are arbitrary. A
    `cap` limits scores (`capped.py`).

    The kernels are those of `scaled_dot_product_attention`, which computes this sum and does not return it.
    """
    if cap is not None:
        return capped_with_logsumexp(query, key, value, scaling=scaling, mask=mask, cap=cap)
    if query.is_cuda and query.shape[3] % HEAD_STEP == value.shape[3] % HEAD_STEP == 0 and query.dtype != torch.float64:
        # The mask is widened without a copy, and sums are padded to a multiple of queries.
        shape = (*query.shape[:3], key.shape[2])
        out, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask.expand(shape), compute_log_sumexp=True, scale=scaling
        )
        return out, sums.narrow(2, 0, query.shape[2])
    if query.device.type == "cpu" and query.shape[3] == value.shape[3]:
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scaling
        )
        return out, sums
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = scaling * (query.to(wide) @ key.to(wide).transpose(2, 3)) + mask
    sums = scores.logsumexp(3)
    return ((scores - sums[..., None]).exp() @ value.to(wide)).to(query.dtype), sums
