"""A run that asks for deterministic kernels computes with them alone."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollgrad.adapters.models.torch.kernels.attention import sdpa_on
from rollgrad.adapters.models.torch.kernels.determinism import compute_deterministically
from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
from rollgrad.adapters.models.torch.layers.attention import ForestAttention
from rollgrad.adapters.models.torch.layers.layout import Node
from rollgrad.application.settings.sections.actor import ActorConfig
from rollgrad.entrypoints.composition.models import compute_device
from tests.fakes import cluster
from tests.pretended_gpu import CUDA, pretended_gpu


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, deterministic


def test_models_are_computed_by_deterministic_kernels_where_settings_say_so() -> None:
    compute_device(ActorConfig())
    assert not torch.are_deterministic_algorithms_enabled()
    compute_device(ActorConfig(deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled(), "an operation without such a kernel ends no run"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_updates_need_no_other_kernel(tiny_model_dir: Path) -> None:
    compute_deterministically()
    torch.use_deterministic_algorithms(True)  # an operation without a deterministic kernel is an error
    first, again = cluster.policy(str(tiny_model_dir)), cluster.policy(str(tiny_model_dir))
    assert cluster.trained(first) == cluster.trained(again)
    for name, tensor in first.weights():
        assert torch.equal(tensor, dict(again.weights())[name])


PROMPT, REPLY, REPLIES = 40, 300, 4
NODES = [Node(0, PROMPT), *(Node(PROMPT + n * REPLY, REPLY, ((0, PROMPT),)) for n in range(REPLIES))]


def attended(device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Result and gradients of attention in which replies share a prompt, and heads share keys."""
    generator = torch.Generator().manual_seed(0)
    tokens = PROMPT + REPLIES * REPLY
    leaves = [
        torch.randn(1, heads, tokens, 64, generator=generator).to(device, dtype).requires_grad_() for heads in (4, 2, 2)
    ]
    out = ForestAttention(NODES, device=device, dtype=dtype).attend(0, *leaves, ScoreForm(0.3))
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(device)
    return [x.detach().to("cpu") for x in (out, *torch.autograd.grad((out.float() * weights).sum(), leaves))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_of_a_gpu_is_computed_so_backwards_too(dtype: torch.dtype) -> None:
    """While it only warns of operations, torch takes other kernels for it."""
    expected = attended(torch.device("cpu"), dtype)
    compute_deterministically()
    with pretended_gpu():
        found = attended(CUDA, dtype)
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * theirs.norm()


def test_attention_of_padded_sequences_on_a_gpu_is_computed_by_products_alone() -> None:
    compute_deterministically()
    with pretended_gpu():
        query = torch.ones(1, 2, 3, 8, device=CUDA).requires_grad_()
        with sdpa_on(query):
            assert torch.backends.cuda.math_sdp_enabled()
            assert not torch.backends.cuda.flash_sdp_enabled()
            assert not torch.backends.cuda.mem_efficient_sdp_enabled()
        with sdpa_on(query.detach()):
            assert torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_gives_the_same_bits(dtype: torch.dtype) -> None:
    compute_deterministically()
    first = attended(CUDA, dtype)
    for _ in range(5):
        assert all(map(torch.equal, attended(CUDA, dtype), first))
