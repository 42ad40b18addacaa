from operator import attrgetter
from typing import Any

import pytest
from attrs import evolve

from rollgrad.application.settings.rules.cluster import cluster_problems, server_problems
from rollgrad.application.settings.rules.kl import kl_problems
from rollgrad.application.settings.rules.lora import lora_problems
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraSync
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.optimizer import Optim
from rollgrad.application.settings.sections.rollout import Engine, ServerSync
from rollgrad.application.settings.sections.vllm import SyncBackend
from rollgrad.application.settings.validation import condition_problems
from rollgrad.domain.algorithms.settings import KLAgainst, KLEstimator, KLSettings

CLUSTER: dict[str, Any] = {"cluster.enable": True}
FSDP2: dict[str, Any] = {"cluster.strategy": Strategy.FSDP2}
VLLM: dict[str, Any] = {"rollout.engine": Engine.VLLM}
MODEL: dict[str, Any] = {"reward.model_name_or_path": "rm"}
URL = "http://127.0.0.1:8000"
SERVER: dict[str, Any] = {"rollout.engine": Engine.SERVER, "rollout.server_urls": (URL,)}
TOGETHER: dict[str, Any] = {"train.colocate_all": True}
MODELS = ("actor", "critic", "ref", "reward")
IPC: dict[str, Any] = {"vllm.sync_backend": SyncBackend.CUDA_IPC}
NCCL: dict[str, Any] = {"vllm.sync_backend": SyncBackend.NCCL}
DELTA: dict[str, Any] = {"vllm.sync_backend": SyncBackend.DISK, "vllm.sync_delta": True}


def problems(settings: dict[str, Any]) -> list[str]:
    config = RLConfig()
    for name, value in settings.items():
        at, _, key = name.rpartition(".")
        setattr(attrgetter(at)(config), key, value)
    return [*condition_problems(config).values(), *cluster_problems(config), *server_problems(config)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        VLLM,
        VLLM | {"vllm.tensor_parallel_size": 2, "vllm.gpu_memory_utilization": 0.5},
        CLUSTER,
        CLUSTER | {"cluster.address": "auto", "cluster.timeout": 60.0},
        CLUSTER | {"actor.num_nodes": 2, "critic.num_nodes": 1, "ref.num_gpus_per_node": 4},
        CLUSTER | {"ds.zero_stage": 3, "ds.param_offload": True, "ds.adam_offload": True},
        CLUSTER | {"ds.zero_stage": 0},
        CLUSTER | FSDP2 | {"cluster.offload": True, "ds.sequence_parallel_size": 2, "actor.num_gpus_per_node": 2},
        CLUSTER | {"ds.sequence_parallel_size": 2, "actor.num_gpus_per_node": 4, "ref.num_gpus_per_node": 2},
        CLUSTER | FSDP2 | {"cluster.expert_parallel_size": 4, "ds.sequence_parallel_size": 2, "actor.num_nodes": 4},
        CLUSTER | {"ds.tensor_parallel_size": 2, "actor.num_gpus_per_node": 4, "ds.zero_stage": 3},
        CLUSTER | VLLM | {"vllm.num_engines": 4, "vllm.tensor_parallel_size": 2, "vllm.pipeline_parallel_size": 2},
        CLUSTER | VLLM | TOGETHER | {"vllm.num_engines": 4},
        CLUSTER | VLLM | TOGETHER | {"train.optimizer_sleeps": True, "ds.zero_stage": 3},
        CLUSTER | {"train.colocate_actor_ref": True, "train.async_enable": True},
        CLUSTER | MODEL | {"reward.num_nodes": 1, "reward.num_gpus_per_node": 3, "ds.sequence_parallel_size": 1},
        CLUSTER | MODEL | {"reward.offload": True, "ds.zero_stage": 2},
        CLUSTER | MODEL | {"train.colocate_critic_reward": True, "train.colocate_actor_ref": True},
        SERVER,
        SERVER | {"train.async_enable": True, "rollout.server_urls": (URL, "https://other/v1")},
        *(VLLM | {"vllm.sync_backend": backend} for backend in SyncBackend if backend is not SyncBackend.NCCL),
        *(CLUSTER | VLLM | {"vllm.sync_backend": way} for way in SyncBackend if way is not SyncBackend.CUDA_IPC),
        CLUSTER | VLLM | TOGETHER | IPC | {"vllm.num_engines": 2, "actor.num_gpus_per_node": 2},
        CLUSTER | VLLM | DELTA | {"vllm.extra": {"quantization": None, "enable_eplb": False}},
        CLUSTER | VLLM | DELTA | {"vllm.sync_backend": SyncBackend.SHARED_MEMORY, "train.async_enable": True},
        SERVER | {"rollout.server_sync": ServerSync.DISK, "rollout.server_sync_delta": True},
    ],
)
def test_allows(settings: dict[str, Any]) -> None:
    assert problems(settings) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm.num_engines", 2),
        ("vllm.tensor_parallel_size", 2),
        ("vllm.gpu_memory_utilization", 0.5),
        ("vllm.sync_backend", SyncBackend.NCCL),
        ("vllm.sync_delta", True),
    ],
)
def test_engines_of_vllm_need_vllm(name: str, value: Any) -> None:
    (problem,) = problems(CLUSTER | {name: value})
    assert problem == (
        f"{name} is {value}, but rollout.engine is embedded: set --rollout.engine vllm, or leave --{name} out."
    )


