"""The memory plan of each role: weights, gradients, optimizers, activations."""

import pytest
from attrs import evolve

from rollgrad.application.settings.memory_plan_passes import (
    ACTIVATIONS_PER_HIDDEN,
    CENTRED_BYTES,
    INPUTS_AT_ONCE,
    exchanged_bytes,
    head_bytes,
)
from rollgrad.application.settings.model_shape import ModelShape, PassMemory, bytes_of_pass
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.ds import PARAMETERS
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.algorithms.settings import KLEstimator
from tests.memory_plans import CACHE, CPU, GPU, H100, LAYER, SHAPE, at_once, cluster_config, parts, plan, small_config


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
