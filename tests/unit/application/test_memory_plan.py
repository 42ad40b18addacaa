import math
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from rollgrad.application.settings.derived import shares_of_pass, tokens_per_pass, tokens_per_scoring_pass
from rollgrad.application.settings.memory_places import (
    CONTEXT_BYTES,
    GROUP_BYTES,
    Machine,
    RoleMemory,
    gpu_count,
    places,
    shortages,
)
from rollgrad.application.settings.memory_plan import GATHERED_NUMBERS, GRAPH_BYTES, memory_plan
from rollgrad.application.settings.memory_plan_passes import (
    ACTIVATIONS_PER_HIDDEN,
    CENTRED_BYTES,
    DISTILLED_LOGITS,
    DISTILLED_SLICES,
    EXCHANGED,
    FUSED_DISTILLED_LOGITS,
    INPUTS_AT_ONCE,
    WHOLE_ACTIVATIONS_PER_HIDDEN,
    exchanged_bytes,
    head_bytes,
)
from rollgrad.application.settings.memory_plan_tokens import pass_tokens
from rollgrad.application.settings.model_shape import ModelShape, PassMemory, bytes_of_pass
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.ds import BUCKET_NUMBERS, PARAMETERS
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.vllm import CPU_CACHE_BYTES, SyncBackend
from rollgrad.application.settings.way_out import way_out
from rollgrad.domain.algorithms.settings import KLEstimator
from rollgrad.entrypoints.openrlhf.command import translated_config

SHAPE = ModelShape(parameters=1000, layers=3, hidden=8, kv_heads=2, head_dim=4, stored=2)
CPU = Machine(gpu=0, memory=2**40)
GPU = Machine(gpu=1_000_000, memory=2**40)
H100 = Machine(gpu=80 * 10**9, memory=2 * 10**12)
LAYER = 8 * ACTIVATIONS_PER_HIDDEN
"""Numbers that a layer keeps of a token."""
CACHE = 8 * 128 * (2 * 3 * 2 * 4) + 8 * 10 * LAYER
"""Numbers in keys and values of all samples, in blocks of 128 tokens, and in a pass over their prompts."""


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
    told: int = 0,
    **models: ModelShape,
) -> dict[str, RoleMemory]:
    rows = memory_plan(config, shape, compute_bytes=compute_bytes, machine=machine, told=told, **models)
    return {row.role: row for row in rows}


def at_once(rows: dict[str, RoleMemory], machine: Machine = CPU) -> dict[str, int]:
    """Without what each process takes of a GPU for CUDA and NCCL."""
    found = {}
    for place in places(list(rows.values()), machine):
        roles = place.name.removeprefix("a GPU of ").split(", ") if place.name.startswith("a GPU") else []
        groups = sum(rows[role].groups for role in roles)
        found[place.name] = place.held - len(roles) * CONTEXT_BYTES - groups * GROUP_BYTES
    return found


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


def test_changes_of_weights_are_found_by_a_copy_on_the_first_machine() -> None:
    """A CPU's engines keep one, too, of what they repack."""
    config = cluster_config()
    config.rollout.engine = Engine.VLLM
    whole = {machine: plan(config, machine) for machine in (CPU, GPU)}
    config.vllm.sync_delta = True
    for machine, rows in whole.items():
        actor, engines = (plan(config, machine)[role] for role in ("actor", "engines"))
        copy = 2000 / actor.on_a_machine
        assert (actor.weights - rows["actor"].weights, actor.offloaded) == ((copy, 0) if machine is CPU else (0, copy))
        assert engines.weights == rows["engines"].weights * (2 if machine is CPU else 1)


def test_fsdp2_divides_what_is_trained_and_the_reference() -> None:
    config = cluster_config()
    config.cluster.strategy, config.algo.kl.init_coef = Strategy.FSDP2, 0.1
    shape = evolve(SHAPE, embedding=100, tied=True)
    rows = plan(config, GPU, shape=shape, reference=shape)
    layer = math.ceil((SHAPE.parameters - 100) / SHAPE.layers)
    whole = (100 + 2 * layer) * 2
    gradients = (100 + layer) * (2 + 4)
    deepspeed = plan(cluster_config(), GPU, shape=shape)["actor"]
    buckets = SHAPE.parameters * (2 + 4)
    assert parts(rows["actor"]) == (0, 1000, 3000, deepspeed.passes - buckets + whole + gradients)
    assert rows["reference"].weights == 2000 / 4
    config.cluster.offload = True
    assert parts(plan(config, GPU, shape=shape)["actor"]) == (0, 0, 0, rows["actor"].passes)
    assert plan(config, GPU, shape=shape)["actor"].offloaded == 4000