@pytest.mark.parametrize("name", ["actor.aux_loss_coef", "actor.router_z_loss_coef"])
def test_losses_of_routers_are_over_whole_sequences(name: str) -> None:
    settings = CLUSTER | {"ds.sequence_parallel_size": 2, "actor.num_gpus_per_node": 2, name: 0.1}
    (problem,) = problems(settings)
    assert f"leave one of --{name} and --ds.sequence_parallel_size out" in problem
    assert problems(settings | {name: 0.0}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cluster.address", "auto"),
        ("cluster.timeout", 60.0),
        ("cluster.strategy", Strategy.FSDP2),
        ("ds.zero_stage", 3),
        ("ds.adam_offload", True),
        ("ds.param_offload", True),
        ("ds.sequence_parallel_size", 2),
        ("ds.tensor_parallel_size", 2),
        *((f"{model}.{key}", 2) for model in MODELS for key in ("num_nodes", "num_gpus_per_node")),
        ("train.colocate_all", True),
        ("train.colocate_actor_ref", True),
        ("train.colocate_critic_reward", True),
        ("vllm.num_engines", 2),
    ],
)
def test_processes_need_a_cluster(name: str, value: Any) -> None:
    shown = repr(value) if name == "cluster.address" else value
    assert problems(VLLM | {name: value}) == [
        f"{name} is {shown}, but models and engines have no processes of their own: turn on --cluster.enable, or leave "
        f"--{name} out."
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [("zero_stage", 1), ("adam_offload", True), ("tensor_parallel_size", 2), ("extra", {"dump_state": True})],
)
def test_settings_of_deepspeed_are_not_those_of_fsdp2(name: str, value: Any) -> None:
    assert problems(CLUSTER | FSDP2 | {f"ds.{name}": value, "actor.num_gpus_per_node": 2}) == [
        f"ds.{name} is {value}, but cluster.strategy is fsdp2: set --cluster.strategy deepspeed, or leave --ds.{name} "
        "out."
    ]


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (Strategy.DEEPSPEED, "ds.adam_offload"),
        (Strategy.DEEPSPEED, "ds.param_offload"),
        (Strategy.FSDP2, "cluster.offload"),
    ],
)
def test_what_rests_for_good_does_not_sleep(strategy: Strategy, name: str) -> None:
    settings = CLUSTER | VLLM | {"cluster.strategy": strategy, "ds.zero_stage": 3, name: True}
    assert problems(settings | TOGETHER) == []
    (problem,) = problems(settings | TOGETHER | {"train.optimizer_sleeps": True})
    assert problem.endswith(f"leave one of --train.optimizer_sleeps and --{name} out.")
    assert any("turn on --train.colocate_all" in each for each in problems(settings | {"train.optimizer_sleeps": True}))


def test_a_stage_that_divides_what_fsdp2_does_is_accepted() -> None:
    assert problems(CLUSTER | FSDP2 | {"ds.zero_stage": 3, "actor.num_gpus_per_node": 2}) == []


