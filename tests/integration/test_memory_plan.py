"""A process that trains alone holds what the memory plan of `--dry_run` says."""

from typing import Any

import pytest
import torch

from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.planning.shape import model_shape
from rollgrad.application.settings.memory_places import Machine
from rollgrad.application.settings.memory_plan import memory_plan
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.ports.models import LossOutput, TokenScores
from tests.fakes import cluster
from tests.tensor_bytes import tensor_bytes
from tests.tiny_models import saved, tiny_model

TOLERANCE = 0.1
"""Share that a process of a tiny model holds besides: tables of rotations, counters of steps."""


ALL, ADAPTERS, QUANTISED = LoraConfig(), LoraConfig(rank=16), LoraConfig(rank=16, load_in_4bit=True)


@pytest.fixture(scope="module")
def path(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a model that is large beside the 16 and 256 numbers that stand for codes in each quantised layer."""
    model = tiny_model("LlamaForCausalLM", tiny_tokenizer, hidden_size=128, intermediate_size=512)
    return str(saved(model, tiny_tokenizer, tmp_path_factory.mktemp("models") / "llama"))


@pytest.mark.parametrize(
    ("dtype", "lora"),
    [
        pytest.param(torch.float32, ALL, id="float32", marks=pytest.mark.wide),
        pytest.param(torch.bfloat16, ALL, id="bfloat16"),
        pytest.param(torch.float32, ADAPTERS, id="adapters", marks=pytest.mark.wide),
        pytest.param(torch.bfloat16, QUANTISED, id="quantised"),
    ],
)
def test_one_process(path: str, dtype: torch.dtype, lora: LoraConfig) -> None:
    config = RLConfig()
    config.train.enable_ema = cluster.SETTINGS.ema_beta is not None
    shape = model_shape("actor.model_name_or_path", path, lora)
    planned = memory_plan(config, shape, compute_bytes=dtype.itemsize, machine=Machine(gpu=0, memory=0))[0]
    batch, found = cluster.batch(), []

    def weighing(scores: TokenScores, part: PackedBatch) -> LossOutput:
        found.append(tensor_bytes())
        return cluster.likelihood(scores, part)

    idle = tensor_bytes()
    cpu = torch.device("cpu")
    model = load_causal_lm(path, dtype=dtype, device=cpu, flag=cluster.FLAG, load_in_4bit=lora.load_in_4bit)
    if lora.rank:
        add_lora(model, lora, seed=0)
    policy = TorchPolicy(model, load_tokenizer(path, flag=cluster.FLAG), cluster.SETTINGS)
    policy.update([batch], weighing)
    assert tensor_bytes() - idle == pytest.approx(planned.weights + planned.optimizer, rel=TOLERANCE)
    found.clear()
    policy.update([batch, batch], weighing)
    first, second = found  # which finds the gradients of the first
    assert second - first == pytest.approx(planned.gradients, rel=TOLERANCE)
