"""Muon beside AdamW: against its paper in float64, and against torch's own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgrad.adapters.models.torch.forward import PackedLM, PackedValue
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.optimizers.muon import MuonSettings, hidden_matrices, orthogonal
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.errors import CheckpointError
from tests.tiny_architectures import tiny_model as tiny_architecture
from tests.tiny_models import tiny_model

SETTINGS = OptimizerSettings(
    lr=1e-2, weight_decay=0.1, max_norm=0.05, total_steps=6, muon=MuonSettings(lr=0.05, momentum=0.9)
)


class Network(nn.Module):
    """An embedding, matrices of all proportions, a norm, a bias."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(8, 8))
        self.to(dtype)

    def loss(self, seed: int) -> Tensor:
        tokens = torch.randint(11, (5,), generator=torch.Generator().manual_seed(seed))
        output: Tensor = self.layers(self.embedding(tokens))
        return output.float().square().mean()


def newton_schulz(matrix: Tensor) -> Tensor:
    """Jordan et al. 2024 ("Muon"): X <- a X + (b X X' + c (X X')^2) X, five times, in float64."""
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    rows, columns = matrix.shape
    return x * max(1, rows / columns) ** 0.5


@pytest.mark.parametrize("shape", [(16, 6), (6, 16), (12, 12), (64, 48)])
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e6])
def test_a_direction_is_newton_schulzs_up_to_bfloat16(shape: tuple[int, int], scale: float) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale
    found = orthogonal(matrix)
    assert found.dtype == torch.float32
    gap = (found.double() - newton_schulz(matrix)).norm() / newton_schulz(matrix).norm()
    assert gap < 0.05
    turned = orthogonal(-matrix)
    torch.testing.assert_close(turned, -found)
    values = torch.linalg.svdvals(found) / max(1, shape[0] / shape[1]) ** 0.5
    assert values.max() < 1.4
    assert values.median() > 0.6


def test_no_gradient_is_no_direction() -> None:
    assert torch.equal(orthogonal(torch.zeros(4, 3)), torch.zeros(4, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_torchs_muon_and_adamw(dtype: torch.dtype) -> None:
    """On float32 masters, after clipping."""
    mine, theirs = Network(dtype), Network(dtype)
    optimizer = MasterOptimizer(mine, SETTINGS)
    masters = {name: p.detach().float().clone().requires_grad_() for name, p in theirs.named_parameters()}
    matrices = [master for name, master in masters.items() if master.ndim == 2 and "embedding" not in name]
    vectors = [master for master in masters.values() if master.ndim == 1]
    muon = torch.optim.Muon(matrices, lr=0.05, momentum=0.9, weight_decay=0.1)
    adam = torch.optim.AdamW(
        [{"params": [masters["embedding.weight"]], "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for seed in range(4):
        mine.loss(seed).backward()
        theirs.loss(seed).backward()
        for name, parameter in theirs.named_parameters():
            masters[name].grad, parameter.grad = parameter.grad.float(), None
        gradients = [master.grad for master in masters.values() if master.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        torch._foreach_mul_(gradients, 0.05 / norm)
        muon.step()
        adam.step()
        result = optimizer.step()
        assert result == {"grad_norm": pytest.approx(norm, rel=1e-5), "lr": 1e-2}
        assert norm > 0.05, "the test must clip"
        for name, master in optimizer.masters().items():
            torch.testing.assert_close(master, masters[name], rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                parameter.copy_(optimizer.masters()[name])
                masters[name].copy_(optimizer.masters()[name])


def test_the_rates_of_both_follow_the_schedule() -> None:
    """Nothing but weight decay moves matrices without a gradient: what is left of them shows the rate."""
    model = Network()
    muon = MuonSettings(lr=0.5)
    settings = OptimizerSettings(
        lr=0.1, weight_decay=1.0, scheduler="linear", warmup_ratio=0.5, total_steps=4, muon=muon
    )
    optimizer = MasterOptimizer(model, settings)
    for expected in (1 / 3, 2 / 3, 1.0):
        before = {name: master.clone() for name, master in optimizer.masters().items()}
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        assert optimizer.step()["lr"] == pytest.approx(0.1 * expected)
        for name, rate in (("embedding.weight", 0.1), ("layers.0.weight", 0.5), ("layers.0.bias", 0.0)):
            torch.testing.assert_close(optimizer.masters()[name], before[name] * (1 - rate * expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_as_if_never_stopped(dtype: torch.dtype) -> None:
    whole, resumed = Network(dtype), Network(dtype)
    first, second = MasterOptimizer(whole, SETTINGS), MasterOptimizer(resumed, SETTINGS)
    for seed in range(3):
        whole.loss(seed).backward()
        first.step()
    second.load_state_dict(first.state_dict())
    for seed in range(3, 5):
        for model, optimizer in ((whole, first), (resumed, second)):
            model.loss(seed).backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("begins_with_muon", [False, True])
def test_the_state_of_another_optimizer_is_refused(begins_with_muon: bool) -> None:
    model = Network()
    both = [MasterOptimizer(model, OptimizerSettings(lr=0.1)), MasterOptimizer(model, SETTINGS)]
    begun, continued = reversed(both) if begins_with_muon else both
    model.loss(0).backward()
    begun.step()
    with pytest.raises(CheckpointError, match=r"of layers\.0\.weight.*--actor\.optim"):
        continued.load_state_dict(begun.state_dict())


def test_what_muon_steps_are_the_matrices_between_embeddings_and_head(tiny_tokenizer: Any) -> None:
    for tied in (False, True):
        model = tiny_model("LlamaForCausalLM", tiny_tokenizer, tie_word_embeddings=tied)
        projections = {
            *(f"self_attn.{name}_proj" for name in "qkvo"),
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        }
        expected = {f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in projections}
        critic = PackedValue(model, {})
        for module, prefix in ((PackedLM(model), "model."), (critic, "")):
            found = set(hidden_matrices(module))
            assert {name for name, p in module.named_parameters() if p in found} == {prefix + name for name in expected}
    add_lora(model, LoraConfig(rank=2), seed=0)
    found = set(hidden_matrices(PackedLM(model)))
    assert found == {p for name, p in model.named_parameters() if "lora_" in name}


def test_what_experts_have_one_each_of_is_no_matrix() -> None:
    model = tiny_architecture("gpt_oss", vocab_size=8)
    found = {
        name.rpartition("layers.0.")[2] for name, p in model.named_parameters() if p in set(hidden_matrices(model))
    }
    assert found >= {"self_attn.q_proj.weight", "mlp.router.weight"}
    assert not any("experts" in name for name in found)  # weights of three dimensions, biases of two


def test_a_model_of_matrices_alone_needs_no_adam() -> None:
    model = nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    optimizer = MasterOptimizer(model, SETTINGS)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)
