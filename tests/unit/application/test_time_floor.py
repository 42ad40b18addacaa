import pytest
from attrs import evolve

from rollgrad.application.settings.memory_places import Machine
from rollgrad.application.settings.memory_plan import memory_plan
from rollgrad.application.settings.model_shape import ModelShape, PassMemory
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.time_floor import least_seconds, step_work

NOTHING = ((1, 0), (2, 0))
PASSES = PassMemory(saved=NOTHING, trained=NOTHING, scored=NOTHING, flops=10.0)
SHAPE = ModelShape(parameters=1000, layers=3, hidden=8, kv_heads=2, head_dim=4, embedding=100, passes=PASSES)
CPU, GPU = Machine(gpu=0, memory=2**40), Machine(gpu=2**30, memory=2**40)
TOKENS, ACTIONS = 4 * (10 + 2 * 6), 4 * 2 * 6
"""Distinct tokens of a rollout, and those that were sampled."""
BODY, HEAD = TOKENS * 10, ACTIONS * 2 * 100


def small_config() -> RLConfig:
    config = RLConfig()
    config.algo.advantage.estimator, config.algo.kl.init_coef = "gae", 0.1
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.rollout.max_new_tokens = 4, 2, 6
    config.data.max_prompt_tokens = 10
    return config


def seconds(config: RLConfig, shape: ModelShape = SHAPE, machine: Machine = CPU) -> dict[str, float]:
    rows = memory_plan(config, shape, compute_bytes=4, machine=machine, reward=shape)
    work = step_work(config, rows, dict.fromkeys((row.role for row in rows), shape), 1.0, machine)
    return {part.role: part.seconds for part in work}


def test_each_role_multiplies_every_token() -> None:
    found = seconds(small_config())
    assert found == {
        "actor": 3 * BODY + 4 * HEAD,
        "critic": (1 + 3) * BODY,
        "reference": BODY + HEAD,
        "reward": 8 * 16 * 10,
        "engines": BODY + HEAD,
    }


def test_what_is_recomputed_and_what_is_frozen() -> None:
    config = small_config()
    config.train.max_epochs = 2
    shape = evolve(SHAPE, passes=evolve(PASSES, recomputed=10.0))
    found = seconds(config, shape)
    assert found["actor"] == 2 * (4 * BODY + 4 * HEAD)
    assert found["critic"] == BODY + 2 * 4 * BODY
    adapters = seconds(config, evolve(shape, adapters=10))
    assert adapters["actor"] == 2 * (3 * BODY + 3 * HEAD)


def test_padded_sequences_have_prompts_of_their_own() -> None:
    padded = evolve(SHAPE, passes=evolve(PASSES, padded=True))
    assert seconds(small_config(), padded)["reference"] == 8 * 16 * 10 + HEAD


def test_a_model_that_could_not_be_measured_has_no_floor() -> None:
    assert seconds(small_config(), evolve(SHAPE, passes=None)) == {}


@pytest.mark.parametrize("colocated", [True, False])
def test_processes_share_the_work_and_devices_work_at_the_same_time(colocated: bool) -> None:
    config = small_config()
    config.cluster.enable, config.actor.num_gpus_per_node = True, 4
    config.rollout.engine, config.vllm.num_engines = Engine.VLLM, 4
    config.train.colocate_all = colocated
    rows = memory_plan(config, SHAPE, compute_bytes=2, machine=GPU)
    work = step_work(config, rows, dict.fromkeys((row.role for row in rows), SHAPE), 1.0, GPU)
    of_actor = (3 * BODY + 4 * HEAD) / 4
    assert work[0].seconds == of_actor
    assert least_seconds(work) == (sum(part.seconds for part in work) if colocated else of_actor)


def test_processes_of_a_machine_without_gpus_share_its_speed() -> None:
    config = small_config()
    config.cluster.enable, config.actor.num_gpus_per_node, config.actor.num_nodes = True, 4, 2
    config.rollout.engine, config.vllm.num_engines = Engine.VLLM, 2
    found = seconds(config)
    assert found["actor"] == (3 * BODY + 4 * HEAD) / 2