@pytest.mark.parametrize(("name", "value"), [("offload", True), ("expert_parallel_size", 2)])
def test_settings_of_fsdp2_are_not_those_of_deepspeed(name: str, value: Any) -> None:
    assert problems(CLUSTER | {f"cluster.{name}": value, "actor.num_gpus_per_node": 2}) == [
        f"cluster.{name} is {value}, but cluster.strategy is deepspeed: set --cluster.strategy fsdp2, or leave "
        f"--cluster.{name} out."
    ]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_only_stage_three_can_offload_parameters(stage: int) -> None:
    assert problems(CLUSTER | {"ds.param_offload": True, "ds.zero_stage": stage}) == [
        f"ds.param_offload is True, but ds.zero_stage {stage} does not divide parameters: set --ds.zero_stage 3, or "
        "leave --ds.param_offload out."
    ]


@pytest.mark.parametrize("key", ["sequence_parallel_size", "tensor_parallel_size"])
@pytest.mark.parametrize("model", ["actor", "critic", "ref"])
def test_processes_make_whole_groups(model: str, key: str) -> None:
    sizes = {f"{each}.num_gpus_per_node": 3 if each == model else 4 for each in ("actor", "critic", "ref")}
    assert problems(CLUSTER | sizes | {f"ds.{key}": 2}) == [
        f"ds.{key} is 2, which does not divide the 3 processes of the model {model!r}: change --ds.{key}, or "
        f"--{model}.num_gpus_per_node."
    ]


@pytest.mark.parametrize("model", MODELS)
def test_processes_that_divide_experts_make_whole_groups(model: str) -> None:
    sizes = {f"{each}.num_gpus_per_node": 3 if each == model else 4 for each in MODELS}
    assert problems(CLUSTER | FSDP2 | MODEL | sizes | {"cluster.expert_parallel_size": 2}) == [
        f"cluster.expert_parallel_size is 2, which does not divide the 3 processes of the model {model!r}: change "
        f"--cluster.expert_parallel_size, or --{model}.num_gpus_per_node."
    ]


def test_processes_share_layers_or_tokens() -> None:
    sizes = {"actor.num_gpus_per_node": 4, "ds.sequence_parallel_size": 2, "ds.tensor_parallel_size": 4}
    assert problems(CLUSTER | sizes) == [
        "ds.tensor_parallel_size is 4 and ds.sequence_parallel_size 2, but processes share layers or tokens, not both: "
        "leave one of --ds.tensor_parallel_size and --ds.sequence_parallel_size out."
    ]


@pytest.mark.parametrize("model", ["actor", "critic"])
def test_muon_needs_whole_matrices(model: str) -> None:
    sizes = {"actor.num_gpus_per_node": 4, "ds.tensor_parallel_size": 2}
    assert problems(CLUSTER | sizes | {f"{model}.optim": Optim.MUON}) == [
        f"ds.tensor_parallel_size is 2 with {model}.optim muon, which needs matrices whole: leave one of "
        f"--ds.tensor_parallel_size and --{model}.optim out."
    ]


def test_layers_with_adapters_are_not_shared() -> None:
    config = RLConfig()
    config.cluster.enable, config.actor.num_gpus_per_node, config.ds.tensor_parallel_size = True, 2, 2
    config.actor.lora.rank = 8
    assert list(cluster_problems(config)) == [
        "ds.tensor_parallel_size is 2 with actor.lora.rank 8, but layers with adapters are not divided: leave one of "
        "--ds.tensor_parallel_size and --actor.lora.rank out."
    ]


def test_a_reference_that_rests_shares_no_layers_and_is_not_quantised() -> None:
    config = RLConfig()
    config.cluster.enable, config.actor.num_gpus_per_node, config.ds.tensor_parallel_size = True, 2, 2
    config.ref.offload = True
    assert list(cluster_problems(config)) == [
        "ref.offload is on with ds.tensor_parallel_size 2, but a reference that shares layers stays on its GPUs: leave "
        "one of --ref.offload and --ds.tensor_parallel_size out."
    ]
    config.actor.lora.rank, config.actor.lora.load_in_4bit = 8, True
    assert list(lora_problems(config)) == [
        "actor.lora.load_in_4bit is on and so is ref.offload, but weights in 4 bits, which the reference shares with "
        "the actor, are not divided: leave one of --actor.lora.load_in_4bit and --ref.offload out."
    ]
    config.ref.model_name_or_path = "another"
    assert list(lora_problems(config)) == []


