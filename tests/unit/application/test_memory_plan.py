import pytest
from attrs import evolve

from rollgrad.application.settings.memory_plan import (
    GATHERED_NUMBERS,
    Machine,
    ModelShape,
    RoleMemory,
    memory_plan,
    places,
    shortages,
)
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.vllm import CPU_CACHE_BYTES

SHAPE = ModelShape(parameters=1000, layers=3, hidden=8, kv_heads=2, head_dim=4)
CPU = Machine(gpu=0, memory=2**40)
GPU = Machine(gpu=1_000_000, memory=2**40)
LAYER = 8 * 17
"""Numbers that a layer keeps of a token."""
CACHE = 8 * 16 * (2 * 3 * 2 * 4)
"""Numbers in keys and values of all samples."""


def small_config() -> RLConfig:
    config = RLConfig()
    config.algo.advantage.estimator = "reinforce"
    config.rollout.batch_size = 4
    config.rollout.n_samples_per_prompt = 2
    config.rollout.max_new_tokens = 6
    config.data.max_prompt_tokens = 10
    config.train.max_tokens_per_micro_batch = 32
    return config


def cluster_config(stage: int = 2, processes: int = 4) -> RLConfig:
    """Nothing shares a GPU."""
    config = small_config()
    config.cluster.enable = True
    config.actor.num_gpus_per_node, config.ds.zero_stage = processes, stage
    config.rollout.engine, config.vllm.num_engines = Engine.VLLM, 2
    return config


def plan(
    config: RLConfig,
    machine: Machine = CPU,
    *,
    compute_bytes: int = 2,
    shape: ModelShape = SHAPE,
    **models: ModelShape,
) -> dict[str, RoleMemory]:
    rows = memory_plan(config, shape, compute_bytes=compute_bytes, machine=machine, **models)
    return {row.role: row for row in rows}


def at_once(rows: dict[str, RoleMemory], machine: Machine = CPU) -> dict[str, int]:
    return {place.name: place.held for place in places(list(rows.values()), machine)}


def parts(row: RoleMemory) -> tuple[int, int, int, int]:
    return row.weights, row.gradients, row.optimizer, row.passes


def test_bfloat16_keeps_float32_masters() -> None:
    rows = plan(small_config())
    assert parts(rows["actor"]) == (2000, 4000, 12_000, 32 * 3 * LAYER * 2)
    assert parts(rows["engines"]) == (0, 0, 0, CACHE * 2), "the embedded engine reads the actor's weights"


def test_float32_weights_are_their_own_masters() -> None:
    assert plan(small_config(), compute_bytes=4)["actor"].optimizer == 8000


def test_a_moving_average_is_float32_in_the_machines_memory() -> None:
    config = small_config()
    config.train.enable_ema = True
    assert plan(config)["actor"].optimizer == 12_000 + 4000
    on_a_gpu = plan(config, GPU)["actor"]
    assert (on_a_gpu.optimizer, on_a_gpu.offloaded) == (12_000, 4000)
    divided = cluster_config()
    divided.train.enable_ema = True
    for machine in (CPU, GPU):
        row = plan(divided, machine)["actor"]
        assert (row.optimizer, row.offloaded) == ((3000, 1000) if machine is GPU else (4000, 0))


def test_other_models_appear_where_they_are_used() -> None:
    config = small_config()
    assert plan(config).keys() == {"actor", "engines"}
    config.algo.advantage.estimator = "gae"
    config.algo.kl.init_coef = 0.1
    other = ModelShape(parameters=10, layers=1, hidden=2, kv_heads=1, head_dim=2)
    rows = plan(config, compute_bytes=4, critic=other, reference=other, reward=other)
    assert parts(rows["critic"]) == (40, 40, 80, 32 * 2 * 17 * 4)
    assert parts(rows["reference"]) == (40, 0, 0, 32 * 2 * 17 * 4), "one layer at a time"
    assert parts(rows["reward"]) == (40, 0, 0, 8 * 16 * 2 * 17 * 4), "whole texts"