def test_of_experts_a_pass_has_those_that_a_process_holds() -> None:
    """And the tokens that are on their way to them."""
    config = cluster_config()
    config.cluster.strategy, config.algo.kl.init_coef = Strategy.FSDP2, 0.1
    whole = plan(config, shape=evolve(SHAPE, experts=450))
    config.cluster.expert_parallel_size = 3
    rows = plan(config, shape=evolve(SHAPE, experts=450, experts_per_token=2))
    elsewhere = 300 // SHAPE.layers
    sent = 2 * 32 * 2 * SHAPE.hidden * 2  # twice 32 tokens, each to two experts
    assert whole["actor"].passes - rows["actor"].passes == elsewhere * (2 * 2 + 2 + 4) - sent
    assert whole["reference"].passes - rows["reference"].passes == elsewhere * 2 * 2 - sent
    assert parts(rows["actor"])[:3] == parts(whole["actor"])[:3]


def test_other_models_appear_where_they_are_used() -> None:
    config = small_config()
    assert plan(config).keys() == {"actor", "engines"}
    config.algo.advantage.estimator = "gae"
    config.algo.kl.init_coef = 0.1
    other = ModelShape(parameters=10, layers=1, hidden=2, kv_heads=1, head_dim=2)
    rows = plan(config, compute_bytes=4, critic=other, reference=other, reward=other)
    assert parts(rows["critic"]) == (40, 40, 80, 32 * 2 * ACTIVATIONS_PER_HIDDEN * 4)
    assert parts(rows["reference"]) == (40, 0, 0, 32 * 2 * ACTIVATIONS_PER_HIDDEN * 4), "one layer at a time"
    assert parts(rows["reward"]) == (40, 0, 0, 8 * 16 * 2 * ACTIVATIONS_PER_HIDDEN * 4), "whole texts"


def test_a_reward_model_judges_while_engines_sample() -> None:
    config = cluster_config()
    config.reward.num_gpus_per_node = config.critic.num_gpus_per_node = 1
    rows = plan(config, GPU, reward=SHAPE)
    assert (rows["reward"].processes, rows["reward"].device) == (1, "reward")
    assert at_once({"reward": rows["reward"]}, GPU) == {"a GPU of reward": rows["reward"].total}
    config.algo.advantage.estimator, config.train.colocate_critic_reward = "gae", True
    rows = plan(config, GPU, reward=SHAPE)
    critic, reward = rows["critic"], rows["reward"]
    training, judging = critic.total + reward.weights, critic.kept + reward.total
    assert at_once(rows, GPU)["a GPU of critic, reward"] == max(training, judging)
    config.train.async_enable = True
    assert at_once(plan(config, GPU, reward=SHAPE), GPU)["a GPU of critic, reward"] == critic.total + reward.total
    config.train.async_enable, config.train.colocate_all = False, True
    together = plan(config, H100, reward=SHAPE)
    kept = sum(together[role].kept for role in ("actor", "critic", "reward"))
    [held] = at_once(together, GPU).values()
    assert held == kept + together["engines"].total + together["reward"].passes


