"""The kernels of attention that a GPU gets: doubles that take no more than the real ones do, and the real ones."""

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from threading import Event, Thread
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rollgrad.adapters.models.torch.kernels import attention as kernels
from rollgrad.adapters.models.torch.kernels.attention import dense, dense_with_logsumexp, has_varlen, sdpa_on
from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
from rollgrad.adapters.models.torch.layers import attention
from rollgrad.adapters.models.torch.layers.attention import ForestAttention
from rollgrad.adapters.models.torch.layers.layout import Node

CUDA = torch.device("cuda", 0)
NODES = [
    Node(0, 37),
    Node(37, 50, ((0, 37),)),
    Node(87, 1, ((0, 37),)),
    Node(88, 20, ((0, 30), (37, 25))),
    Node(108, 29),
]
TOKENS = 137
HEADS = {"grouped": (8, 2, 16, 16), "alone": (4, 4, 24, 24), "odd": (6, 3, 20, 20), "narrow values": (4, 4, 24, 16)}
"""Query heads, key heads, and the widths of keys and of values."""


def test_threads_do_not_leave_the_kernels_of_each_other_behind() -> None:
    query: Any = SimpleNamespace(
        is_cuda=True, requires_grad=False, device=torch.device("cpu"), dtype=torch.float32, shape=(1, 8)
    )
    before, left = torch.backends.cuda.flash_sdp_enabled(), Event()

    def second() -> None:
        with sdpa_on(query):
            left.wait(10)

    with sdpa_on(query):
        assert not torch.backends.cuda.flash_sdp_enabled()
        thread = Thread(target=second)
        thread.start()
        thread.join(0.2)  # by when it would have begun
    left.set()
    thread.join()
    assert torch.backends.cuda.flash_sdp_enabled() is before is True


def strict_varlen(seen: list[Any]) -> Callable[..., Tensor]:
    """Returns a double of torch's `varlen_attn` that takes what FlashAttention does and no more, and computes it."""
    from torch.nn.attention.varlen import varlen_attn

    signature = inspect.signature(varlen_attn)

    @wraps(varlen_attn)
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        query, key, value, cu_q, cu_k = (given[n] for n in ("query", "key", "value", "cu_seq_q", "cu_seq_k"))
        for x in (query, key, value):
            assert x.ndim == 3
            assert x.stride(-1) == 1
            assert x.dtype == query.dtype
            assert x.dtype in (torch.float16, torch.bfloat16)
            assert x.device == query.device
            assert x.shape[2] == query.shape[2]
            assert x.shape[2] % 8 == 0
            assert x.shape[2] <= 256
        assert key.shape == value.shape
        assert query.shape[1] % key.shape[1] == 0
        shares = query.shape[1] != key.shape[1]
        assert given.get("enable_gqa", shares) is shares  # which torch 2.11 sees without being told
        for cu, x, longest in ((cu_q, query, given["max_q"]), (cu_k, key, given["max_k"])):
            assert cu.dtype == torch.int32
            assert cu.is_contiguous()
            assert cu.device == query.device
            assert isinstance(longest, int)
            if not isinstance(cu, torch._subclasses.FakeTensor):
                assert cu[0] == 0
                assert cu[-1] == len(x)
                assert cu.diff().max() == longest
        left, right = given["window_size"]
        assert right == 0
        assert left >= -1
        assert isinstance(given["scale"], float)
        assert all(given.get(name) is None for name in ("return_aux", "seqused_k", "block_table", "num_splits"))
        seen.append(given)
        if isinstance(query, torch._subclasses.FakeTensor):
            return torch.empty_like(query)
        return sequence_by_sequence(query, key, value, cu_q.tolist(), cu_k.tolist(), given["scale"], left)

    return attend


