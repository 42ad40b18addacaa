"""The memory of a GPU that vLLM's engines take, by who shares it."""

import pytest

from rollgrad.application.settings.engine_memory import ALONE, SHARED, engine_share, engines_sleep
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine


def run(*, cluster: bool = False, together: bool = False, overlaps: bool = False) -> RLConfig:
    config = RLConfig()
    config.rollout.engine, config.cluster.enable = Engine.VLLM, cluster
    config.train.colocate_all, config.train.async_enable = together, overlaps
    return config


@pytest.mark.parametrize(
    ("config", "share", "sleeps"),
    [
        (run(), SHARED, True),
        (run(overlaps=True), SHARED, False),
        (run(cluster=True), ALONE, False),
        (run(cluster=True, overlaps=True), ALONE, False),
        (run(cluster=True, together=True), SHARED, True),
    ],
)
def test_an_engine_leaves_a_gpu_to_the_models_that_are_on_it(config: RLConfig, share: float, sleeps: bool) -> None:
    assert engine_share(config) == share
    assert engines_sleep(config) is sleeps
    config.vllm.gpu_memory_utilization = 0.3
    assert engine_share(config) == 0.3
    config.rollout.engine = Engine.EMBEDDED
    assert not engines_sleep(config)