def test_a_reward_model_judges_while_engines_sample() -> None:
    config = cluster_config()
    config.reward.num_gpus_per_node = config.critic.num_gpus_per_node = 1
    rows = plan(config, GPU, reward=SHAPE)
    assert (rows["reward"].processes, rows["reward"].device) == (1, "reward")
    assert at_once({"reward": rows["reward"]}, GPU) == {"a GPU of reward": rows["reward"].total}
    config.algo.advantage.estimator, config.train.colocate_critic_reward = "gae", True
    rows = plan(config, GPU, reward=SHAPE)
    held = at_once(rows, GPU)
    assert held["a GPU of critic, reward"] == rows["critic"].total + rows["reward"].total
    config.train.colocate_all = True
    together = plan(config, evolve(GPU, gpu=10_000), reward=SHAPE)
    others = {role: row for role, row in together.items() if role != "reward"}
    assert sum(at_once(together, GPU).values()) == sum(at_once(others, GPU).values()) + together["reward"].total


def test_checkpointing_keeps_the_actors_layer_inputs_and_one_layer() -> None:
    config = small_config()
    config.actor.gradient_checkpointing = True
    config.algo.advantage.estimator = "gae"
    rows = plan(config)
    assert rows["actor"].passes == 32 * 8 * (3 + 17) * 2
    assert rows["critic"].passes == 32 * 3 * LAYER * 2


def test_a_micro_batch_holds_at_least_the_longest_sequence() -> None:
    config = small_config()
    config.train.max_tokens_per_micro_batch = 1
    assert plan(config)["actor"].passes == 16 * 3 * LAYER * 2


def test_update_and_rollout_take_turns() -> None:
    rows = plan(small_config())
    actor, engines = rows["actor"], rows["engines"]
    assert at_once(rows) == {"a machine's memory": actor.kept + max(actor.passes, engines.passes)}


def test_an_asynchronous_run_holds_the_engines_copy_and_both_phases() -> None:
    config = small_config()
    config.train.async_enable = True
    rows = plan(config)
    assert parts(rows["engines"]) == (2000, 0, 0, 2 * CACHE * 2), "the groups of two updates"
    assert at_once(rows) == {"a machine's memory": rows["actor"].total + rows["engines"].total}


def test_zero_divides_optimizer_then_gradients_then_weights() -> None:
    held = {stage: plan(cluster_config(stage), compute_bytes=4)["actor"] for stage in range(4)}
    kept = {stage: (row.weights, row.gradients, row.optimizer) for stage, row in held.items()}
    assert kept == {0: (4000, 4000, 8000), 1: (4000, 8000, 3000), 2: (4000, 1000, 3000), 3: (1000, 1000, 3000)}
    bucket, gathered = 4000, 4000
    activations = 32 * 3 * LAYER * 4
    assert [row.passes - activations for row in held.values()] == [0, bucket, bucket, bucket + gathered]
    assert {row.processes for row in held.values()} == {4}


def test_bfloat16_is_divided_at_least_at_stage_two() -> None:
    rows = [plan(cluster_config(stage))["actor"] for stage in range(4)]
    assert rows[0] == rows[1] == rows[2]
    assert parts(rows[2]) == (2000, 1000, 3000, 2000 + 32 * 3 * LAYER * 2)
    assert parts(rows[3]) == (500, 1000, 3000, 4000 + 32 * 3 * LAYER * 2)


