"""Norms that a GPU's kernel may compute are those with its formula, and it computes what they do."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rollgrad.adapters.models.torch.layers.norms import install_norms, rms_norms
from rollgrad.adapters.models.torch.planning.pass_memory import _normalise_as_on_a_gpu
from tests.tiny_architectures import tiny_model

HIDDEN = 32


def kinds(model: nn.Module) -> Counter[str]:
    return Counter(type(norm).__name__ for norm in rms_norms(model))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", {"LlamaRMSNorm": 5}),
        ("qwen3", {"Qwen3RMSNorm": 9}),
        ("deepseek_v3", {"DeepseekV3RMSNorm": 9}),
        ("falcon_h1", {"FalconH1RMSNorm": 5}),
        ("granitemoehybrid", {"GraniteMoeHybridRMSNorm": 5}),  # and none with a gate
        ("gemma3_text", {}),  # 1 + weights
        ("qwen3_next", {}),
        ("cohere2", {}),  # subtracts the mean
    ],
)
def test_norms_are_known_by_what_they_compute(kind: str, expected: dict[str, int]) -> None:
    assert kinds(tiny_model(kind)) == expected


def test_a_norm_that_has_been_given_another_forward_pass_keeps_it() -> None:
    norm = Norm()
    assert list(rms_norms(norm)) == [norm]
    norm.forward = lambda x: x  # type: ignore[method-assign]
    assert list(rms_norms(norm)) == []


class Norm(nn.Module):
    """An RMS norm, whose epsilon is where a subclass has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, HIDDEN))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class EpsilonOutside(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class Centred(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class Scaled(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.001


class Gated(Norm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


class Biased(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HIDDEN))


class Fails(Norm):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("shapes")


@pytest.mark.parametrize("kind", [EpsilonOutside, Centred, Scaled, Gated, Biased, Fails])
def test_another_formula_stays(kind: type[Norm]) -> None:
    assert [*rms_norms(kind())] == []


def test_an_installed_norm_computes_the_same_on_a_cpu_and_is_installed_once() -> None:
    norm, plain = Norm(), Norm()
    calls: list[int] = []
    norm.register_forward_hook(lambda *_: calls.append(1))
    before = dict(norm.named_parameters())
    install_norms(norm)
    install_norms(norm)
    assert not calls
    assert dict(norm.named_parameters()) == before
    assert norm.weight is before["weight"]
    x = torch.randn(3, HIDDEN)
    assert torch.equal(norm(x), plain(x))
    assert calls == [1]


def test_a_kernel_keeps_its_input_and_one_number_a_row() -> None:
    """The memory plan of a GPU counts these."""
    norm = Norm().to("meta")
    _normalise_as_on_a_gpu(norm)
    x = torch.empty(3, 5, HIDDEN, device="meta", dtype=torch.bfloat16, requires_grad=True)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        y = norm(x)
    assert kept == [(HIDDEN,), (3, 5, HIDDEN), (3, 5, 1)]
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    y.sum().backward()
    assert x.grad is not None
    assert norm.weight.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_computes_the_norm_and_its_gradients(dtype: torch.dtype) -> None:
    norm, plain = (Norm().to("cuda", dtype) for _ in range(2))
    install_norms(norm)
    wide = [torch.randn(7, 5, HIDDEN, device="cuda", dtype=torch.float64) for _ in range(2)]
    expected, found = [], []
    for made, module, kind in ((expected, plain.double(), torch.float64), (found, norm, dtype)):
        x = wide[0].to(dtype).to(kind).requires_grad_()
        y = module(x)
        y.backward(wide[1].to(dtype).to(kind))
        made += [y, x.grad, module.weight.grad]
    assert found[0].grad_fn.name() == "FusedRmsNormBackward0"
    for mine, theirs in zip(found, expected, strict=True):
        relative = (mine.double() - theirs).norm() / theirs.norm()
        assert relative < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]


def test_the_reference_is_torch_s_own_formula() -> None:
    norm, x = Norm(), torch.randn(3, HIDDEN)
    torch.testing.assert_close(norm(x), functional.rms_norm(x, (HIDDEN,), norm.weight, norm.eps))
