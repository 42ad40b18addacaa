"""Every trained parameter is proven to get a gradient."""

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.models.torch.optimizers.untrained_parameters import GradientProof
from rollgrad.domain.errors import UntrainedParameterError

SETTINGS = OptimizerSettings(lr=0.1)


class Behind(nn.Module):
    """A matrix behind one that starts at 0, as LoRA's are, and a spare one."""

    def __init__(self, *, spare: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False, dtype=dtype)
        self.b = nn.Linear(4, 4, bias=False, dtype=dtype)
        nn.init.zeros_(self.b.weight)
        if spare:
            self.spare = nn.Linear(4, 4, dtype=dtype)

    def loss(self, scale: float = 1.0) -> torch.Tensor:
        return (self.b(self.a(torch.ones(2, 4, dtype=self.a.weight.dtype))).float() - 1).square().sum() * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_a_gradient_ends_the_run_before_anything_changes(dtype: torch.dtype) -> None:
    model = Behind(spare=True, dtype=dtype)
    optimizer = MasterOptimizer(model, SETTINGS)
    before = [p.detach().clone() for p in model.parameters()]
    model.loss().backward()
    with pytest.raises(UntrainedParameterError, match=r"2 of 4 .*\(spare\.bias, spare\.weight\).*--actor\.model"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_frozen_parameters_need_none() -> None:
    model = Behind(spare=True, dtype=torch.float32)
    model.spare.requires_grad_(False)
    optimizer = MasterOptimizer(model, SETTINGS)
    model.loss().backward()
    assert optimizer.step()["grad_norm"] > 0


def test_what_lies_behind_zeros_gets_its_gradient_in_the_second_step() -> None:
    model = Behind(spare=False, dtype=torch.float32)
    optimizer = MasterOptimizer(model, SETTINGS)
    with capture_logs() as logs:
        for step in range(4):
            model.loss(scale=float(step > 0)).backward()  # a first step with nothing to learn proves nothing
            assert (float(model.a.weight.grad.abs().max()) == 0) == (step < 2)
            optimizer.step()
    assert not logs


def test_gradients_that_stay_0_are_told_once() -> None:
    proof = GradientProof(["a", "b", *"cdefgh"])
    with capture_logs() as logs:
        for _ in range(3):
            assert proof.under_way == (not logs)
            proof.look(dict.fromkeys("abcdefgh", 0.0) | {"a": 1.0})
    (told,) = logs
    assert told["count"] == 7
    assert told["of"] == 8
    assert told["names"] == "b, c, d, e, f, ..."


def test_nothing_is_told_twice_where_several_processes_see_the_same() -> None:
    proof = GradientProof(["a", "b"], tells=False)
    with capture_logs() as logs:
        for _ in range(2):
            proof.look({"a": 1.0, "b": 0.0})
    assert not logs
    with pytest.raises(UntrainedParameterError, match=r"1 of 2 .*\(b\)"):
        proof.look({"a": 1.0})


def test_an_expert_without_a_token_may_wait() -> None:
    proof = GradientProof(["layers.0.mlp.experts.0.up.weight", "layers.0.mlp.experts.1.up.weight", "layers.0.gate"])
    with capture_logs() as logs:
        proof.look({"layers.0.mlp.experts.0.up.weight": 1.0, "layers.0.gate": 1.0})
        assert proof.under_way
        proof.look({"layers.0.mlp.experts.1.up.weight": 1.0, "layers.0.gate": 1.0})
    assert not logs
    assert not proof.under_way


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.compressor.position_bias",
        "model.embed_tokens_extend.audio_embed.encoder.after_norm.weight",
        "model.vision_embed_tokens.weight",
    ],
)
def test_a_part_that_no_text_goes_through_may_wait(name: str) -> None:
    """DeepSeek-V4 compresses what is longer than 128 tokens; Phi-4 hears and sees; Fuyu sees."""
    GradientProof([name, "model.norm.weight"]).look({"model.norm.weight": 1.0})
