"""Rotary embeddings that a GPU computes in three operations are those of transformers."""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgrad.adapters.models.torch.layers.rotary import NAME, _OnGPU, _turned, install_rotary, turns_halves
from tests.operations import Operations
from tests.pretended_gpu import CUDA, pretended_gpu

TOKENS, WIDTH = 5, 16


def function_of(kind: str) -> Callable[..., Any]:
    found = getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), NAME)
    return found._own if isinstance(found, _OnGPU) else found  # of a model that another test has loaded


def tensors(dtype: torch.dtype = torch.float32, turned: int = WIDTH) -> list[Tensor]:
    """Queries, keys, cosines and sines, whose halves differ."""
    chance = torch.Generator().manual_seed(0)
    shapes = [(1, 4, TOKENS, WIDTH), (1, 2, TOKENS, WIDTH), (1, TOKENS, turned), (1, TOKENS, turned)]
    return [torch.randn(shape, generator=chance).to(dtype) for shape in shapes]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3", "olmo2", "glm4_moe"])
def test_functions_with_the_formula_are_told_by_what_they_compute(kind: str) -> None:
    assert turns_halves(function_of(kind))


@pytest.mark.parametrize("kind", ["glm4", "cohere", "gpt_oss", "gemma4"])
def test_other_formulas_and_roundings_stay(kind: str) -> None:
    assert not turns_halves(function_of(kind))


def test_a_function_that_rounds_its_result_alone_stays() -> None:
    def in_float32(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.to(given[0].dtype) for x in function_of("qwen3")(*(x.float() for x in given)))

    assert not turns_halves(in_float32)


def test_autograd_agrees_with_the_formula_and_with_differences() -> None:
    q, _, cos, sin = (x.double() for x in tensors())
    q.requires_grad_()
    own, found = function_of("qwen3")(q, q, cos, sin)[0], _turned(q, cos[:, None], sin[:, None])
    torch.testing.assert_close(found, own)
    gradient = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(*(torch.autograd.grad(x, q, gradient) for x in (found, own)))
    assert torch.autograd.gradcheck(lambda x: _turned(x, cos[:, None], sin[:, None]), q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_nearer_to_the_formula_than_written_out(dtype: torch.dtype) -> None:
    own = function_of("qwen3")
    exact, written = own(*(x.double() for x in tensors(dtype))), own(*tensors(dtype))
    with pretended_gpu():
        found = [x.to("cpu") for x in _OnGPU(own)(*(x.to(CUDA) for x in tensors(dtype)))]
    for mine, theirs, right in zip(found, written, exact, strict=True):
        assert (mine.double() - right).norm() < 0.9 * (theirs.double() - right).norm()


def test_a_gpu_needs_three_operations_forwards_and_three_backwards() -> None:
    with pretended_gpu():
        q, k, cos, sin = (x.to(CUDA) for x in tensors(torch.bfloat16))
        q.requires_grad_()
        with Operations() as forward:
            found, _ = _OnGPU(function_of("qwen3"))(q, k, cos, sin)
        gradient = torch.ones(q.shape, dtype=q.dtype).to(CUDA)
        with Operations() as backward:
            torch.autograd.grad(found, q, gradient)
    assert forward.names == 2 * ["mul", "addcmul_", "addcmul_"]
    assert [name for name in backward.names if name != "detach"] == ["mul", "addcmul_", "addcmul_"]


@pytest.mark.parametrize("kind", ["a part of a head", "angles in float32", "another dimension", "trained angles"])
def test_what_is_not_the_formula_alone_is_left_to_transformers(kind: str) -> None:
    """Computed by the model's own function, on a GPU too."""
    own = function_of("glm4_moe")
    named: dict[str, Any] = {}
    q, k, cos, sin = tensors(torch.bfloat16, WIDTH // 2 if kind == "a part of a head" else WIDTH)
    if kind == "angles in float32":
        cos, sin = cos.float(), sin.float()
    if kind == "trained angles":
        cos.requires_grad_()
    if kind == "another dimension":
        q, k, named = q.transpose(1, 2), k.transpose(1, 2), {"unsqueeze_dim": 2}
    expected = own(q, k, cos, sin, **named)
    with pretended_gpu():
        found = [x.to("cpu") for x in _OnGPU(own)(*(x.to(CUDA) for x in (q, k, cos, sin)), **named)]
    assert all(map(torch.equal, found, expected))


def test_it_is_installed_once_and_computes_the_same_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    qwen3, own = import_module("transformers.models.qwen3.modeling_qwen3"), function_of("qwen3")
    monkeypatch.setattr(qwen3, NAME, own)
    model = nn.ModuleList([qwen3.Qwen3RMSNorm(WIDTH)])
    install_rotary(model)
    install_rotary(model)
    installed = getattr(qwen3, NAME)
    assert isinstance(installed, _OnGPU)
    assert installed._own is own
    assert all(map(torch.equal, installed(*tensors()), own(*tensors())))
    install_rotary(SimpleNamespace(modules=lambda: [nn.Linear(1, 1)]))  # of no module of transformers


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_a_gpu_compute_the_formula(dtype: torch.dtype) -> None:
    own = function_of("qwen3")
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for compute, made, kind in ((_OnGPU(own), found, dtype), (own, expected, torch.float64)):
        q, k, cos, sin = (x.to("cuda", kind) for x in tensors(dtype))
        leaves = [q.requires_grad_(), k.requires_grad_()]
        results = compute(*leaves, cos, sin)
        made += [*results, *torch.autograd.grad(torch.cat(results, 1).square().sum(), leaves)]
    for mine, right in zip(found, expected, strict=True):
        assert (mine.double() - right).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * right.norm()
