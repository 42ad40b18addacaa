"""Settings of verl's reinforcement learning mean the same here, or what differs is told."""

from typing import Any

import pytest

from rollgrad.entrypoints.verl.command import translate_command
from tests.translated_settings import holds
from tests.verl_overrides import ACTOR, GROUP, LEAST, ROLLOUT, TAUGHT, TEACHING, notes, settings, translated


def test_the_defaults_of_verl_count() -> None:
    expected = {
        "algo.advantage.estimator": "gae",
        "algo.kl.init_coef": 0.0,
        "actor.lr_scheduler": "constant",
        "critic.adam.lr": 1e-5,
        "rollout.batch_size": 1024,
        "rollout.max_new_tokens": 512,
        "data.max_prompt_tokens": 512,
        "data.input_key": "prompt",
        "train.batch_size": 256,
        "train.num_episodes": 30,
        "ckpt.output_dir": "checkpoints/verl_examples/gsm8k",
        "vllm.tensor_parallel_size": 2,
        "vllm.gpu_memory_utilization": 0.5,
    }
    assert holds(settings(), expected)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=mse"), (0.001, True, "k2")),
        ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=k3+"), (0.001, True, "k2")),
        ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=kl"), (0.001, True, "k2")),
        ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0"), (0.0, False, "k1")),
        (("algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=low_var_kl"), (0.001, False, "k3")),
        (("algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=abs"), (0.001, False, "abs")),
        ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=abs"), (0.001, True, "abs")),
        ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=abs+"), (0.001, True, "k2")),
        (("algorithm.use_kl_in_reward=True", f"{ACTOR}.use_kl_loss=True"), (0.001, True, "k3")),
        (("algorithm.kl_ctrl.kl_coef=0.5",), (0.0, False, "k1")),
    ],
)
def test_settings_of_the_kl_term_translate(overrides: tuple[str, ...], expected: tuple[float, bool, str]) -> None:
    found = settings(*GROUP, *overrides)
    assert (found["algo.kl.init_coef"], found["algo.kl.use_loss"], found["algo.kl.estimator"]) == expected


def test_an_adaptive_kl_controller_translates() -> None:
    adaptive = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2")
    assert holds(settings(*adaptive), {"algo.kl.target": 0.2, "algo.kl.horizon": 10000.0})
    assert settings(adaptive[0], adaptive[2])["algo.kl.target"] is None


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("grpo", "group_norm"),
        ("rloo", "rloo"),
        ("reinforce_plus_plus", "reinforce"),
        ("reinforce_plus_plus_baseline", "reinforce_baseline"),
        ("remax", "remax"),
        ("opo", "opo"),
        ("optimal_token_baseline", "optimal_token_baseline"),
        ("tir_optimal_token_baseline", "optimal_token_baseline"),
        ("gpg", "gpg"),
        ("grpo_passk", "pass_at_k"),
    ],
)
def test_names_of_estimators_translate(given: str, ours: str) -> None:
    found = settings(f"algorithm.adv_estimator={given}", f"{ROLLOUT}.n=4")
    assert found["algo.advantage.estimator"] == ours


def test_kl_in_the_reward_enters_rloos_outcome_and_is_told_beside_others() -> None:
    """verl adds the penalties to the reward before it compares the samples of a group."""
    told = "penalties are taken off after a reward has been compared"
    for given, ours, tells in (
        ("rloo", "rloo_sequence", False),
        ("rloo_vectorized", "rloo_sequence", False),
        ("grpo", "group_norm", True),
        ("reinforce_plus_plus_baseline", "reinforce_baseline", True),
        ("reinforce_plus_plus", "reinforce", False),
        ("optimal_token_baseline", "optimal_token_baseline", False),
    ):
        command = f"algorithm.adv_estimator={given}", f"{ROLLOUT}.n=4", "algorithm.use_kl_in_reward=True"
        assert settings(*command)["algo.advantage.estimator"] == ours
        assert (told in notes(*command)) is tells
        assert told not in notes(*command, f"{ACTOR}.use_kl_loss=True")
        assert told not in notes(*command, "algorithm.kl_ctrl.kl_coef=0")


@pytest.mark.parametrize("estimator", ["gpg", "gdpo", "grpo_passk", "optimal_token_baseline"])
def test_estimators_that_differ_from_verls_are_told(estimator: str) -> None:
    assert f"algorithm.adv_estimator={estimator}: " in notes(f"algorithm.adv_estimator={estimator}", f"{ROLLOUT}.n=4")


