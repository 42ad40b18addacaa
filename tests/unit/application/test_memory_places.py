"""The memory plan of engines and roles that share GPUs and machines, and what does not fit."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from rollgrad.application.settings.memory_places import (
    CONTEXT_BYTES,
    GROUP_BYTES,
    Machine,
    gpu_count,
    places,
    shortages,
)
from rollgrad.application.settings.memory_plan import GRAPH_BYTES, memory_plan
from rollgrad.application.settings.model_shape import ModelShape, PassMemory
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.application.settings.sections.ds import PARAMETERS
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.vllm import CPU_CACHE_BYTES, SyncBackend
from rollgrad.application.settings.way_out import way_out
from rollgrad.entrypoints.openrlhf.command import translated_config
from tests.memory_plans import CPU, GPU, H100, SHAPE, at_once, cluster_config, plan, small_config


def test_the_way_out_is_what_costs_least_among_what_fits() -> None:
    config, tried = small_config(), list[tuple[str, bool]]()

    def fits(*enough: str) -> Callable[[RLConfig], bool]:
        def judged(changed: RLConfig) -> bool:
            actor = changed.actor
            tried.append((actor.gradient_checkpointing, actor.offload_activations))
            return f"{actor.gradient_checkpointing}{' moved' if actor.offload_activations else ''}" in enough

        return judged

    assert way_out(config, GPU, fits("full", "selective")) == (
        "It would fit with --actor.gradient_checkpointing selective."
    )
    assert way_out(config, GPU, fits("full moved")) == (
        "It would fit with --actor.gradient_checkpointing full --actor.offload_activations true."
    )
    assert tried[1:] == [("selective", False), ("full", False), ("full", True)]
    assert way_out(config, GPU, fits()) is None
    assert way_out(config, CPU, fits("full moved")) is None
    config.actor.compile = True
    assert way_out(config, GPU, fits("selective")) is None
    config.actor.compile, config.cluster.enable, config.ds.zero_stage = False, True, PARAMETERS
    assert way_out(config, GPU, fits("selective")) is None


def test_vllm_takes_its_share_of_a_gpu() -> None:
    config = cluster_config()
    config.vllm.gpu_memory_utilization = 0.5
    config.vllm.tensor_parallel_size, config.vllm.pipeline_parallel_size = 2, 4
    row = plan(config, GPU)["engines"]
    assert (row.processes, row.weights, row.total - row.buckets) == (16, 250, 500_000)
    assert plan(config)["engines"].passes == CPU_CACHE_BYTES
    config.vllm.extra = {"kv_cache_memory_bytes": 10**9}
    assert {plan(config, machine)["engines"].passes for machine in (CPU, GPU)} == {10**9}, "which is beyond the share"
    assert plan(config, H100)["engines"].passes == H100.gpu // 2 - 250, "what else it has in its share is not known"


def test_the_driver_samples_on_a_gpu_of_the_actor() -> None:
    config = cluster_config()
    config.rollout.engine, config.vllm.num_engines, config.algo.kl.init_coef = Engine.EMBEDDED, 1, 0.1
    rows = plan(config, GPU)
    actor, engines, reference = rows["actor"], rows["engines"], rows["reference"]
    assert (engines.processes, engines.weights) == (1, 2000)
    assert at_once(rows, GPU) == {
        "a GPU of actor, engines": actor.kept + engines.kept + max(actor.total - actor.kept, engines.passes),
        "a GPU of reference": reference.total,
    }
    config.train.colocate_actor_ref = True
    assert [*at_once(plan(config, GPU), GPU)] == ["a GPU of actor, reference, engines"]


def test_who_shares_a_gpu_is_added_up() -> None:
    config = cluster_config()
    config.algo.kl.init_coef, config.vllm.gpu_memory_utilization = 0.1, 0.9
    rows = plan(config, GPU)
    actor, reference, engines = (rows[role] for role in ("actor", "reference", "engines"))
    apart = {"a GPU of actor": actor.total, "a GPU of reference": reference.total, "a GPU of engines": engines.total}
    assert at_once(rows, GPU) == apart
    config.train.colocate_actor_ref = True
    together = {
        "a GPU of actor, reference": actor.total + reference.kept,
        "a GPU of engines": engines.total,
    }
    assert at_once(plan(config, GPU), GPU) == together
    config.train.colocate_all = True
    rows = plan(config, GPU)
    actor, reference, engines = (rows[role] for role in ("actor", "reference", "engines"))
    kept = actor.kept + reference.kept
    all_on_one = {
        "a GPU of actor, reference, engines": kept
        + engines.kept
        + max(actor.total - actor.kept, engines.total - engines.kept)
    }
    assert at_once(rows, GPU) == all_on_one


@pytest.mark.parametrize(
    ("section", "key", "size", "groups"),
    [
        ("ds", "zero_stage", 3, 1),
        ("ds", "sequence_parallel_size", 2, 2),
        ("ds", "sequence_parallel_size", 4, 2),  # whose processes are all, but in a group of their own
        ("ds", "tensor_parallel_size", 2, 3),  # that, those that share layers, those that have the same share
        ("ds", "tensor_parallel_size", 4, 2),
        ("cluster", "expert_parallel_size", 2, 3),
    ],
)
def test_each_group_has_its_memory(section: str, key: str, size: int, groups: int) -> None:
    config = cluster_config()
    config.vllm.sync_backend = SyncBackend.SHARED_MEMORY
    setattr(getattr(config, section), key, size)
    row = plan(config, GPU)["actor"]
    assert row.groups == groups
    (place, *_) = places([row], GPU)
    assert place.held == row.total + CONTEXT_BYTES + groups * GROUP_BYTES
    assert plan(cluster_config(processes=1), GPU)["actor"].groups == 1, "one process alone has that of weights"


def test_a_second_copy_of_weights_is_divided_over_fewer_processes() -> None:
    config = cluster_config(3)
    config.vllm.sync_backend = SyncBackend.SHARED_MEMORY
    before = plan(config, GPU)["actor"]
    config.ds.extra = {"zero_optimization": {"zero_hpz_partition_size": 2}}
    row = plan(config, GPU)["actor"]
    assert (row.weights - before.weights, row.groups - before.groups) == (2000 / 2, 1)
    config.ds.param_offload = True
    assert plan(config, GPU)["actor"].weights == 0
    config.ds.param_offload, config.ds.zero_stage = False, 2
    assert plan(config, GPU)["actor"].groups == 1, "which DeepSpeed has at its last stage alone"


def test_weights_cross_memory_of_gpus_in_buckets() -> None:
    config = cluster_config(processes=2)
    wide = evolve(SHAPE, embedding=200 * 2**20)
    apart = plan(config, GPU, shape=wide)
    assert (apart["actor"].groups, apart["engines"].groups) == (2, 1), "they join one group by NCCL"
    assert (apart["actor"].buckets, apart["engines"].buckets) == (0, 2 * 400 * 2**20)
    config.train.colocate_all = True
    shared = plan(config, GPU, shape=wide)
    assert (shared["actor"].groups, shared["engines"].groups) == (1, 0)
    assert (shared["actor"].buckets, shared["engines"].buckets) == (400 * 2**20, 0), "a matrix larger than a bucket"
    assert plan(config, GPU)["actor"].buckets == 256 * 2**20
    assert shared["actor"].kept == shared["actor"].weights + shared["actor"].optimizer + 400 * 2**20, "while they wake"
    config.vllm.sync_backend = SyncBackend.SHARED_MEMORY
    assert plan(config, GPU, shape=wide)["actor"].buckets == 0
    assert plan(config, shape=wide)["actor"].buckets == 0


@pytest.mark.parametrize("left_out", ["enforce_eager", "sleep_mode_offload_cudagraph"])
def test_engines_that_sleep_keep_what_they_have_captured(left_out: str) -> None:
    config = cluster_config()
    config.train.colocate_all = True
    assert plan(config, H100)["engines"].kept == GRAPH_BYTES
    config.vllm.extra = {left_out: False}
    rows = plan(config, H100)
    actor = rows["actor"]
    assert at_once(rows, H100) == {
        "a GPU of actor, engines": actor.kept + max(actor.total - actor.kept + GRAPH_BYTES, int(0.5 * H100.gpu)),
    }
    config.vllm.extra = {left_out: True}
    assert plan(config, H100)["engines"].kept == 0
    config.train.colocate_all, config.vllm.extra = False, None
    assert plan(config, H100)["engines"].asleep == 0, "on a GPU of their own they never sleep"


def test_engines_that_sleep_keep_their_groups() -> None:
    config = cluster_config()
    config.vllm.tensor_parallel_size = config.vllm.pipeline_parallel_size = 2
    assert plan(config, GPU)["engines"].groups == 1, "their share of a GPU has the others"
    config.train.colocate_all = True
    assert plan(config, GPU)["engines"].groups == 2


def test_a_machine_without_gpus_holds_all_its_processes() -> None:
    config = cluster_config()
    config.actor.num_nodes = 2
    rows = plan(config)
    assert (rows["actor"].processes, rows["actor"].on_a_machine) == (8, 4)
    assert (rows["engines"].processes, rows["engines"].on_a_machine) == (2, 1)
    assert at_once(rows) == {"a machine's memory": 4 * rows["actor"].total + rows["engines"].total}


def test_what_does_not_fit_is_a_sentence() -> None:
    config = cluster_config()
    config.train.colocate_all, config.vllm.gpu_memory_utilization = True, 0.6
    shape = evolve(SHAPE, parameters=1000 * 2**20)
    for gigabytes, fits in ((24, True), (8, False)):
        machine = Machine(gpu=gigabytes * 2**30, memory=2**40)
        sentences = list(shortages(list(plan(config, machine, shape=shape).values()), machine))
        assert (sentences == []) == fits
    assert "a GPU of actor, engines would hold 12,553 MiB at once, and has 8,192." in sentences[0]
    assert "--vllm.gpu_memory_utilization" in sentences[0]


def test_gpus_that_roles_share_are_counted_once() -> None:
    config = cluster_config()
    config.actor.num_nodes, config.actor.num_gpus_per_node, config.vllm.num_engines = 2, 4, 3
    apart = gpu_count(list(plan(config, GPU).values()))
    assert apart == "GPUs of the run: 11 (8 of actor; 3 of engines)"
    config.train.colocate_all = True
    assert gpu_count(list(plan(config, GPU).values())) == "GPUs of the run: 8 (8 of actor, engines)"


LLAMA_3_8B = ModelShape(
    parameters=8_030_261_248,
    layers=32,
    hidden=4096,
    kv_heads=8,
    head_dim=128,
    embedding=128_256 * 4096,
    stored=2,
    passes=PassMemory(
        saved=((16, 4_963_611), (16384, 5_082_719_922)),
        trained=((16, 1_103_619_821), (2048, 1_234_570_462), (16384, 9_383_313_484)),
        scored=((16, 2_004_593), (16384, 2_052_685_900)),
    ),
)
"""With passes in bfloat16 that recompute activations, as `measured_passes` finds them."""
COMMANDS = Path(__file__).parents[1] / "entrypoints" / "openrlhf_commands.txt"


@pytest.mark.parametrize(
    ("flag", "section", "key", "share", "least"),
    [
        ("--enforce_eager", "train", "optimizer_sleeps", 0.5, 64e9),  # by --deepspeed_enable_sleep
        ("--adam_offload", "ds", "adam_offload", 0.6, 70e9),
    ],
)
def test_llama_3_8b_with_critic_reference_and_reward_model_fits_on_eight_gpus(
    flag: str, section: str, key: str, share: float, least: float
) -> None:
    """By the command lines of OpenRLHF's documents in which all models share eight GPUs."""
    command = next(c for c in COMMANDS.read_text(encoding="utf-8").split("\n\n") if flag in c)
    config, _ = translated_config([command])
    assert (config.train.colocate_all, config.ds.zero_stage, config.vllm.gpu_memory_utilization) == (True, 3, share)
    rows = memory_plan(config, LLAMA_3_8B, compute_bytes=2, machine=H100, reward=LLAMA_3_8B)
    assert {row.role for row in rows} == {"actor", "critic", "reference", "reward", "engines"}
    gpu, _ = places(rows, H100)
    assert least < gpu.held < least + 2e9
    assert list(shortages(rows, H100)) == []
    setattr(getattr(config, section), key, False)
    kept = memory_plan(config, LLAMA_3_8B, compute_bytes=2, machine=H100, reward=LLAMA_3_8B)
    assert len(list(shortages(kept, H100))) == 1, "beside an optimizer that stays the engines do not fit"


