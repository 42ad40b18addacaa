"""The memory plan of models that several processes divide."""

import math

import pytest
from attrs import evolve

from rollgrad.application.settings.derived import shares_of_pass, tokens_per_pass, tokens_per_scoring_pass
from rollgrad.application.settings.memory_places import Machine
from rollgrad.application.settings.memory_plan import GATHERED_NUMBERS
from rollgrad.application.settings.memory_plan_passes import (
    DISTILLED_LOGITS,
    DISTILLED_SLICES,
    EXCHANGED,
    FUSED_DISTILLED_LOGITS,
    WHOLE_ACTIVATIONS_PER_HIDDEN,
    exchanged_bytes,
    head_bytes,
)
from rollgrad.application.settings.memory_plan_tokens import pass_tokens
from rollgrad.application.settings.model_shape import ModelShape
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.ds import BUCKET_NUMBERS, PARAMETERS
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.algorithms.settings import KLEstimator
from tests.memory_plans import CPU, GPU, LAYER, SHAPE, at_once, cluster_config, parts, plan, small_config


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
