"""Models whose layers two processes divide among them: importable there."""

from functools import partial

import torch

from rollgrad.adapters.models.deepspeed import tensor_parallel
from rollgrad.adapters.models.deepspeed.module import DeepSpeedModule
from rollgrad.adapters.models.deepspeed.settings import DeepSpeedSettings
from rollgrad.adapters.models.ray.sharded import RankPolicy
from rollgrad.adapters.models.torch.loading import load_causal_lm
from rollgrad.adapters.models.torch.models import Optimize, TorchReference, TorchValue
from tests.fakes import cluster

SIZE = 2


def divided(stage: int) -> Optimize:
    return partial(DeepSpeedModule, division=DeepSpeedSettings(zero_stage=stage, tensor_parallel_size=SIZE))


def rank_policy(path: str, stage: int, dtype: torch.dtype = torch.float32) -> RankPolicy:
    return RankPolicy(cluster.policy(path, divided(stage), dtype=dtype))


def rank_value(path: str, stage: int) -> TorchValue:
    return cluster.value(path, divided(stage))


def rank_reference(path: str, dtype: torch.dtype) -> TorchReference:
    model = load_causal_lm(path, dtype=dtype, device=torch.device("cpu"), flag=cluster.FLAG)
    return TorchReference(model, divide=partial(tensor_parallel.divided, size=SIZE))