@pytest.mark.parametrize(
    ("stage", "strategy", "rests"),
    [
        (2, Strategy.DEEPSPEED, 3000),  # masters and moments of a quarter of the model
        (3, Strategy.DEEPSPEED, 3000 + 1000 + 4000),  # its gradients, and the buffer in which they are sent
        (3, Strategy.FSDP2, 2000),  # the masters are the weights
    ],
)
def test_optimizers_leave_their_memory_to_engines(stage: int, strategy: Strategy, rests: int) -> None:
    config = cluster_config(stage)
    config.cluster.strategy, config.algo.advantage.estimator = strategy, "gae"
    config.train.colocate_all, config.vllm.extra = True, {"enforce_eager": True}
    before = plan(config, GPU)
    config.train.optimizer_sleeps = True
    rows = plan(config, GPU)
    assert (rows["actor"].rests, rows["critic"].rests) == (rests, rests)
    actor, critic, engines = rows["actor"], rows["critic"], rows["engines"]
    sampling = actor.kept + critic.kept - 2 * rests + engines.total
    training = actor.kept + critic.kept + max(row.total - row.kept for row in (actor, critic))
    assert sampling > training, "the test is about the engines' turn"
    assert at_once(rows, GPU)["a GPU of actor, critic, engines"] == sampling
    assert at_once(before, GPU)["a GPU of actor, critic, engines"] == sampling + 2 * rests
    assert at_once(rows, GPU)["a machine's memory"] - at_once(before, GPU).get("a machine's memory", 0) == 8 * rests
    config.vllm.gpu_memory_utilization = 1e-6
    small = plan(config, GPU)
    assert at_once(small, GPU)["a GPU of actor, critic, engines"] >= training, "they are awake together"
    assert plan(config)["actor"].rests == 0, "without a GPU there is one memory"


def test_the_processes_of_a_reward_model_divide_it() -> None:
    config = cluster_config(2)
    config.reward.num_gpus_per_node = 4
    whole = plan(config, GPU, reward=SHAPE)["reward"]
    config.ds.zero_stage = 3
    divided = plan(config, GPU, reward=SHAPE)["reward"]
    assert (whole.weights, divided.weights, divided.offloaded) == (2000, 500, 0)
    assert divided.passes == whole.passes + 2000, "what is gathered"
    config.ds.zero_stage, config.reward.offload = 2, True
    resting = plan(config, GPU, reward=SHAPE)["reward"]
    assert (resting.weights, resting.offloaded) == (0, 500)
    config.reward.offload, config.cluster.strategy, config.ds.zero_stage = False, Strategy.FSDP2, 3
    assert plan(config, GPU, reward=SHAPE)["reward"].weights == 500


def test_models_have_gradients_one_after_the_other() -> None:
    config = small_config()
    config.algo.advantage.estimator = "gae"
    rows = plan(config)
    actor, critic, engines = rows["actor"], rows["critic"], rows["engines"]
    assert actor.gradients == critic.gradients == 4000
    assert actor.kept == actor.weights + actor.optimizer
    step = max(actor.total - actor.kept, critic.total - critic.kept, engines.total)
    assert at_once(rows) == {"a machine's memory": actor.kept + critic.kept + step}


@pytest.mark.parametrize(("tied", "numbers"), [(False, 800), (True, 1000)])
def test_models_of_values_have_no_output_embedding(tied: bool, numbers: int) -> None:
    config = small_config()
    config.algo.advantage.estimator = "gae"
    shape = evolve(SHAPE, embedding=200, tied=tied)
    rows = plan(config, shape=shape, reward=shape)
    assert parts(rows["critic"])[:3] == (2 * numbers, 4 * numbers, 12 * numbers)
    assert rows["reward"].weights == 2 * numbers
    assert rows["actor"].weights == 2000


def test_a_reference_that_is_compared_over_the_vocabulary_is_in_the_actors_processes() -> None:
    config = cluster_config()
    config.algo.kl.init_coef, config.algo.kl.use_loss = 0.1, True
    config.algo.kl.estimator = KLEstimator.FULL
    rows = plan(config, GPU)
    for name in ("processes", "on_a_machine", "device"):
        assert getattr(rows["reference"], name) == getattr(rows["actor"], name)
    assert rows["reference"].kept == rows["reference"].weights > 0
    passes = rows["reference"].passes
    config.ds.zero_stage, config.train.max_tokens_per_scoring_pass = PARAMETERS, 1
    row = plan(config, GPU)["reference"]
    assert (row.weights, row.passes) == (rows["reference"].weights, passes), "it is whole, and in the actor's passes"
    config.algo.kl.top_k = 8
    apart, config.algo.kl.estimator = plan(config, GPU)["reference"], KLEstimator.K3
    assert apart.weights == plan(config, GPU)["reference"].weights < row.weights, "it predicts before, and is divided"


def test_a_reference_that_moves_is_an_average_of_the_actors_weights() -> None:
    config, averaged = cluster_config(), cluster_config()
    config.algo.kl.init_coef, config.algo.kl.ref_sync_steps = 0.1, 8
    averaged.train.enable_ema = True
    assert plan(config, GPU) == plan(averaged, GPU)