WHOLE = KLSettings(init_coef=0.1, use_loss=True, estimator=KLEstimator.FULL)


@pytest.mark.parametrize(
    ("kl", "message"),
    [
        (KLSettings(init_coef=0.0), "algo.kl.init_coef 0 and algo.kl.against reference there is no reference"),
        (
            KLSettings(init_coef=0.1, use_loss=True, estimator=KLEstimator.K2, against=KLAgainst.ROLLOUT),
            "algo.kl.against rollout there is no ref",
        ),
        (
            WHOLE,
            "without algo.kl.top_k the reference is whole in the policy's processes",
        ),
    ],
)
def test_a_reference_that_rests_has_processes_of_its_own(kl: KLSettings, message: str) -> None:
    config = RLConfig()
    config.cluster.enable = config.ref.offload = True
    config.algo.kl = kl
    (problem,) = kl_problems(config)
    assert message in problem
    for fits in (KLSettings(init_coef=0.1), evolve(WHOLE, top_k=8)):
        config.algo.kl = fits
        assert list(kl_problems(config)) == []


def test_quantised_weights_are_not_divided() -> None:
    config = RLConfig()
    config.cluster.enable, config.ds.zero_stage = True, 3
    config.actor.lora.rank, config.actor.lora.load_in_4bit = 8, True
    assert list(lora_problems(config)) == [
        "actor.lora.load_in_4bit is on and ds.zero_stage is 3, but weights in 4 bits are not divided: set "
        "--ds.zero_stage 2, or leave --actor.lora.load_in_4bit out."
    ]
    for stage in (0, 1, 2):
        config.ds.zero_stage = stage
        assert not list(lora_problems(config))
    config.cluster.strategy, config.ds.zero_stage = Strategy.FSDP2, 3
    assert list(lora_problems(config)) == [
        "actor.lora.load_in_4bit is on and cluster.strategy is fsdp2, but weights in 4 bits are not divided: set "
        "--cluster.strategy deepspeed, or leave --actor.lora.load_in_4bit out."
    ]


def test_engines_that_never_rest_share_no_gpu() -> None:
    (problem,) = problems(CLUSTER | VLLM | TOGETHER | {"train.async_enable": True})
    assert problem.startswith("train.colocate_all lets engines sleep while models train")
    assert problem.endswith("leave one of --train.colocate_all and --train.async_enable out.")


@pytest.mark.parametrize(
    ("tensor", "pipeline", "engines", "machines", "processes", "split"),
    [
        (2, 1, 1, 1, 2, None),
        (2, 2, 4, 2, 8, None),
        (4, 1, 1, 1, 1, None),  # three of its GPUs have no process of the actor
        (4, 1, 1, 2, 6, None),  # the rest has no engine
        (4, 1, 3, 2, 6, 1),
        (2, 3, 2, 3, 4, 0),
        (2, 1, 2, 2, 1, 0),
    ],
)
def test_an_engine_beside_models_is_on_one_machine(
    tensor: int, pipeline: int, engines: int, machines: int, processes: int, split: int | None
) -> None:
    sizes = {"vllm.tensor_parallel_size": tensor, "vllm.pipeline_parallel_size": pipeline, "vllm.num_engines": engines}
    actor = {"actor.num_nodes": machines, "actor.num_gpus_per_node": processes}
    found = problems(CLUSTER | VLLM | sizes | actor | TOGETHER)
    assert problems(CLUSTER | VLLM | sizes | actor) == []
    if split is None:
        assert found == []
        return
    first = split * tensor * pipeline
    assert found == [
        f"vllm.tensor_parallel_size {tensor} times vllm.pipeline_parallel_size {pipeline} is {tensor * pipeline} GPUs "
        f"of an engine, which is on one machine, but train.colocate_all puts engine {split} on those of the actor's "
        f"processes {first} to {first + tensor * pipeline - 1}, of which each machine has {processes}: change "
        "--vllm.tensor_parallel_size, --vllm.pipeline_parallel_size or --actor.num_gpus_per_node."
    ]