def test_grpo_without_the_deviation_is_dr_grpo() -> None:
    found = settings(
        *GROUP,
        "algorithm.norm_adv_by_std_in_grpo=False",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    )
    assert holds(found, {"algo.advantage.estimator": "dr_grpo", "actor.loss_aggregation": "constant_length"})


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("gspo",),
            {
                "actor.policy_loss_type": "gspo_token",
                "actor.loss_aggregation": "token_mean",
                "actor.dual_clip": None,
                "actor.eps_clip_low_high": (0.2, 0.2),
            },
        ),
        (("gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"), {"actor.loss_aggregation": "sequence_mean"}),
        (("geo_mean",), {"actor.policy_loss_type": "gmpo"}),
        (("sapo", f"{ACTOR}.tau_neg=1.1"), {"actor.sapo_tau": (1.0, 1.1), "actor.eps_clip_low_high": None}),
        (("clip_cov", f"{ACTOR}.policy_loss.clip_cov_ratio=0.01"), {"actor.cov_share": 0.01}),
        (("bypass_mode",), {"actor.policy_loss_type": "ppo", "algo.old_logprobs": "rollout"}),
        (("kl_cov",), {"actor.cov_share": 0.0002, "actor.cov_kl_coef": 0.1}),
        (("vanilla", f"{ACTOR}.clip_ratio=0.3"), {"actor.eps_clip_low_high": (0.2, 0.2)}),
        (
            ("vanilla", f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_low=null", f"{ACTOR}.clip_ratio_high=0.4"),
            {"actor.eps_clip_low_high": (0.3, 0.4)},
        ),
        (
            ("cispo", f"{ACTOR}.clip_ratio_low=10", f"{ACTOR}.clip_ratio_high=0.2"),
            {"actor.eps_clip_low_high": (1.0, 0.2)},
        ),
        (("vanilla", f"{ACTOR}.clip_ratio_c=null"), {"actor.dual_clip": None}),
        (("vanilla", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"), {"actor.loss_aggregation": "sequence_mean"}),
        (("vanilla", f"{ACTOR}.loss_agg_mode=token-sum"), {"actor.loss_aggregation": "token_sum"}),
    ],
)
def test_loss_modes_translate(overrides: tuple[str, ...], expected: dict[str, Any]) -> None:
    mode, *others = overrides
    assert holds(settings(*GROUP, f"{ACTOR}.policy_loss.loss_mode={mode}", *others), expected)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("rollout_is=token",), ("token", "truncate", 0.5, 2.0)),
        (("rollout_is=sequence", "rollout_is_threshold=5"), ("sequence", "truncate", 0.5, 5.0)),
        (("rollout_rs=token", "rollout_rs_threshold=0.5_3.0"), ("token", "mask", 0.5, 3.0)),
        (("rollout_rs=seq_sum_k1", "rollout_rs_threshold=0.5_4.0"), ("sequence", "mask", 0.25, 2.0)),
        (("rollout_is=token", "rollout_is_threshold=0.5_5.0"), ("token", "mask", 0.5, 5.0)),
        (("rollout_rs=geometric", "rollout_rs_threshold=1.01"), ("geometric", "mask", 1 / 1.01, 1.01)),
    ],
)
def test_settings_of_corrections_translate(overrides: tuple[str, ...], expected: tuple[str, str, float, float]) -> None:
    found = settings(*(f"algorithm.rollout_correction.{override}" for override in overrides))
    assert tuple(found[f"algo.correction.{key}"] for key in ("level", "mode", "low", "high")) == expected


def test_what_a_mask_keeps_is_told() -> None:
    masks = ("rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.9_1.1")
    of_correction = [f"algorithm.rollout_correction.{override}" for override in (*masks, "bypass_mode=True")]
    assert "kept weighs by its ratio, in verl by 1" in notes(*of_correction[:2])
    assert "kept weighs" not in notes(*of_correction), "the loss's own ratio is there alone"
    pop = ("rollout_is=sequence", "rollout_is_threshold=0.5_2.0")
    assert "in verl by the sequence's" in notes(*(f"algorithm.rollout_correction.{override}" for override in pop))


def test_groups_are_filtered_by_rewards_or_by_scores() -> None:
    filters = ("algorithm.filter_groups.enable=True", *GROUP)
    by_reward = ("algo.dynamic_filtering_spread", "algo.dynamic_filtering_enable")
    for metric, expected in {"": by_reward, "reward": by_reward, "acc": by_reward[::-1]}.items():
        found = settings(*filters, *([f"algorithm.filter_groups.metric={metric}"] if metric else []))
        assert [found[name] for name in expected] == [True, False]


