"""A policy and engines on GPUs, for the contract of weight channels: what a machine must have for it is said there."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollgrad.adapters.engines.ray_vllm import start_engines
from rollgrad.adapters.engines.vllm.engine import VLLMEngine
from rollgrad.adapters.models.ray.rank_policy import RankPolicy
from rollgrad.adapters.models.ray.rank_worker import begin_workers
from rollgrad.adapters.models.ray.sharded import ShardedPolicy
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.ray.placement import Placement
from rollgrad.adapters.weights.channel import EngineWeights, FleetWeights
from rollgrad.adapters.weights.cuda_ipc import cuda_ipc
from rollgrad.adapters.weights.nccl import NCCLBackend
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.settings.sections.vllm import SyncBackend
from rollgrad.domain.ports.models import PolicyModel
from rollgrad.domain.ports.weight_channel import WeightChannel
from tests.fakes.cluster import FLAG, divided

SHARE = 0.3
"""Handles of a GPU's memory, for the engine."""

SETTINGS: dict[str, Any] = {"eos_token_ids": (), "dtype": "bfloat16", "max_batch_size": 8}
"""Settings of an engine in a cluster."""

SECONDS = 300.0
"""After which something has not started."""

Parts = tuple[WeightChannel, Any, PolicyModel]


def gpu_policy(path: str) -> TorchPolicy:
    model = load_causal_lm(path, dtype=torch.bfloat16, device=torch.device("cuda"), flag=FLAG)
    return TorchPolicy(model, load_tokenizer(path, flag=FLAG), OptimizerSettings(lr=0.1))


def gpu_rank_policy(path: str, stage: int) -> RankPolicy:
    model = load_causal_lm(path, dtype=torch.bfloat16, device=torch.device("cuda"), flag=FLAG)
    tokenizer = load_tokenizer(path, flag=FLAG)
    return RankPolicy(TorchPolicy(model, tokenizer, OptimizerSettings(lr=0.1), optimize=divided(stage)))


@asynccontextmanager
async def within_a_gpu(path: Path) -> AsyncIterator[Parts]:
    """One process trains and samples on one GPU."""
    engine = VLLMEngine(
        str(path),
        eos_token_ids=(),
        dtype="bfloat16",
        max_batch_size=8,
        memory_fraction=SHARE,
        sync_backend=SyncBackend.CUDA_IPC,
    )
    try:
        yield EngineWeights(engine, backend=cuda_ipc), engine, gpu_policy(str(path))
    finally:
        engine.close()


@asynccontextmanager
async def between_gpus(path: Path) -> AsyncIterator[Parts]:
    """Two training processes at ZeRO's stage 3 and one engine, each on a GPU of its own."""
    # Ray may give it a GPU on which other tests' engine is.
    settings = {**SETTINGS, "model": str(path), "sync_backend": SyncBackend.NCCL, "memory_fraction": SHARE}
    async with trained_on_two(path, shared=False) as (_, policy):
        fleet = EngineFleet(await start_engines(1, settings, options=[{"num_gpus": 1}], seconds=SECONDS))
        try:
            yield FleetWeights(fleet, backend=NCCLBackend()), fleet, policy
        finally:
            await fleet.aclose()


@asynccontextmanager
async def within_two_gpus(path: Path) -> AsyncIterator[Parts]:
    """Two training processes at ZeRO's stage 3, and on their GPUs the two of one engine."""
    settings = {**SETTINGS, "model": str(path), "sync_backend": SyncBackend.CUDA_IPC}
    async with trained_on_two(path, shared=True) as (placement, policy):
        slot = placement.joint_slot(0, 2)
        engines = await start_engines(
            1,
            {**settings, "tensor_parallel_size": 2, "memory_fraction": SHARE},
            options=[slot.options()],
            devices=[slot.devices],
            seconds=SECONDS,
        )
        fleet = EngineFleet(engines)
        try:
            yield FleetWeights(fleet, backend=partial(cuda_ipc, workers=2)), fleet, policy
        finally:
            await fleet.aclose()


@asynccontextmanager
async def trained_on_two(path: Path, *, shared: bool) -> AsyncIterator[tuple[Placement, PolicyModel]]:
    """A policy in two processes, whose GPUs engines may share, and their places."""
    import ray

    ray.shutdown()  # one that other files' tests have shared
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    placement = Placement("actor", 2, gpus=1, shared=shared, timeout=SECONDS)
    workers = begin_workers([placement.slot(rank) for rank in range(2)], threads=1)
    group = WorkerGroup("actor", workers, timeout=SECONDS)
    try:
        group.build(gpu_rank_policy, str(path), 3)
        yield placement, ShardedPolicy(group)
    finally:
        group.close()
        placement.remove()
        ray.shutdown()
