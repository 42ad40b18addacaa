"""A policy with adapters that the processes of a test's cluster hold: importable there."""

from typing import Any

import torch
from attrs import evolve

from rollgrad.adapters.models.ray.rank_policy import RankPolicy
from rollgrad.adapters.models.torch.compiling import compile_layers
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.loading.weight_shards import Shard
from rollgrad.adapters.models.torch.models import Optimize, TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.application.settings.sections.actor import LoraConfig
from tests.fakes.cluster import FLAG, SETTINGS, divided, loading

LORA = LoraConfig(rank=4, alpha=8, dropout=0.1)

WITHOUT_DROPOUT = evolve(LORA, dropout=0.0)
QLORA = evolve(LORA, load_in_4bit=True)


def policy(
    path: str,
    optimize: Optimize = MasterOptimizer,
    dtype: torch.dtype = torch.float32,
    lora: LoraConfig = LORA,
    settings: OptimizerSettings = SETTINGS,
    device: str = "cpu",
    shard: Shard | None = None,
    compiles: bool = False,
    **options: Any,
) -> TorchPolicy:
    place = torch.device(device)
    model = load_causal_lm(path, dtype=dtype, device=place, flag=FLAG, load_in_4bit=lora.load_in_4bit, shard=shard)
    add_lora(model, lora, seed=1)
    if compiles:
        compile_layers(model)
    return TorchPolicy(model, load_tokenizer(path, flag=FLAG), settings, optimize=optimize, **options)


def rank_policy(path: str, stage: int | str, dtype: torch.dtype = torch.float32, lora: LoraConfig = LORA) -> RankPolicy:
    return RankPolicy(policy(path, divided(stage), dtype, lora, shard=loading(stage)))
