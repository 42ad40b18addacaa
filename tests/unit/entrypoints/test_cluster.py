from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
from dependency_injector import providers
from structlog.testing import capture_logs

from rollgrad.adapters.ray.placement import Placement, by_machine
from rollgrad.adapters.weights.cuda_ipc import cuda_ipc
from rollgrad.adapters.weights.shared_memory import shared_memory
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.train import TrainConfig
from rollgrad.entrypoints.composition import cluster as composition
from rollgrad.entrypoints.composition.anywhere import absolute
from rollgrad.entrypoints.composition.cluster import Cluster, neighbours
from rollgrad.entrypoints.composition.rl.container import rl_container
from rollgrad.entrypoints.composition.rl.roles import cluster_roles, colocated_roles

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


def sampling_config(*, together: bool) -> RLConfig:
    """Two engines of two GPUs each, and four processes of the actor."""
    config = RLConfig()
    config.cluster.enable, config.train.colocate_all = True, together
    config.algo.advantage.estimator = "rloo"
    config.actor.num_gpus_per_node, config.ds.sequence_parallel_size = 4, 4
    config.rollout.engine, config.vllm.num_engines = Engine.VLLM, 2
    config.vllm.tensor_parallel_size = 2
    return config


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The placements that clusters of this test ask for, on four machines with GPUs."""
    made: list[Any] = []

    def reserve(*what: Any, **how: Any) -> Any:
        placement = create_autospec(Placement, instance=True)
        placement.spread.side_effect = lambda first, size: size
        placement.asked = what, how
        made.append(placement)
        return placement

    monkeypatch.setattr(composition, "RaySession", create_autospec(composition.RaySession))
    monkeypatch.setattr(composition, "cluster_gpus", lambda: 8.0)
    monkeypatch.setattr(composition, "Placement", reserve)
    return made


@pytest.mark.parametrize("together", [True, False])
def test_an_engine_has_a_bundle_of_its_own_or_those_of_as_many_processes(together: bool, reserved: list[Any]) -> None:
    config = sampling_config(together=together)
    cluster = Cluster(config, cluster_roles(config), colocated_roles(config.train))
    with capture_logs() as logs:
        for role in ("actor", "engines"):
            cluster._slots(role)
    how = {"timeout": config.cluster.timeout, "shared": together}
    if together:
        (placement,) = reserved
        assert placement.asked == (("actor and engines", 4), {**how, "gpus": 1.0, "here": 2})
        engines = placement.joint_slot.call_args_list[4:]
        assert [call.args for call in engines] == [(0, 2), (2, 2)]
    else:
        actor, engines = reserved
        assert actor.asked == (("actor", 4), {**how, "gpus": 1.0, "here": 1})
        assert engines.asked == (("engines", 2), {**how, "gpus": 2.0, "here": 0})
        assert [call.args for call in engines.joint_slot.call_args_list] == [(0, 1), (1, 1)]
    (session,) = composition.RaySession.call_args_list  # type: ignore[attr-defined]
    assert session.kwargs["cpus"] >= 4
    (line,) = logs
    assert line["event"] == "processes that share sequences or layers are on several machines"


def test_the_processes_of_all_models_of_a_run_begin_together(
    reserved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sampling_config(together=True)
    config.algo.advantage.estimator, config.algo.kl.init_coef = "gae", 0.1
    begun, ended, joined = list[int](), list[Any](), list[Any]()

    def begin(slots: list[Any], *, threads: int, modules: tuple[str, ...]) -> list[str]:
        assert "deepspeed" in modules
        begun.append(len(slots))
        return [f"{len(begun)}.{rank}" for rank in range(len(slots))]

    monkeypatch.setattr(composition, "begin_workers", begin)
    monkeypatch.setattr(composition, "end_workers", ended.extend)
    monkeypatch.setattr(composition, "WorkerGroup", lambda name, workers, **_: joined.append(workers) or MagicMock())
    cluster = Cluster(config, cluster_roles(config), colocated_roles(config.train))
    cluster.critic(rl_container, 3)
    assert begun == [4, 4, 4], "actor, critic and reference"
    cluster.reference(rl_container)
    assert begun == [4, 4, 4]
    cluster._started("reference", rl_container)  # a replacement
    assert begun == [4, 4, 4, 4]
    assert joined == [[f"{number}.{rank}" for rank in range(4)] for number in (2, 3, 4)]
    cluster.close()
    assert ended == [f"1.{rank}" for rank in range(4)], "the actor's, which have got no model"


def test_processes_read_what_is_here_by_a_relative_name(
    reserved: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their own working directories are those of Ray's nodes."""
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    for name in ("form.jinja", "losses.py"):
        Path(name).touch()
    config = sampling_config(together=True)
    config.actor.model_name_or_path, config.ref.model_name_or_path = "own", "Qwen/Qwen3-0.6B"
    config.data.chat_template, config.algo.extension_path = "form.jinja", "./losses.py"
    group, engines = MagicMock(), MagicMock()
    monkeypatch.setattr(composition, "begin_workers", MagicMock())
    monkeypatch.setattr(composition, "WorkerGroup", lambda *_, **__: group)
    monkeypatch.setattr(composition, "start_engines", engines)
    monkeypatch.setattr(composition, "run_to_end", MagicMock())
    monkeypatch.setattr(composition, "EngineFleet", MagicMock())
    cluster = Cluster(config, cluster_roles(config), colocated_roles(config.train))
    cluster.policy(rl_container, 3)
    cluster.engines({"model": "own"}, beside_training=False)

    _, _, found, _ = group.build.call_args.args
    assert (found.actor.model_name_or_path, found.ref.model_name_or_path) == (str(tmp_path / "own"), "Qwen/Qwen3-0.6B")
    assert found.data.chat_template == str(tmp_path / "form.jinja")
    assert found.algo.extension_path == str(tmp_path / "losses.py")
    assert engines.call_args.args[1]["model"] == str(tmp_path / "own")
    assert config.actor.model_name_or_path == "own", "what is described and saved is as it was given"


