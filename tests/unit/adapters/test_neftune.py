"""Noise on embeddings: as large as the paper has it, the same in any split, and only in updates."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.neftune import EmbeddingNoise
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.domain.batches.packed import PackedBatch
from tests.fakes import cluster

ALPHA = 5.0
SETTINGS = OptimizerSettings(lr=1e-2, betas=(0.5, 0.9), max_norm=0.0)


def policy(path: Path, **options: Any) -> TorchPolicy:
    model = load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu"), flag="--model")
    tokenizer = load_tokenizer(str(path), flag="--model")
    return TorchPolicy(model, tokenizer, SETTINGS, **{"neftune_alpha": ALPHA, **options})


def weights(model: TorchPolicy) -> list[Tensor]:
    return [tensor.clone() for _, tensor in model.weights()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, other, strict=True))


def test_the_noise_is_that_of_the_paper(tiny_model_dir: Path) -> None:
    """Uniform in +-alpha / sqrt(L H), of each sequence and step its own, and none outside of a step."""
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="--model")
    module = PackedLM(model)
    noise = EmbeddingNoise(module, model, ALPHA)
    seen: list[Tensor] = []
    model.get_input_embeddings().register_forward_hook(lambda layer, inputs, output: seen.append(output[0].detach()))
    batch = cluster.batch().select([0])
    module(batch)
    for step in (0, 0, 1):
        with noise.during(step):
            module(batch)
    module(batch)
    plain, first, again, other, scored = seen
    assert torch.equal(first, again)
    assert torch.equal(plain, scored)
    assert not torch.equal(first, other)
    bound = ALPHA / math.sqrt(plain.numel())
    added = first - plain
    assert bound * 0.97 < float(added.abs().max()) <= bound * 1.001
    assert float(added.mean().abs()) < bound * 4 / math.sqrt(3 * plain.numel())
    assert float(added.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)


def examples() -> PackedBatch:
    """Samples that share nothing, as examples do."""
    batch = cluster.batch()
    return evolve(batch, group_ids_S=torch.arange(len(batch)))


def test_a_step_is_the_same_in_any_split_and_after_an_interruption(tiny_model_dir: Path) -> None:
    batch = examples()

    def taken(model: TorchPolicy, *parts: list[int]) -> list[Tensor]:
        micro_batches: list[PackedBatch] = [batch.select(part) for part in parts]
        model.update(micro_batches, cluster.likelihood)
        return weights(model)

    whole, divided = policy(tiny_model_dir), policy(tiny_model_dir)
    once = taken(whole, list(range(len(batch))))
    assert same(once, taken(divided, *[[place] for place in reversed(range(len(batch)))]))
    assert not same(once, taken(policy(tiny_model_dir, neftune_alpha=0.0), list(range(len(batch))))), "noise matters"
    continued = policy(tiny_model_dir)
    continued.load_state_dict(whole.state_dict())
    twice = taken(whole, list(range(len(batch))))
    assert same(twice, taken(continued, list(range(len(batch)))))
    plain = policy(tiny_model_dir, neftune_alpha=0.0)
    fresh = policy(tiny_model_dir)
    assert torch.equal(fresh.score(batch).logprobs_N, plain.score(batch).logprobs_N)