def test_bypass_mode_weighs_by_the_losss_own_ratio() -> None:
    bypass = ("algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.rollout_is=token")
    found = settings(*GROUP, *bypass)
    assert holds(found, {"algo.old_logprobs": "rollout", "algo.correction.level": "auto"})
    assert "rollout_is=token: the loss's own ratio is against the policy that sampled" in notes(*GROUP, *bypass)


def test_means_of_terms_beside_a_loss_over_replies_are_told() -> None:
    told = "KL and entropy in the loss are means over replies, as the gmpo loss is"
    loss = (*GROUP, f"{ACTOR}.policy_loss.loss_mode=geo_mean")
    for term in (f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.use_kl_loss=True"):
        assert told in notes(*loss, term)
        assert told not in notes(*loss, term, f"{ACTOR}.loss_agg_mode=seq-mean-token-mean")
    assert told not in notes(*loss, "algorithm.use_kl_in_reward=True")


def test_the_bound_of_dppos_ratios_is_told() -> None:
    dppo = (*GROUP, f"{ACTOR}.policy_loss.loss_mode=dppo_tv")
    assert "dppo_tv: ratios weigh up to 20, in verl up to clip_ratio_c, which is 3.0" in notes(*dppo)
    assert "ratios weigh" not in notes(*dppo, f"{ACTOR}.clip_ratio_c=20")


def test_warm_up_and_schedule_translate() -> None:
    found = settings(
        f"{ACTOR}.optim.lr_warmup_steps=10",
        "trainer.total_training_steps=100",
        f"{ACTOR}.optim.warmup_style=cosine",
        f"{ACTOR}.optim.min_lr_ratio=0.2",
    )
    expected = {"lr_warmup_ratio": 0.1, "lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.2}
    assert holds(found, {f"actor.{key}": value for key, value in expected.items()} | {"train.max_steps": 100})


def test_adapters_of_megatron_translate() -> None:
    lora = (f"actor_rollout_ref.model.lora.{setting}" for setting in ("rank=8", "target_modules=[linear_qkv]"))
    expected = {"rank": 8, "alpha": 32, "target_modules": ("all-linear",)}
    assert holds(settings(*GROUP, *lora), {f"actor.lora.{key}": value for key, value in expected.items()})


def test_one_gpu_is_one_process() -> None:
    one = ("trainer.n_gpus_per_node=1", f"{ACTOR}.fsdp_config.param_offload=True", f"{ACTOR}.strategy=fsdp2")
    found = settings(*one)
    assert holds(
        found,
        {"cluster.enable": False, "rollout.engine": "vllm", "vllm.tensor_parallel_size": 1, "vllm.num_engines": 1},
    )
    assert "param_offload=True: one process trains" in notes(*one)
    assert settings(*one, f"{ROLLOUT}.name=hf")["rollout.engine"] == "embedded"


def test_what_every_run_does_is_not_told() -> None:
    silent = (
        *("data.shuffle=True", "actor_rollout_ref.model.use_remove_padding=True", "trainer.balance_batch=True"),
        *(f"{ROLLOUT}.free_cache_engine=True", "actor_rollout_ref.hybrid_engine=True", f"{ROLLOUT}.mode=async"),
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        *("trainer.device=cuda", f"{ACTOR}.fsdp_config.fsdp_size=-1", "reward_model.enable=False"),
    )
    assert translated(*silent).notes == translated().notes
    assert "data.shuffle=False" in notes("data.shuffle=False")


def test_the_reward_function_translates() -> None:
    assert settings("custom_reward_function.path=r.py")["reward.function_path"] == "r.py:compute_score"
    newer = ("reward.custom_reward_function.path=r.py", "reward.custom_reward_function.name=f")
    assert settings(*newer)["reward.function_path"] == "r.py:f"
    for section in ("custom_reward_function", "reward.custom_reward_function"):
        assert "as defaults of the function's parameters" in notes(f"+{section}.reward_kwargs.alpha=1")


@pytest.mark.parametrize(
    "kwargs", ["reward_model.reward_kwargs.overlong_buffer_cfg", "custom_reward_function.overlong_buffer"]
)
def test_the_length_penalty_by_its_other_names(kwargs: str) -> None:
    found = settings(f"+{kwargs}.enable=True", f"+{kwargs}.len=64", f"+{kwargs}.penalty_factor=0.5")
    assert holds(found, {"reward.overlong_buffer_len": 64, "reward.overlong_penalty_factor": 0.5})


def test_the_length_penalty_of_another_reward_manager_is_told() -> None:
    penalty = tuple(f"reward_model.overlong_buffer.{word}" for word in ("enable=True", "len=64"))
    told = "counts, in verl with the reward manager dapo alone"
    assert f"{told}, which here is naive" in notes(*penalty)
    assert told in notes(*penalty, "reward.reward_manager.name=prime")
    assert told not in notes(*penalty, "reward_model.reward_manager=dapo")
    recipe = translate_command(["python3", "-m", "recipe.dapo.main_dapo", *LEAST, *penalty])
    assert told not in "\n".join(recipe.notes)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"advantage.estimator": "group_norm", "kl.estimator": "k3", "kl.use_loss": True, "kl.init_coef": 1.0}),
        (("loss_mode=mse", "distillation_loss_coef=0.5"), {"kl.estimator": "k2", "kl.init_coef": 0.5}),
        (
            ("use_task_rewards=False", "use_policy_gradient=True", "loss_mode=k1"),
            {"advantage.estimator": "on_policy_distill", "kl.use_loss": False, "kl.init_coef": 1.0},
        ),
        (
            ("use_task_rewards=False", "loss_mode=mse"),
            {"advantage.estimator": "on_policy_distill", "kl.use_loss": False, "kl.init_coef": 1.0},
        ),
        (
            ("use_task_rewards=False", "loss_mode=forward_kl_topk", "topk=64"),
            {"advantage.estimator": "on_policy_distill", "kl.estimator": "full", "kl.beta": 0.0, "kl.top_k": 64},
        ),
        (
            ("use_policy_gradient=True", "loss_mode=k1"),
            {"advantage.estimator": "group_norm", "kl.estimator": "k2", "kl.use_loss": True},
        ),
    ],
)
def test_settings_of_a_teacher_translate(overrides: tuple[str, ...], expected: dict[str, Any]) -> None:
    """With rewards or alone, by policy gradient or as a loss; it is the reference, of which a run has one."""
    words = (*GROUP, *TAUGHT, *(f"{TEACHING}.{word}" for word in overrides))
    found = settings(*words)
    assert found["ref.model_name_or_path"] == "large"
    assert holds(found, {f"algo.{name}": value for name, value in expected.items()})
    assert "use_kl_loss=True: a run has one reference" in notes(*words, f"{ACTOR}.use_kl_loss=True")