def sequence_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, cu_q: list[int], cu_k: list[int], scale: float, left: int
) -> Tensor:
    """The last query sees the last key, as FlashAttention aligns them."""
    outputs = []
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        q = query[q0:q1].double().transpose(0, 1)
        k, v = (
            x[k0:k1].double().transpose(0, 1).repeat_interleave(query.shape[1] // x.shape[1], 0) for x in (key, value)
        )
        last = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        place = torch.arange(k1 - k0)[None]
        visible = (place <= last) & ((place >= last - left) if left >= 0 else torch.tensor(True))
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs).to(query.dtype)


def inputs(kind: str, dtype: torch.dtype, device: torch.device | None = None) -> list[Tensor]:
    heads, key_heads, width, value_width = HEADS[kind]
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, width), (key_heads, width), (key_heads, value_width))
    return [
        torch.randn(1, h, TOKENS, w, generator=generator).to(device=device, dtype=dtype).requires_grad_()
        for h, w in shapes
    ]


def attended(leaves: list[Tensor], window: int | None) -> list[Tensor]:
    """The result and the gradients."""
    plan = ForestAttention(NODES, device=leaves[0].device, dtype=leaves[0].dtype)
    out = plan.attend(0, leaves[0], leaves[1], leaves[2], ScoreForm(0.3, window))
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), leaves)]


