from unittest.mock import create_autospec

import pytest
from dependency_injector import providers

from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.train import TrainConfig
from rollgrad.entrypoints.composition.cluster import Cluster, neighbours
from rollgrad.entrypoints.composition.rl import colocated_roles, rl_container

ROLES = {"actor": 2, "critic": 1, "reference": 1, "reward": 3, "engines": 2}
ALL = sorted(ROLES)


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ((), [["actor"], ["critic"], ["engines"], ["reference"], ["reward"]]),
        (("colocate_actor_ref",), [["actor", "reference"], ["critic"], ["engines"], ["reward"]]),
        (("colocate_critic_reward",), [["actor"], ["critic", "reward"], ["engines"], ["reference"]]),
        (("colocate_actor_ref", "colocate_critic_reward"), [["actor", "reference"], ["critic", "reward"], ["engines"]]),
        (("colocate_all",), [ALL]),
        (("colocate_all", "colocate_critic_reward"), [ALL]),
    ],
)
def test_who_shares(settings: tuple[str, ...], groups: list[list[str]]) -> None:
    train = TrainConfig(**dict.fromkeys(settings, True))
    for group in groups:
        assert [neighbours(role, ROLES, colocated_roles(train)) for role in group] == [group] * len(group)
    assert sorted(role for group in groups for role in group) == ALL


def test_who_shares_with_none_that_the_run_has_is_alone() -> None:
    train = TrainConfig(colocate_actor_ref=True, colocate_all=False)
    assert neighbours("actor", ROLES | {"reference": 0}, colocated_roles(train)) == ["actor"]
    everything = TrainConfig(colocate_all=True)
    assert neighbours("engines", ROLES | {"critic": 0, "reward": 0}, colocated_roles(everything)) == [
        "actor",
        "engines",
        "reference",
    ]


def test_models_and_engines_of_a_cluster_are_asked_for_as_it_takes_it() -> None:
    config = RLConfig()
    config.cluster.enable = True
    config.reward.model_name_or_path = "reward"
    cluster = create_autospec(Cluster, instance=True)
    container = rl_container(config)
    container.cluster.override(providers.Object(cluster))
    container.rollouts.override(providers.Object(7))
    assert container.policy() is cluster.policy(rl_container, 7)
    assert container.loaded_critic() is cluster.critic(rl_container, 7)
    assert container.loaded_reference() is cluster.reference(rl_container)
    assert container.reward() is cluster.reward(rl_container)
    for started in (cluster.policy, cluster.critic):
        started.assert_called_with(rl_container, 7)