def test_a_replaced_engine_has_as_long_to_start_as_the_first(
    reserved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, started, fleet = sampling_config(together=False), MagicMock(), MagicMock()
    config.cluster.timeout = 3000
    monkeypatch.setattr(composition, "start_engines", started)
    monkeypatch.setattr(composition, "run_to_end", MagicMock())
    monkeypatch.setattr(composition, "EngineFleet", fleet)
    Cluster(config, cluster_roles(config), []).engines({"model": "here"}, beside_training=False)
    assert started.call_args.kwargs["seconds"] == 3000
    assert fleet.call_args.kwargs == {"not_started": {}, "restart_seconds": 3000, "wait_seconds": 3000}


@pytest.mark.parametrize("template", ["{{ messages }}" * 1000, "{% if x %}\0{% endif %}"])
def test_a_chat_template_itself_names_no_file(template: str) -> None:
    assert absolute(template) == template


def test_neighbouring_processes_are_on_one_machine() -> None:
    machines = ["b", "a", "c", "b", "a", "c", "c"]
    assert by_machine(machines, "b") == [0, 3, 2, 5, 6, 1, 4]
    assert by_machine(machines, "a") == [1, 4, 2, 5, 6, 0, 3]
    assert by_machine(machines, "elsewhere") == [2, 5, 6, 1, 4, 0, 3]


def test_each_process_on_the_gpus_of_an_engine_hands_its_memory_over() -> None:
    container = rl_container(sampling_config(together=True))
    container.gpus.override(providers.Object(True))
    container.without.override(providers.Object("torch is built without GPUs"))
    assert container.weight_backend() is shared_memory
    container.without.override(providers.Object(""))
    backend = container.weight_backend()
    assert (backend.func, backend.keywords) == (cuda_ipc, {"workers": 2})