@pytest.mark.parametrize("window", [None, 7], ids=str)
@pytest.mark.parametrize("kind", HEADS)
def test_the_call_for_a_gpu_computes_what_the_buckets_do(
    kind: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.nn.attention.varlen as library

    expected = attended(inputs(kind, torch.float32), window)
    seen: list[Any] = []
    monkeypatch.setattr(library, "varlen_attn", strict_varlen(seen))
    monkeypatch.setattr(attention, "has_varlen", lambda *_: True)
    found = attended(inputs(kind, torch.bfloat16), window)
    assert len(seen) == 1
    for mine, exact in zip(found, expected, strict=True):
        assert (mine.float() - exact).norm() <= 0.02 * exact.norm()


def test_heads_of_the_width_that_a_gpu_takes_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.varlen as library

    seen: list[Any] = []
    monkeypatch.setattr(library, "varlen_attn", strict_varlen(seen))
    heads = [torch.randn(9, h, 16).bfloat16() for h in (4, 2, 2)]
    cu = torch.tensor([0, 9], dtype=torch.int32)
    kernels.varlen(*heads, cu, cu, 9, 9, scaling=0.3, window=None)
    assert [seen[0][name].data_ptr() for name in ("query", "key", "value")] == [x.data_ptr() for x in heads]


@pytest.mark.parametrize("tokens", [9, 12], ids=["all", "more keys than queries"])
def test_keys_of_sequences_that_share_nothing_are_not_copied(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.varlen as library

    seen: list[Any] = []
    monkeypatch.setattr(library, "varlen_attn", strict_varlen(seen))
    monkeypatch.setattr(attention, "has_varlen", lambda *_: True)
    query, key, value = (torch.randn(1, h, n, 16).bfloat16() for h, n in ((4, 9), (2, tokens), (2, tokens)))
    ForestAttention([Node(0, 5), Node(5, 4)], device=query.device, dtype=query.dtype).attend(
        0, query, key, value, ScoreForm(0.3)
    )
    assert [seen[0][name].data_ptr() for name in ("query", "key", "value")] == [
        x.data_ptr() for x in (query, key, value)
    ]
    assert [len(seen[0][name]) for name in ("key", "value")] == [9, 9]


def test_heads_whose_numbers_lie_apart_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.varlen as library

    seen: list[Any] = []
    monkeypatch.setattr(library, "varlen_attn", strict_varlen(seen))
    heads = [torch.randn(9, 16, h).bfloat16().transpose(1, 2) for h in (4, 2, 2)]
    cu = torch.tensor([0, 9], dtype=torch.int32)
    kernels.varlen(*heads, cu, cu, 9, 9, scaling=0.3, window=None)
    assert all(torch.equal(seen[0][name], x) for name, x in zip(("query", "key", "value"), heads, strict=True))


def test_all_that_the_call_for_a_gpu_takes_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.varlen as library
    from torch._subclasses import FakeTensorMode

    seen: list[Any] = []
    monkeypatch.setattr(library, "varlen_attn", strict_varlen(seen))
    monkeypatch.setattr(kernels, "widest_head", lambda device: 256)
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    with FakeTensorMode():  # which refuses what mixes devices, and has no pinned memory
        heads, key_heads, width, _ = HEADS["grouped"]
        q, k, v = (
            torch.empty(1, h, TOKENS, width, device=CUDA, dtype=torch.bfloat16) for h in (heads, key_heads, key_heads)
        )
        out = ForestAttention(NODES, device=CUDA, dtype=torch.bfloat16).attend(0, q, k, v, ScoreForm(0.3))
        assert (out.shape, out.device) == ((1, TOKENS, heads, width), CUDA)
    assert len(seen) == 1


@pytest.mark.parametrize(("window", "heads", "key_heads"), [(None, 8, 2), (5, 8, 2), (5, 3, 3)], ids=str)
def test_no_masked_attention_on_a_gpu_is_left_to_cudnn_or_without_a_fused_kernel(
    window: int | None, heads: int, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._subclasses import FakeTensorMode

    calls: list[Any] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
        assert query.shape[1] == key.shape[1] == value.shape[1]
        assert given["enable_gqa"] is False
        mask = given["attn_mask"]
        assert given["is_causal"] is (mask is None)
        assert mask is None or (mask.dtype, mask.device) == (query.dtype, query.device)
        calls.append(given)
        return query.new_empty(*query.shape[:3], value.shape[3])

    before = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    with FakeTensorMode():
        q, k = (torch.empty(2, h, 9, 16, device=CUDA) for h in (heads, key_heads))
        mask = None if window is None else torch.empty(2, 1, 9, 9, device=CUDA)
        assert dense(q, k, k, scaling=0.3, mask=mask).shape == q.shape
    assert len(calls) == 1
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float64, 1e-10)],
    ids=str,
)
@pytest.mark.parametrize("widths", [(16, 16), (16, 8), (20, 20)], ids=str)
def test_attention_comes_with_the_logarithm_of_its_sums(
    widths: tuple[int, int], dtype: torch.dtype, allowed: float, device: str
) -> None:
    """Results of keys in two halves are combined by it."""
    if device == "cuda" and dtype == torch.float32:
        allowed = 1e-4  # a GPU's tensor cores multiply float32 in parts
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(3, 2, tokens, width, generator=generator).to(device=device, dtype=dtype)
        for tokens, width in ((5, widths[0]), (128, widths[0]), (128, widths[1]))
    )
    mask = torch.zeros(3, 1, 1, 128, dtype=dtype, device=device)
    mask[1, ..., 100:] = -torch.inf
    scores = (query.double() @ key.double().transpose(2, 3)) * 0.3 + mask.double()
    expected, sums = scores.softmax(-1) @ value.double(), scores.logsumexp(-1)
    out, found = dense_with_logsumexp(query, key, value, mask=mask, scaling=0.3)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=allowed, atol=allowed)
    torch.testing.assert_close(found.double(), sums, rtol=allowed, atol=allowed)
    halves = [
        dense_with_logsumexp(query, k, v, mask=m, scaling=0.3)
        for k, v, m in zip(key.split(64, 2), value.split(64, 2), mask.split(64, 3), strict=True)
    ]
    shares = torch.stack([found for _, found in halves]).softmax(0)
    combined = sum(out * share[..., None] for (out, _), share in zip(halves, shares, strict=True))
    torch.testing.assert_close(combined.double(), expected, rtol=allowed, atol=allowed)  # type: ignore[union-attr]


