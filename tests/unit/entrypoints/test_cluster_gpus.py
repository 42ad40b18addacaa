"""A run that asks for more GPUs than there are says so at once, not when Ray has looked for room in vain."""

from typing import Any

import pytest

from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.composition import cluster
from rollgrad.entrypoints.composition.cluster import Cluster
from rollgrad.entrypoints.composition.rl.roles import cluster_roles, colocated_roles


class Session:
    """A connection to a Ray that is none."""

    opened, closed = 0, 0

    def __init__(self, address: str | None, *, cpus: float) -> None:
        type(self).opened += 1

    def close(self) -> None:
        type(self).closed += 1


def started(monkeypatch: pytest.MonkeyPatch, gpus: float, **settings: Any) -> Cluster:
    config = RLConfig()
    config.rollout.engine, config.cluster.enable = Engine.VLLM, True
    config.actor.num_gpus_per_node, config.vllm.num_engines = 2, 2
    config.algo.kl.init_coef = 0.1  # for which there is a reference, beside actor and critic
    for name, value in settings.items():
        section, _, key = name.partition("_")
        setattr(getattr(config, section), key, value)
    monkeypatch.setattr(cluster, "RaySession", Session)
    monkeypatch.setattr(cluster, "cluster_gpus", lambda: gpus)
    return Cluster(config, cluster_roles(config), colocated_roles(config.train))


@pytest.mark.parametrize(
    ("needed", "settings"),
    [
        (8, {}),
        (10, {"vllm_tensor_parallel_size": 2}),
        (6, {"train_colocate_actor_ref": True}),
        (2, {"train_colocate_all": True}),
    ],
    ids=str,
)
def test_a_machine_with_too_few_gpus_is_told_how_many_lack(
    needed: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert started(monkeypatch, needed, **settings).gpus
    opened, closed = Session.opened, Session.closed
    with pytest.raises(
        ConfigurationError, match=rf"asks for {needed} GPUs, but this machine has {needed - 1}: .*--train\.colocate_all"
    ):
        started(monkeypatch, needed - 1, **settings)
    assert (Session.opened - opened, Session.closed - closed) == (1, 1)


@pytest.mark.parametrize(("gpus", "settings"), [(0, {}), (1, {"cluster_address": "auto"})], ids=str)
def test_machines_without_gpus_and_clusters_that_may_grow_are_left_to_ray(
    gpus: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert started(monkeypatch, gpus, **settings).gpus is bool(gpus)
