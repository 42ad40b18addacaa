from rollgrad.application.config import RLConfig
from rollgrad.application.memory_plan import ModelShape, Phase, memory_plan, peak_bytes

SHAPE = ModelShape(parameters=1000, layers=3, hidden=8, kv_heads=2, head_dim=4)


def small_config() -> RLConfig:
    config = RLConfig()
    config.algo.advantage.estimator = "reinforce"
    config.rollout.batch_size = 4
    config.rollout.n_samples_per_prompt = 2
    config.rollout.max_new_tokens = 6
    config.data.max_prompt_tokens = 10
    config.train.max_tokens_per_micro_batch = 32
    return config


def sizes(config: RLConfig, compute_bytes: int) -> dict[str, int]:
    return {row.name: row.bytes for row in memory_plan(config, SHAPE, compute_bytes=compute_bytes)}


def test_bfloat16_keeps_float32_masters() -> None:
    assert sizes(small_config(), 2) == {
        "policy weights": 2000,
        "policy float32 master weights": 4000,
        "policy Adam moments": 8000,
        "policy gradients": 4000,
        "policy activations": 32 * 8 * 3 * 17 * 2,
        "key/value cache": 8 * 16 * (2 * 3 * 2 * 4) * 2,
    }


def test_float32_weights_are_their_own_masters() -> None:
    assert "policy float32 master weights" not in sizes(small_config(), 4)


def test_critic_and_reference_appear_where_they_are_used() -> None:
    config = small_config()
    config.algo.advantage.estimator = "gae"
    config.algo.kl.init_coef = 0.1
    other = ModelShape(parameters=10, layers=1, hidden=2, kv_heads=1, head_dim=2)
    plan = memory_plan(config, SHAPE, compute_bytes=4, critic=other, reference=other)
    rows = {row.name: row.bytes for row in plan}
    assert rows["critic weights"] == 40
    assert rows["critic Adam moments"] == 80
    assert rows["reference weights"] == 40
    assert not any("reference" in name or "critic" in name for name in sizes(small_config(), 4))


def test_checkpointing_keeps_layer_inputs_and_one_layer() -> None:
    config = small_config()
    config.actor.gradient_checkpointing = True
    assert sizes(config, 2)["policy activations"] == 32 * 8 * (3 + 17) * 2


def test_a_micro_batch_holds_at_least_the_longest_sequence() -> None:
    config = small_config()
    config.train.max_tokens_per_micro_batch = 1
    assert sizes(config, 2)["policy activations"] == 16 * 8 * 3 * 17 * 2


def test_peak_counts_the_larger_of_rollout_and_update() -> None:
    rows = memory_plan(small_config(), SHAPE, compute_bytes=2)
    always = sum(row.bytes for row in rows if row.phase is Phase.ALWAYS)
    assert peak_bytes(rows) == always + 32 * 8 * 3 * 17 * 2


def test_an_asynchronous_run_holds_the_engines_copy_and_both_phases() -> None:
    config = small_config()
    config.train.async_enable = True
    rows = memory_plan(config, SHAPE, compute_bytes=2)
    held = {row.name: row.bytes for row in rows if row.phase is Phase.ALWAYS}
    assert held["engine weights"] == 2000
    assert held["key/value cache"] == 16 * 16 * (2 * 3 * 2 * 4) * 2, "the groups of two updates"
    assert peak_bytes(rows) == sum(held.values()) + 32 * 8 * 3 * 17 * 2