@pytest.mark.parametrize("queries", [1, 3, 40])
def test_the_call_for_a_gpu_with_sums_is_one_that_torch_takes(queries: int) -> None:
    """By torch's own rule of its results' shapes, which pads the sums."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        query = torch.empty(7, 2, queries, 64, device=CUDA, dtype=torch.bfloat16)
        key, value = (torch.empty(7, 2, 128, width, device=CUDA, dtype=torch.bfloat16) for width in (64, 32))
        mask = torch.empty(7, 1, 1, 128, device=CUDA, dtype=torch.bfloat16)
        out, sums = dense_with_logsumexp(query, key, value, mask=mask, scaling=0.1)
    assert (out.shape, out.dtype, out.device) == ((7, 2, queries, 32), torch.bfloat16, CUDA)
    assert (sums.shape, sums.dtype, sums.device) == ((7, 2, queries), torch.float32, CUDA)


BLACKWELL, HOPPER, AMPERE, TURING = (10, 0), (9, 0), (8, 0), (7, 5)


@pytest.mark.parametrize(
    ("device", "dtype", "width", "capability", "expected"),
    [
        (CUDA, torch.bfloat16, 128, HOPPER, True),
        (CUDA, torch.float16, 256, AMPERE, True),
        (CUDA, torch.bfloat16, 512, HOPPER, False),
        (CUDA, torch.float32, 128, HOPPER, False),
        (CUDA, torch.float16, 128, TURING, False),
        (torch.device("cpu"), torch.bfloat16, 128, HOPPER, False),
    ],
    ids=str,
)
def test_flash_attention_is_for_half_precision_and_heads_of_up_to_256_numbers(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    capability: tuple[int, int],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(kernels, "_installed", lambda package: False)
    kernels.widest_head.cache_clear()
    assert has_varlen(device, dtype, width) is expected
    kernels.widest_head.cache_clear()


@pytest.mark.parametrize(
    ("capability", "installed", "since_2_12"),
    [(HOPPER, True, True), (HOPPER, False, True), (AMPERE, True, True), (HOPPER, True, False)],
    ids=str,
)
def test_flash_attention_4_is_taken_into_use_where_it_is_installed_and_has_kernels(
    capability: tuple[int, int], installed: bool, since_2_12: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn import attention as library

    used: list[str] = []
    monkeypatch.setattr(kernels, "SINCE_2_12", since_2_12)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    if installed:
        monkeypatch.setattr(kernels, "version", lambda package: {"flash-attn-4": "4.0.0b36"}[package])
    monkeypatch.setattr(library, "activate_flash_attention_impl", used.append)
    monkeypatch.setattr(kernels, "_attend_once", used.append)
    kernels.widest_head.cache_clear()
    assert kernels.widest_head(CUDA) == 256
    kernels.widest_head.cache_clear()
    taken = installed and capability == HOPPER and since_2_12
    assert used == ([kernels.FLASH_ATTENTION_4, CUDA] if taken else [])
    assert not taken or kernels.FLASH_ATTENTION_4 in library.list_flash_attention_impls()


@pytest.fixture(params=[2, 5], ids=["before b20", "b36"])
def flash_attention_4(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package flash-attn-4 on a Hopper, which returns as many tensors of a forward pass as some of its versions."""
    from torch.nn import attention as library
    from torch.nn.attention import _fa4

    def forward(query: Tensor, *_: Tensor, **settings: Any) -> tuple[Any, ...]:
        assert settings["return_lse"]
        return (query, query.sum(-1).T, None, None, None)[: request.param]

    package = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=lambda *tensors, **_: tensors[:3])
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", cast(ModuleType, package))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(kernels, "_installed", lambda package: True)

    def forget() -> None:
        library.restore_flash_attention_impl(_raise_warn=False)
        sys.modules.pop(kernels.FLASH_ATTENTION_4, None)
        _fa4._fa4_import_module.cache_clear()
        kernels.widest_head.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.skipif(not kernels.SINCE_2_12, reason="before, it is left aside")