LLAMA_3_70B = ModelShape(
    parameters=70_553_706_496,
    layers=80,
    hidden=8192,
    kv_heads=8,
    head_dim=128,
    embedding=128_256 * 8192,
    stored=2,
)


def test_llama_3_70b_shares_the_gpus_of_two_machines_with_engines_over_eight() -> None:
    config = small_config()
    config.cluster.enable = config.train.colocate_all = True
    config.actor.gradient_checkpointing = Checkpointing.FULL
    config.actor.num_nodes, config.actor.num_gpus_per_node = 2, 8
    config.ds.zero_stage, config.ds.adam_offload = 3, True
    config.rollout.engine, config.vllm.num_engines = Engine.VLLM, 2
    config.vllm.gpu_memory_utilization = 0.6
    config.vllm.tensor_parallel_size, config.vllm.pipeline_parallel_size = 4, 2
    rows = plan(config, H100, shape=LLAMA_3_70B)
    actor, engines = rows["actor"], rows["engines"]
    assert (engines.processes, engines.on_a_machine, engines.device) == (16, 8, actor.device)
    assert engines.weights == math.ceil(LLAMA_3_70B.parameters * 2 / 8)
    assert (engines.total, engines.kept) == (48 * 10**9, GRAPH_BYTES)
    assert actor.weights == math.ceil(LLAMA_3_70B.parameters * 2 / 16)
    passes = actor.total - actor.kept + GRAPH_BYTES
    assert at_once(rows, H100)["a GPU of actor, engines"] == actor.kept + max(passes, engines.total)
    assert list(shortages([*rows.values()], H100)) == []
    config.vllm.tensor_parallel_size = config.vllm.pipeline_parallel_size = 1
    keys, gpu = shortages([*plan(config, H100, shape=LLAMA_3_70B).values()], H100)
    assert "an engine's weights take 134,571 MiB of a GPU" in keys
    assert "--vllm.tensor_parallel_size" in keys
    assert "a GPU of actor, engines would hold" in gpu