@pytest.mark.parametrize(("estimator", "tokens"), [(KLEstimator.K1, (32, 32, 56)), (KLEstimator.FULL, (32, 64, 112))])
def test_a_reference_that_is_told_more_reads_more(estimator: KLEstimator, tokens: tuple[int, ...]) -> None:
    """Prompts of 10 tokens and replies of 6, of which the actor has two in a micro-batch, and so a reference beside it;
    else it has passes of its own, one of them of its longest sequence at least."""
    config = small_config()
    config.algo.kl.init_coef, config.algo.kl.estimator = 0.1, estimator
    for more, read in zip((0, 16, 40), tokens, strict=True):
        assert plan(config, told=more)["reference"].passes == read * LAYER * 2
    config.algo.kl.estimator = KLEstimator.K1
    config.cluster.enable, config.actor.num_gpus_per_node, config.ds.sequence_parallel_size = True, 2, 2
    exchanged = exchanged_bytes(config, SHAPE, (64 + 16) // 2, 2)
    assert plan(config, told=64)["reference"].passes == (64 + 16) / 2 * LAYER * 2 + exchanged


def test_checkpointing_keeps_layer_inputs_and_one_layer() -> None:
    config = small_config()
    config.actor.gradient_checkpointing = Checkpointing.FULL
    config.algo.advantage.estimator = "gae"
    rows = plan(config)
    assert rows["actor"].passes == 32 * 8 * (3 + ACTIVATIONS_PER_HIDDEN) * 2
    assert rows["critic"].passes == rows["actor"].passes


@pytest.mark.parametrize(("kind", "kept"), [(Checkpointing.FULL, 1), (Checkpointing.SELECTIVE, 15)])
def test_inputs_of_layers_may_be_in_the_machines_memory(kind: Checkpointing, kept: int) -> None:
    config = small_config()
    config.actor.gradient_checkpointing = kind
    config.algo.advantage.estimator = "gae"
    token, layers = 8 * 2, 3
    stay = plan(config, GPU)["actor"]
    assert stay.passes == 32 * token * (layers * kept + ACTIVATIONS_PER_HIDDEN)
    config.actor.offload_activations = True
    rows = plan(config, GPU)
    for role in ("actor", "critic"):
        assert stay.passes - rows[role].passes == 32 * token * (layers - INPUTS_AT_ONCE)
        assert rows[role].offloaded == layers * 32 * token
    held = plan(config)["actor"]
    assert held.passes - stay.passes == 32 * token * INPUTS_AT_ONCE, "without a GPU they are copied for nothing"
    assert held.offloaded == 0
    config.train.max_tokens_per_micro_batch = 48
    assert plan(config, GPU)["actor"].offloaded == layers * 64 * token, "pinned memory is given in powers of two"


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


def test_passes_before_the_update_are_of_all_samples() -> None:
    """An optimizer step of two samples of 16 tokens holds less than what scores all, or what scores many at a time."""
    config = small_config()
    shape = evolve(SHAPE, layers=1)
    config.train.batch_size = 2
    whole = 32 * LAYER * 2
    assert plan(config, shape=shape)["actor"].passes == whole
    config.train.max_tokens_per_micro_batch = 64
    assert plan(config, shape=shape)["actor"].passes == 2 * whole
    config.train.max_tokens_per_scoring_pass = 16
    assert plan(config, shape=shape)["actor"].passes == whole, "the optimizer step has no more"


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
    assert kept == {0: (4000, 4000, 8000), 1: (4000, 8000, 3000), 2: (4000, 1000, 3000), 3: (1000, 5000, 3000)}
    bucket, gathered = 4000, 4000  # at the last stage there are two buckets, of which one is kept
    activations = 32 * 3 * LAYER * 4
    assert [row.passes - activations for row in held.values()] == [0, bucket, bucket, bucket + gathered]
    assert {row.processes for row in held.values()} == {4}


def test_bfloat16_is_divided_at_least_at_stage_two() -> None:
    rows = [plan(cluster_config(stage))["actor"] for stage in range(4)]
    assert rows[0] == rows[1] == rows[2]
    assert parts(rows[2]) == (2000, 1000, 3000, 2000 + 4000 + 32 * 3 * LAYER * 2)
    assert parts(rows[3]) == (500, 1000 + 4000, 3000, 4000 + 2000 + 32 * 3 * LAYER * 2)
    assert [row.kept for row in rows[2:]] == [2000 + 3000, 500 + 5000 + 3000]


def test_large_models_are_gathered_in_part() -> None:
    large = evolve(SHAPE, parameters=4 * GATHERED_NUMBERS)
    row = plan(cluster_config(3), shape=large)["actor"]
    assert row.weights == 2 * GATHERED_NUMBERS
    assert row.passes == 2 * (GATHERED_NUMBERS + 32 * 3 * LAYER) + 4 * BUCKET_NUMBERS


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
    assert parts(rows["actor"])[:3] == (550, 100 + 400, 300)
    assert rows["engines"].weights == 2000
    assert rows["reference"].weights == 500, "divided like the actor's"


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


@pytest.mark.parametrize(
    ("strategy", "processes", "each"), [(None, 1, 12), (Strategy.DEEPSPEED, 2, 6), (Strategy.FSDP2, 2, 6)]
)
def test_a_state_that_is_written_in_the_background_is_copied(
    strategy: Strategy | None, processes: int, each: int
) -> None:
    """12 bytes a parameter, 16 with the moving average."""
    config = small_config() if strategy is None else cluster_config(2, 2)
    if strategy is not None:
        config.cluster.strategy = strategy
    for machine, held in ((CPU, "optimizer"), (GPU, "offloaded")):
        for averages in (False, True):
            config.train.enable_ema = averages
            config.ckpt.async_save = False
            before = plan(config, machine)["actor"]
            assert before.processes == processes
            config.ckpt.async_save = True
            after = plan(config, machine)["actor"]
            copy = 1000 * (each + (4 // processes if averages else 0))
            assert after == evolve(before, **{held: getattr(before, held) + copy})


def test_processes_that_share_a_sequence_divide_its_tokens() -> None:
    config = cluster_config(0)
    config.train.max_tokens_per_micro_batch = 1
    config.ds.sequence_parallel_size = 2
    exchanged = exchanged_bytes(config, SHAPE, 8, 4, trained=True)
    assert plan(config, compute_bytes=4)["actor"].passes == 8 * 3 * LAYER * 4 + exchanged


@pytest.mark.parametrize(
    ("checkpointing", "attending", "layers"),
    [(Checkpointing.OFF, None, 3), (Checkpointing.OFF, 2, 2), (Checkpointing.FULL, None, 1)],
)
def test_teams_that_share_a_sequence_have_keys_of_all_its_tokens(
    checkpointing: Checkpointing, attending: int | None, layers: int
) -> None:
    config = cluster_config(0)
    config.actor.gradient_checkpointing = checkpointing
    config.ds.sequence_parallel_size = 4
    shape = evolve(SHAPE, kv_heads=2, heads=8, attending=attending)
    own, queries = 5 * (2 * 2 * 4) * 4, 5 * (8 * 4) * 4
    exchanged = EXCHANGED * (queries + 2 * own)
    assert exchanged_bytes(config, shape, 5, 4) == exchanged
    assert exchanged_bytes(config, shape, 5, 4, trained=True) == exchanged + (layers - 1) * 1.5 * own


def test_one_team_exchanges_its_own_queries_keys_and_values() -> None:
    config = cluster_config(0)
    config.ds.sequence_parallel_size = 2
    shape = evolve(SHAPE, kv_heads=2, heads=8)
    assert exchanged_bytes(config, shape, 5, 4, trained=True) == EXCHANGED * 5 * (8 + 2 * 2) * 4 * 4
    # Where no heads are divided, queries stay where they are.
    assert exchanged_bytes(config, evolve(shape, kv_heads=1), 5, 4) == EXCHANGED * 2 * 5 * 2 * 4 * 4
    # Of states, what they are computed from.
    assert exchanged_bytes(config, evolve(shape, columns=100), 5, 4) == EXCHANGED * 5 * 100 * 4
    config.ds.sequence_parallel_size = 1
    assert exchanged_bytes(config, shape, 5, 4, trained=True) == 0


@pytest.mark.parametrize(("tied", "share"), [(False, 200 + 400), (True, 500)])
def test_processes_that_share_layers_have_the_same_tokens(tied: bool, share: int) -> None:
    config = cluster_config(2)
    config.algo.advantage.estimator, config.algo.kl.init_coef = "gae", 0.1
    config.ds.tensor_parallel_size = 2
    config.train.max_tokens_per_micro_batch *= 2
    rows = plan(config, shape=evolve(SHAPE, embedding=200, tied=tied))
    passes = 64 * 3 * 4 * (2 * WHOLE_ACTIVATIONS_PER_HIDDEN + 25) * 2
    head = 3 * 35 * 25 * 4 // 2 + 100 * (4 + 2 + 2)  # logits of the replies, and the gradient of half of it
    assert parts(rows["actor"]) == (2 * share, 4 * share // 2, 12 * share // 2, passes + head + (2 + 4) * share)
    layers = 400 if tied else 300
    assert rows["critic"].weights == 2 * (200 + layers), "without the vocabulary's head the embedding is whole"
    assert parts(rows["reference"]) == (2 * share, 0, 0, passes // 3)
    assert rows["engines"].weights == 2000


def test_a_group_that_shares_layers_has_the_budget_of_a_process_that_has_them_whole() -> None:
    config = cluster_config(2, processes=4)
    config.train.max_tokens_per_micro_batch, config.train.max_tokens_per_scoring_pass = 40, 60
    config.ds.tensor_parallel_size = 2
    assert (tokens_per_pass(config), tokens_per_scoring_pass(config), shares_of_pass(config)) == (80, 120, 2)
    assert pass_tokens(config, SHAPE, 2).distinct == 40


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
    buffer = 4000
    assert parts(rows["actor"])[:3] == (500, buffer, 0)
    assert rows["actor"].offloaded == 4000
    share, layer = 500, 667
    assert at_once(rows, GPU)["a machine's memory"] == 4 * (4000 + share + layer), "and what loading takes"
    config.ds.param_offload = True
    row = plan(config, GPU)["actor"]
    assert (row.kept, row.offloaded) == (buffer, 4500)
    assert plan(config)["actor"].offloaded == 0, "without a GPU all of it is there anyway"


def test_loading_takes_a_share_and_a_layer_of_what_is_divided_and_all_of_what_is_converted() -> None:
    config = cluster_config(2)
    config.algo.kl.init_coef = 0.1

    def loading(shape: ModelShape = SHAPE, machine: Machine = GPU) -> list[int]:
        rows = plan(config, machine, shape=shape, reward=shape)
        return [rows[role].loading for role in ("actor", "reference", "reward", "engines")]

    assert loading() == [0, 0, 0, 0], "pages of the files alone"
    assert loading(evolve(SHAPE, stored=4)) == [2000, 2000, 2000, 0]
    assert loading(evolve(SHAPE, stored=4), CPU) == [0, 0, 0, 0], "there the weights are counted"
    rows = plan(config, GPU, shape=evolve(SHAPE, stored=4))
    assert at_once(rows, GPU)["a machine's memory"] == 4 * 2000, "one model after the other"
    config.ref.offload = True
    assert loading() == [0, 500 + 667, 0, 0]
    config.ds.zero_stage = PARAMETERS
    assert loading(evolve(SHAPE, stored=4)) == [500 + 667, 500 + 667, 500 + 667, 0]
    assert loading(evolve(SHAPE, embedding=400))[0] == 500 + 800, "the largest part is the embedding"
    config.cluster.strategy = Strategy.FSDP2
    assert loading()[0] == 500 + 667
    config.rollout.engine = Engine.EMBEDDED
    assert loading(evolve(SHAPE, stored=4))[3] == 2000
    assert loading(evolve(SHAPE, quantised=900, adapters=10, stored=4))[0] == 0, "matrix by matrix"


@pytest.mark.parametrize("strategy", Strategy)
def test_a_reference_rests_in_the_memory_of_the_cpu(strategy: Strategy) -> None:
    config = cluster_config()
    config.cluster.strategy, config.algo.kl.init_coef, config.ref.offload = strategy, 0.1, True
    row = plan(config, GPU)["reference"]
    assert (row.weights, row.offloaded) == (0, 2000 / 4)
    assert plan(config)["reference"].weights == 2000 / 4, "divided at any stage of ZeRO"


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


def test_what_is_measured_takes_the_place_of_the_formula() -> None:
    saved, trained, scored = ((16, 10), (48, 10)), ((16, 500), (64, 980)), ((16, 100), (112, 292))
    measured = PassMemory(saved=saved, trained=trained, scored=scored)
    config = small_config()
    config.algo.advantage.estimator, config.algo.kl.init_coef = "gae", 0.1
    rows = plan(config, shape=evolve(SHAPE, passes=measured), reward=evolve(SHAPE, passes=measured))
    again = 32 * 2 * 2 * 4 * 2  # keys and values of a layer, of tokens that two samples have each
    assert rows["actor"].passes == rows["critic"].passes == 500 + 16 * 10 + again * (3 + 1)
    assert rows["reference"].passes == 100 + 16 * 2 + again
    config.train.max_tokens_per_scoring_pass = 64
    scoring = 100 + 48 * 2 + again * 2
    assert plan(config, shape=evolve(SHAPE, passes=measured))["reference"].passes == scoring
    alone = evolve(config, rollout=evolve(config.rollout, n_samples_per_prompt=1))
    row = plan(alone, shape=evolve(SHAPE, passes=measured))["reference"]
    assert row.passes == 64 * 8 * 2, "what the last layer returns"
    assert rows["reward"].passes == 292 + 16 * 2
    assert rows["engines"].passes == 8 * 128 * 48 * 2 + 100 + (80 - 16) * 2
    kept = evolve(measured, saved=((16, 700), (48, 796)))
    assert plan(config, shape=evolve(SHAPE, passes=kept))["actor"].passes == 700 + 16 * 3 + again * 4, (
        "before the backward pass"
    )
    padded = evolve(measured, padded=True)
    assert plan(config, shape=evolve(SHAPE, passes=padded))["engines"].passes == 292 + 16 * 2, "no keys are kept"


@pytest.mark.parametrize(("tokens", "held"), [(1, 70), (10, 70), (15, 75), (20, 80), (25, 130), (40, 280)])
def test_between_measured_passes_memory_grows_by_the_token(tokens: int, held: int) -> None:
    assert bytes_of_pass(((10, 70), (20, 80), (30, 180)), tokens) == held


def test_masks_of_prescribed_replies_are_a_bit_a_token_of_the_vocabulary() -> None:
    """Only agents that are clients prescribe the form of replies."""
    config = small_config()
    config.agent.command = "python play.py"
    shape = evolve(SHAPE, embedding=8 * 152_000)
    logits = 4 * 152_000 * 32  # all tokens of a pass, in one slice
    expected = {0: 5.5 * logits + 2 * logits / 32, 10**6: 5.5 * logits + logits / 32}
    found = {gpu: head_bytes(config, shape, 32, 2, gpu) for gpu in expected}
    assert found == expected
    config.agent.command = None
    assert head_bytes(config, shape, 32, 2, 0) < 3 * logits, "prompts are not all replies"


def test_likely_tokens_are_held_in_updates_alone() -> None:
    config = small_config()
    without = [head_bytes(config, SHAPE, 32, 2, 0, gradients=gradients) for gradients in (False, True)]
    config.algo.score_centering_top_k = 128
    scoring, update = (head_bytes(config, SHAPE, 32, 2, 0, gradients=gradients) for gradients in (False, True))
    assert (scoring, update) == (without[0], without[1] + 18 * 128 * CENTRED_BYTES), "of the replies"


@pytest.mark.parametrize("size", [1, 4])
def test_processes_that_share_layers_compare_whole_distributions_each(size: int) -> None:
    config = small_config()
    config.algo.kl.estimator, config.ds.tensor_parallel_size = KLEstimator.FULL, size
    shape = evolve(SHAPE, embedding=8 * 100)
    logits = 4 * 100 * 18  # of two replies of 6 tokens to a prompt of 10
    held = {gpu: head_bytes(config, shape, 32, 2, gpu) for gpu in (0, 10**6)}
    assert held == {0: DISTILLED_LOGITS * logits, 10**6: FUSED_DISTILLED_LOGITS * logits}
    config.actor.deterministic = True
    assert head_bytes(config, shape, 32, 2, 10**6) == held[0]
    many = head_bytes(config, shape, 10**6, 2, 0)
    assert many == DISTILLED_LOGITS * 64 * 2**20 // DISTILLED_SLICES, "slices are smaller, for they are held more often"