def test_torch_understands_every_flash_attention_4(flash_attention_4: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn import attention as library
    from torch.nn.attention import _fa4

    def attend(device: torch.device) -> None:
        query = torch.ones(3, 2, 8)
        place = (None, None, 3, 3)
        out, sums = _fa4._fa4_run_forward(query, query, query, *place, 1.0, True, -1, 0, None)
        assert out is query
        assert sums.shape == (2, 3)
        assert len(_fa4._fa4_run_backward(out, query, query, query, out, sums, None, None, 1.0, True, -1, 0)) == 3

    monkeypatch.setattr(kernels, "_attend_once", attend)
    assert kernels.widest_head(CUDA) == 256
    assert library.current_flash_attention_impl() == kernels.FLASH_ATTENTION_4


@pytest.mark.skipif(not kernels.SINCE_2_12, reason="before, it is left aside")
@pytest.mark.parametrize("wrong", [False, True], ids=["fails", "is wrong"])
def test_a_flash_attention_4_that_does_not_compute_leaves_the_kernels_of_torch(
    flash_attention_4: None, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn import attention as library

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        assert library.current_flash_attention_impl() == kernels.FLASH_ATTENTION_4
        if not wrong:
            raise ValueError("too many values to unpack (expected 2)")
        return 0.5 * query + key + value - 2

    warnings: list[str] = []
    monkeypatch.setattr(kernels.log, "warning", warnings.append)
    monkeypatch.setattr(kernels, "varlen", attend)
    monkeypatch.setattr(kernels, "_attend_once", partial(on_the_cpu, kernels._attend_once))
    assert kernels.widest_head(CUDA) == 256
    assert library.current_flash_attention_impl() is None
    (warning,) = warnings
    assert ("ArithmeticError: it computes 0.5 where all values are 1" if wrong else "too many values") in warning


def test_what_is_computed_to_try_kernels_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", strict_varlen(seen))
    kernels._attend_once(torch.device("cpu"))
    assert seen


def on_the_cpu(work: Callable[[torch.device], None], device: torch.device) -> None:
    work(torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "width", "expected"),
    [(HOPPER, 256, True), (BLACKWELL, 128, True), (BLACKWELL, 192, False)],
    ids=str,
)
def test_heads_that_flash_attention_4_does_not_compute_are_left_to_the_other_kernels(
    capability: tuple[int, int], width: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is in use, torch has no FlashAttention 2 to fall back to."""
    from torch._subclasses import FakeTensorMode
    from torch.nn import attention as library

    def attend(query: Tensor, *_: Tensor, **__: Any) -> Tensor:
        assert torch.backends.cuda.flash_sdp_enabled() is expected
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        return query

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(kernels, "_installed", lambda package: True)
    monkeypatch.setattr(kernels, "SINCE_2_12", True)
    monkeypatch.setattr(library, "activate_flash_attention_impl", lambda name: None)
    monkeypatch.setattr(kernels, "_attend_once", lambda device: None)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    kernels.widest_head.cache_clear()
    assert has_varlen(CUDA, torch.bfloat16, width) is expected
    with FakeTensorMode():
        q = torch.empty(1, 2, 9, width, device=CUDA, dtype=torch.bfloat16)
        dense(q, q, q, scaling=0.3)
    kernels.widest_head.cache_clear()


def test_a_flash_attention_4_that_does_not_fit_leaves_the_kernels_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.nn import attention as library

    def fail(name: str) -> None:
        raise RuntimeError(f"{name} has another interface")

    warnings: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(kernels, "_installed", lambda package: True)
    monkeypatch.setattr(kernels, "SINCE_2_12", True)
    monkeypatch.setattr(kernels.log, "warning", warnings.append)
    monkeypatch.setattr(library, "activate_flash_attention_impl", fail)
    kernels.widest_head.cache_clear()
    assert kernels.widest_head(CUDA) == 256
    assert kernels.widest_head(CUDA) == 256
    kernels.widest_head.cache_clear()
    assert len(warnings) == 1
    assert "another interface" in warnings[0]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 7], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", HEADS)
def test_a_gpu_computes_what_the_cpu_does(kind: str, dtype: torch.dtype, window: int | None) -> None:
    expected = attended(inputs(kind, torch.float32), window)
    found = attended(inputs(kind, dtype, CUDA), window)
    for mine, exact in zip(found, expected, strict=True):
        assert (mine.float().cpu() - exact).norm() <= (1e-3 if dtype == torch.float32 else 0.02) * exact.norm()