def test_large_models_are_gathered_in_part() -> None:
    large = evolve(SHAPE, parameters=4 * GATHERED_NUMBERS)
    row = plan(cluster_config(3), shape=large)["actor"]
    assert row.weights == 2 * GATHERED_NUMBERS
    assert row.passes == 2 * (GATHERED_NUMBERS + GATHERED_NUMBERS // 2 + 32 * 3 * LAYER)


def test_adapters_alone_are_trained_and_no_engine_or_reference_has_them() -> None:
    shape = evolve(SHAPE, adapters=100)
    config = small_config()
    config.algo.kl.init_coef = 0.1
    rows = plan(config, shape=shape)
    assert parts(rows["actor"])[:3] == (2200, 400, 1200)
    assert "reference" not in rows, "it is the actor without its adapters"
    assert plan(config, shape=shape, reference=SHAPE)["reference"].weights == 2000
    config = cluster_config(3)
    config.algo.kl.init_coef = 0.1
    rows = plan(config, shape=shape)
    assert parts(rows["actor"])[:3] == (550, 100, 300)
    assert rows["reference"].weights == rows["engines"].weights == 2000


def test_of_quantised_weights_a_pass_has_less_than_a_layer_in_full() -> None:
    shape = evolve(SHAPE, adapters=100, quantised=801)
    config = small_config()
    whole, row = plan(config, shape=evolve(shape, quantised=0))["actor"], plan(config, shape=shape)["actor"]
    kept = 414  # bytes of 801 numbers of 4.127 bits
    assert parts(row)[:3] == (299 * 2 + kept, 400, 1200)
    assert row.passes - whole.passes == 801 / SHAPE.layers * 2
    config = cluster_config()
    config.algo.kl.init_coef = 0.1
    config.algo.advantage.estimator = "gae"
    rows = plan(config, shape=shape)
    assert rows["actor"].weights == 299 * 2 + kept
    assert rows["reference"].weights == 199 * 2 + kept
    assert plan(config, shape=shape, reference=SHAPE)["reference"].weights == 2000
    assert rows["critic"].weights == rows["engines"].weights == 2000


def test_processes_that_share_a_sequence_divide_its_tokens() -> None:
    config = cluster_config(0)
    config.train.max_tokens_per_micro_batch = 1
    config.ds.sequence_parallel_size = 2
    assert plan(config, compute_bytes=4)["actor"].passes == 8 * 3 * LAYER * 4


@pytest.mark.parametrize(("tied", "share"), [(False, 200 + 400), (True, 500)])
def test_processes_that_share_layers_have_the_same_tokens(tied: bool, share: int) -> None:
    config = cluster_config(2)
    config.algo.advantage.estimator, config.algo.kl.init_coef = "gae", 0.1
    config.ds.tensor_parallel_size = 2
    rows = plan(config, shape=evolve(SHAPE, embedding=200, tied=tied))
    passes = 64 * 3 * 8 * (5 + 12 // 2) * 2
    assert parts(rows["actor"]) == (2 * share, 4 * share // 2, 12 * share // 2, passes + 2 * share)
    assert rows["critic"].weights == 2 * (200 + 400), "without the vocabulary's head the embedding is whole"
    assert parts(rows["reference"]) == (2 * share, 0, 0, passes // 3)
    assert rows["engines"].weights == 2000


def test_a_critic_of_fewer_processes_has_more_tokens_in_each() -> None:
    config = cluster_config(0, processes=2)
    config.algo.advantage.estimator = "gae"
    config.critic.num_gpus_per_node = 1
    rows = plan(config, compute_bytes=4)
    assert rows["critic"].passes == 2 * rows["actor"].passes
    assert rows["critic"].processes == 1


def test_offloading_moves_bytes_to_the_machine() -> None:
    config = cluster_config(3)
    config.ds.adam_offload = True
    rows = plan(config, GPU)
    assert parts(rows["actor"])[:3] == (500, 0, 0)
    assert rows["actor"].offloaded == 4000
    assert at_once(rows, GPU)["a machine's memory"] == 4 * 4000
    config.ds.param_offload = True
    row = plan(config, GPU)["actor"]
    assert (row.kept, row.offloaded) == (0, 4500)
    assert plan(config)["actor"].offloaded == 0, "without a GPU all of it is there anyway"


def test_vllm_takes_its_share_of_a_gpu() -> None:
    config = cluster_config()
    config.vllm.gpu_memory_utilization = 0.5
    config.vllm.tensor_parallel_size, config.vllm.pipeline_parallel_size = 2, 4
    row = plan(config, GPU)["engines"]
    assert (row.processes, row.weights, row.total) == (16, 250, 500_000)
    assert plan(config)["engines"].passes == CPU_CACHE_BYTES


def test_who_shares_a_gpu_is_added_up() -> None:
    config = cluster_config()
    config.algo.kl.init_coef = 0.1
    rows = plan(config, GPU)
    actor, reference, engines = (rows[role] for role in ("actor", "reference", "engines"))
    apart = {"a GPU of actor": actor.total, "a GPU of reference": reference.total, "a GPU of engines": engines.total}
    assert at_once(rows, GPU) == apart
    config.train.colocate_actor_ref = True
    together = {
        "a GPU of actor, reference": actor.kept + reference.kept + max(actor.passes, reference.passes),
        "a GPU of engines": engines.total,
    }
    assert at_once(plan(config, GPU), GPU) == together
    config.train.colocate_all = True
    kept = actor.kept + reference.kept
    all_on_one = {"a GPU of actor, reference, engines": kept + max(actor.passes, engines.total)}
    assert at_once(plan(config, GPU), GPU) == all_on_one


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
    assert "a GPU of actor, engines would hold 10,915 MiB at once, and has 8,192." in sentences[0]
    assert "--vllm.gpu_memory_utilization" in sentences[0]