@pytest.mark.parametrize("key", ["num_nodes", "num_gpus_per_node"])
def test_only_a_reward_model_has_processes(key: str) -> None:
    assert problems(CLUSTER | {f"reward.{key}": 2}) == [
        f"reward.{key} is 2, but there is no reward model: set --reward.model_name_or_path, or leave "
        f"--reward.{key} out."
    ]


def test_critic_and_reward_model_share_where_both_are() -> None:
    share = {"train.colocate_critic_reward": True}
    (problem,) = problems(CLUSTER | share)
    assert problem == (
        "train.colocate_critic_reward is on, but there is no reward model: set --reward.model_name_or_path, or leave "
        "--train.colocate_critic_reward out."
    )
    config = RLConfig()
    config.cluster.enable = config.train.colocate_critic_reward = True
    config.reward.model_name_or_path, config.algo.advantage.estimator = "rm", "rloo"
    (problem,) = cluster_problems(config)
    assert problem.startswith("train.colocate_critic_reward is on, but there is no critic: set --algo.advantage.")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout.server_urls": (URL,)}, "set --rollout.engine server"),
        ({"rollout.adaptive_concurrency": True}, "set --rollout.engine vllm"),
        ({"rollout.engine": Engine.SERVER}, "set --rollout.server_urls"),
        (SERVER | {"rollout.server_urls": ("127.0.0.1:8000",)}, "starts with http:// or https://"),
        (SERVER | {"rollout.server_urls": (URL, URL)}, f"names {URL} twice"),
        (SERVER | CLUSTER, "leave --cluster.enable out"),
    ],
)
def test_servers_are_named_once_and_are_no_clusters(settings: dict[str, Any], message: str) -> None:
    (problem,) = problems(settings)
    assert message in problem


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (NCCL, "on each of which NCCL allows one process"),
        (CLUSTER | TOGETHER | NCCL, "on each of which NCCL allows one process"),
        (CLUSTER | IPC, "trainer and engines share none"),
        (IPC | {"vllm.pipeline_parallel_size": 2}, "but 1 of the engines' GPUs have no process of the actor"),
        (
            CLUSTER | TOGETHER | IPC | {"vllm.num_engines": 5, "actor.num_gpus_per_node": 2},
            "but 3 of the engines' GPUs have no process of the actor",
        ),
    ],
)
def test_weights_go_where_there_is_a_way(settings: dict[str, Any], why: str) -> None:
    (problem,) = problems(VLLM | settings)
    assert why in problem
    assert "set --vllm.sync_backend auto" in problem


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        *(
            (CLUSTER | {"vllm.sync_backend": way}, f"vllm.sync_backend {way}, but changes go")
            for way in (SyncBackend.AUTO, SyncBackend.NCCL)
        ),
        ({}, "engines on the trainer's GPUs give up their weights while models train"),
        (CLUSTER | TOGETHER, "engines on the trainer's GPUs give up their weights while models train"),
        (
            CLUSTER | {"vllm.extra": {"quantization": "fp8"}},
            "vllm.extra.quantization fp8, but quantised weights are made of whole tensors",
        ),
        (
            CLUSTER | {"vllm.extra": {"enable_eplb": True}},
            "vllm.extra.enable_eplb True, but experts that are balanced change their places",
        ),
        (
            CLUSTER | {"actor.lora.sync": LoraSync.ADAPTER, "actor.lora.rank": 8},
            "leave one of --vllm.sync_delta and --actor.lora.sync out",
        ),
    ],
)
def test_changes_alone_go_where_the_rest_is(settings: dict[str, Any], why: str) -> None:
    (problem,) = problems(VLLM | DELTA | settings)
    assert problem.startswith("vllm.sync_delta is on")
    assert why in problem


@pytest.mark.parametrize(("name", "value"), [("server_sync", ServerSync.DISK), ("server_sync_delta", True)])
def test_ways_to_servers_need_servers(name: str, value: Any) -> None:
    (problem,) = problems({f"rollout.{name}": value})
    assert problem.endswith(f"set --rollout.engine server, or leave --rollout.{name} out.")