def test_a_teacher_needs_no_reward_and_no_critic() -> None:
    alone = (*TAUGHT, f"{TEACHING}.use_task_rewards=False", "algorithm.adv_estimator=gae", "critic.optim.lr=1e-5")
    assert settings(*alone)["reward.verifier"] is None
    assert settings(*alone, "data.val_files=v")["reward.verifier"] == "math"
    told = notes(*alone, "distillation.nnodes=1", f"{TEACHING}.loss_max_clamp=10.0", f"{TEACHING}.loss_mode=mse")
    assert "algorithm.adv_estimator=gae: the teacher alone teaches" in told
    assert "critic.optim.lr=1e-5: on_policy_distill has no critic" in told
    assert "distillation.nnodes=1: the teacher is a reference in the actor's processes" in told
    assert "clamp" not in told
    assert "gradient of k2" not in told
    assert "loss_mode k3: the advantage is minus the log-ratio, which is the gradient of k2" in notes(*alone)
    assert "all other tokens count as one more" in notes(*TAUGHT, f"{TEACHING}.loss_mode=forward_kl_topk")
    assert "all other tokens" not in notes(*TAUGHT, f"{TEACHING}.loss_mode=forward_kl_topk_tail")
    assert "the loss k2, which has that gradient" in notes(*TAUGHT, f"{TEACHING}.use_policy_gradient=True")
    assert "topk=9: there is no teacher without distillation.enabled" in notes(f"{TEACHING}.topk=9")


def test_what_verl_would_not_read_is_told() -> None:
    assert "name=f: there is no function without custom_reward_function.path" in notes("custom_reward_function.name=f")
    for size in ("tensor_model_parallel_size", "expert_model_parallel_size"):
        assert f"{size}=2: verl reads it with Megatron only" in notes(f"{ACTOR}.megatron.{size}=2")
    assert "model_engine=torchtitan: FSDP2 divides the models" in notes("model_engine=torchtitan")
    assert notes("model_engine=dp") == notes()
