"""A policy with adapters that the processes of a test's cluster hold: importable there."""

import torch

from rollgrad.adapters.ray.models import RankPolicy
from rollgrad.adapters.torch.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.torch.lora import add_lora
from rollgrad.adapters.torch.models import Optimize, TorchPolicy
from rollgrad.adapters.torch.optimizer import MasterOptimizer
from rollgrad.application.model_config import LoraConfig
from tests.fakes.cluster import FLAG, SETTINGS, divided

LORA = LoraConfig(rank=4, alpha=8)


def policy(path: str, optimize: Optimize = MasterOptimizer, dtype: torch.dtype = torch.float32) -> TorchPolicy:
    model = load_causal_lm(path, dtype=dtype, device=torch.device("cpu"), flag=FLAG)
    add_lora(model, LORA, seed=1)
    return TorchPolicy(model, load_tokenizer(path, flag=FLAG), SETTINGS, optimize=optimize)


def rank_policy(path: str, stage: int, dtype: torch.dtype = torch.float32) -> RankPolicy:
    return RankPolicy(policy(path, divided(stage), dtype))
