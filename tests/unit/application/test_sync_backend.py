import pytest

from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.vllm import SyncBackend
from rollgrad.application.settings.weight_backend import sync_backend
from rollgrad.domain.errors import ConfigurationError


def config_of(*, cluster: bool, together: bool = False, engines: int = 1, workers: int = 1) -> RLConfig:
    """Two processes of the actor in a cluster."""
    config = RLConfig()
    config.rollout.engine = Engine.VLLM
    config.cluster.enable, config.train.colocate_all = cluster, together
    config.actor.num_gpus_per_node = 2 if cluster else 1
    config.vllm.num_engines, config.vllm.tensor_parallel_size = engines, workers
    return config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (config_of(cluster=False), SyncBackend.CUDA_IPC),
        (config_of(cluster=False, workers=2), SyncBackend.SHARED_MEMORY),
        (config_of(cluster=True), SyncBackend.NCCL),
        (config_of(cluster=True, engines=5, workers=2), SyncBackend.NCCL),
        (config_of(cluster=True, together=True), SyncBackend.CUDA_IPC),
        (config_of(cluster=True, together=True, engines=2), SyncBackend.CUDA_IPC),
        (config_of(cluster=True, together=True, engines=3), SyncBackend.SHARED_MEMORY),
        (config_of(cluster=True, together=True, workers=2), SyncBackend.CUDA_IPC),
        (config_of(cluster=True, together=True, engines=2, workers=2), SyncBackend.SHARED_MEMORY),
    ],
)
def test_auto_goes_by_who_shares_a_gpu(config: RLConfig, expected: SyncBackend) -> None:
    assert sync_backend(config, gpus=True) is expected
    assert sync_backend(config, gpus=False) is SyncBackend.SHARED_MEMORY


def test_gpus_on_which_torch_or_vllm_cannot_compute_do_not_count() -> None:
    config, without = config_of(cluster=True), "torch 2.13.0+cpu is built without GPUs"
    assert sync_backend(config, gpus=True, without=without) is SyncBackend.SHARED_MEMORY
    config.vllm.sync_backend = SyncBackend.NCCL
    with pytest.raises(ConfigurationError, match=r"needs GPUs, but torch 2\.13\.0\+cpu is built without GPUs: set"):
        sync_backend(config, gpus=True, without=without)


@pytest.mark.parametrize("asked", [backend for backend in SyncBackend if backend is not SyncBackend.AUTO])
def test_what_is_asked_for_is_taken_or_refused(asked: SyncBackend) -> None:
    config = config_of(cluster=True, together=asked is SyncBackend.CUDA_IPC)
    config.vllm.sync_backend = asked
    assert sync_backend(config, gpus=True) is asked
    if asked in (SyncBackend.SHARED_MEMORY, SyncBackend.DISK):
        assert sync_backend(config, gpus=False) is asked
        return
    with pytest.raises(ConfigurationError, match=f"vllm.sync_backend is {asked}, which needs GPUs"):
        sync_backend(config, gpus=False)
