"""Flags of TRL's trainers by reinforcement learning mean the same here, or what differs is told."""

from pathlib import Path
from typing import Any

import attrs
import pytest

from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.cli.translated import problems
from rollgrad.entrypoints.trl.command import translate_command
from tests.translated_settings import holds
from tests.trl_commands import LEAST, settings, translated


def test_flags_of_templates_translate() -> None:
    flags = ("--chat_template_kwargs", '{"enable_thinking": false}', "--chat_template", "{{ messages }}")
    expected = {"data.chat_template_kwargs": {"enable_thinking": False}, "data.chat_template": "{{ messages }}"}
    for command in ("grpo", "rloo", "distillation"):
        assert holds(settings(command, *flags), expected)
    assert settings("sft", "--chat_template", "{{ messages }}")["data.chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("loss", "ours", "aggregation"),
    [
        ("grpo", "ppo", "sequence_mean"),
        ("dapo", "ppo", "token_mean"),
        ("dr_grpo", "ppo", "constant_length"),
        ("luspo", "ppo", "sequence_sum"),
        ("cispo", "cispo", None),
        ("vespo", "vespo", None),
    ],
)
def test_flags_of_groups_and_their_loss_translate(loss: str, ours: str, aggregation: str | None) -> None:
    flags = ("--num_generations", "4", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2")
    found = settings("grpo", *flags, "--loss_type", loss, "--beta", "0.04", "--epsilon_high", "0.3")
    assert holds(
        found,
        {
            "rollout.batch_size": 4,
            "rollout.n_samples_per_prompt": 4,
            "train.batch_size": 16,
            "actor.policy_loss_type": ours,
            "actor.loss_aggregation": aggregation,
            "algo.kl.init_coef": 0.04,
            "algo.kl.estimator": "k3_unbiased",
            "data.prompt_dataset": "d.jsonl",
            "reward.verifier": "math",
        },
    )
    assert settings("grpo", "--scale_rewards", "none")["algo.advantage.estimator"] == "dr_grpo"
    assert settings("grpo", "--scale_rewards", "batch")["algo.advantage.estimator"] == "lite_ppo"
    with pytest.raises(ConfigurationError, match="no whole groups of 3"):
        translated("grpo", "--num_generations", "3")


def test_the_others_of_a_group_are_the_baseline() -> None:
    """Replies weigh by the ratio of the whole, and KL is part of the reward (`test_rloo` of the parity tests)."""
    found = settings("rloo", "--per_device_train_batch_size", "8", "--epsilon_high", "0.3", "--num_generations", "4")
    assert holds(
        found,
        {
            "rollout.batch_size": 2,
            "rollout.n_samples_per_prompt": 4,
            "train.batch_size": 8,
            "algo.advantage.estimator": "rloo_sequence",
            "actor.policy_loss_type": "sequence_ppo",
            "actor.loss_aggregation": "sequence_mean",
            "actor.eps_clip_low_high": (0.2, 0.3),
            "algo.kl.init_coef": 0.05,
            "algo.kl.use_loss": False,
            "algo.kl.estimator": "k1",
            "reward.verifier": "math",
        },
    )
    assert settings("rloo")["rollout.n_samples_per_prompt"] == 2
    assert settings("rloo", "--reward_clip_range", "-1", "2")["reward.clip_range"] == (-1.0, 2.0)
    assert settings("rloo", "--sync_ref_model")["algo.kl.ref_sync_steps"] == 512
    whitened = translated("rloo", "--normalize_advantages")
    assert whitened.run.algo.advantage.whiten == "batch"
    assert any("in TRL over replies" in note for note in whitened.notes)
    masked = translated("rloo", "--mask_truncated_completions")
    assert any("over the others alone, in TRL over all" in note for note in masked.notes)
    still = translated("rloo", "--beta", "0", "--sync_ref_model")
    assert still.run.algo.kl.init_coef == 0
    assert any("--sync_ref_model: there is no KL" in note for note in still.notes)


def test_a_teacher_corrects_one_reply_to_each_prompt() -> None:
    flags = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--max_steps", "9")
    found = settings("distillation", *flags, "--beta", "0.5", "--temperature", "0.7")
    assert holds(
        found,
        {
            "ref.model_name_or_path": "t",
            "rollout.batch_size": 8,
            "rollout.n_samples_per_prompt": 1,
            "train.batch_size": 8,
            "train.max_steps": 9,
            "rollout.temperature": 0.7,
            "algo.advantage.estimator": "on_policy_distill",
            "algo.kl.init_coef": 1.0,
            "algo.kl.use_loss": True,
            "algo.kl.estimator": "full",
            "algo.kl.beta": 0.5,
            "actor.loss_aggregation": "token_mean",
        },
    )
    assert settings("distillation")["algo.kl.beta"] == 1
    without = translate_command(["distillation", *LEAST])
    assert any("--ref.model_name_or_path" in str(problem) for problem in problems(without))
    evaluated = translated("distillation", "--eval_strategy", "steps")
    assert evaluated.run.eval.dataset is None
    assert any("--eval_strategy steps: held-out replies are judged by a reward" in note for note in evaluated.notes)


def test_losses_with_numbers_for_either_sign() -> None:
    assert holds(settings("grpo", "--loss_type", "sapo"), {"actor.sapo_tau": (1.0, 1.05)})
    found = settings("grpo", "--loss_type", "vespo", "--vespo_k_neg", "4", "--vespo_lambda_pos", "1.5")
    assert holds(
        found, {"actor.vespo_k": (2.0, 4.0), "actor.vespo_lambda": (1.5, 2.0), "algo.old_logprobs": "recompute"}
    )
    sampled = translated("grpo", "--loss_type", "vespo", "--use_vllm")
    assert sampled.run.algo.old_logprobs == "rollout"
    assert any("token by token" in note for note in sampled.notes)
    idle = translated("grpo", "--sapo_temperature_pos", "2")
    assert idle.run.actor.sapo_tau == (1.0, 1.05)
    assert any("--sapo_temperature_pos" in note for note in idle.notes)


@pytest.mark.parametrize(
    ("flags", "clips", "noted"),
    [(("--epsilon_high", "5"), (1.0, 4.0), 0), (("--epsilon_high", "0.5"), (1.0, 0.0), 1), ((), (1.0, 0.0), 1)],
)
def test_cispo_bounds_the_ratio_itself(flags: tuple[str, ...], clips: tuple[float, float], noted: int) -> None:
    """TRL clamps the ratio to epsilon_high, where ours is 1 more than the upper range."""
    result = translated("grpo", "--loss_type", "cispo", *flags)
    assert result.run.actor.eps_clip_low_high == clips
    assert sum("--epsilon_high" in note for note in result.notes) == noted


@pytest.mark.parametrize(
    ("flags", "bound", "told"),
    [
        (("--delta", "4"), 4.0, ""),
        (("--delta", "1.1"), 1.1, "in TRL of positive ones too"),
        (("--delta", "4", "--loss_type", "sapo"), None, "in TRL neither"),
        (("--delta", "4", "--importance_sampling_level", "sequence"), None, "a ratio of sequences has no bound"),
    ],
)
def test_the_second_bound_of_a_ratio_is_that_of_negative_advantages(
    flags: tuple[str, ...], bound: float | None, told: str
) -> None:
    result = translated("grpo", *flags)
    assert result.run.actor.dual_clip == bound
    assert [told in note for note in result.notes if "--delta" in note] == ([True] if told else [])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--loss_type", "bnpo", "--gradient_accumulation_steps", "2"), "in TRL of each micro-batch"),
        (("--loss_type", "bnpo"), None),
        (("--steps_per_generation", "2"), "in TRL by their mean over the steps of a generation"),
        (("--steps_per_generation", "2", "--loss_type", "grpo"), None),
        (("--mask_truncated_completions", "--loss_type", "grpo"), "over the others alone, in TRL over all"),
        (("--mask_truncated_completions",), None),
        (("--top_entropy_quantile", "0.2"), "in TRL of a micro-batch's"),
        (("--entropy_coef", "0.1"), "in TRL over the tokens of a micro-batch"),
    ],
)
def test_means_that_trl_takes_of_others_are_told(flags: tuple[str, ...], told: str | None) -> None:
    notes = "\n".join(translated("grpo", *flags).notes)
    every = ("of each micro-batch", "steps of a generation", "others alone", "micro-batch's", "tokens of a micro-batch")
    assert [text for text in every if text in notes] == (
        [] if told is None else [text for text in every if text in told]
    )


@pytest.mark.parametrize(("loss", "aggregation"), [("grpo", "sequence_mean"), ("dapo", "token_mean")])
def test_ratios_of_sequences_are_added_up_as_the_loss_says(loss: str, aggregation: str) -> None:
    found = settings("grpo", "--importance_sampling_level", "sequence", "--loss_type", loss)
    assert holds(found, {"actor.policy_loss_type": "gspo", "actor.loss_aggregation": aggregation})
    with pytest.raises(ConfigurationError, match="--importance_sampling_level"):
        translated("grpo", "--importance_sampling_level", "sequence", "--loss_type", "cispo")
    with pytest.raises(ConfigurationError, match="is sentence, but there are token and sequence"):
        translated("grpo", "--importance_sampling_level", "sentence")


def test_the_divergence_is_the_one_that_trl_weights_with_the_ratio() -> None:
    assert settings("grpo", "--beta", "0.1")["algo.kl.estimator"] == "k3_unbiased"
    assert settings("grpo", "--beta", "0.1", "--no_use_bias_correction_kl")["algo.kl.estimator"] == "k3"
    sequences = ("--importance_sampling_level", "sequence", "--loss_type", "grpo")
    of_replies = translated("grpo", "--beta", "0.1", *sequences)
    assert of_replies.run.algo.kl.estimator == "k3_unbiased"
    assert any("--beta 0.1: the KL of a token" in note for note in of_replies.notes)
    assert not any("--beta" in note for note in translated("grpo", "--beta", "0.1").notes)


def test_steps_are_counted_in_rollouts() -> None:
    evaluated = ("--eval_strategy", "steps", "--eval_steps", "40", "--temperature", "0.7", "--top_p", "0.9")
    flags = ("--num_iterations", "2", "--steps_per_generation", "4", "--max_steps", "100", "--save_steps", "20")
    found = settings("grpo", *flags, *evaluated)
    assert holds(
        found,
        {
            "train.max_steps": 13,
            "ckpt.save_steps": 3,
            "ckpt.state_steps": 3,
            "eval.steps": 5,
            "rollout.batch_size": 4,
            "train.batch_size": 8,
            "train.max_epochs": 2,
            "eval.temperature": 0.7,
            "eval.top_p": 0.9,
            "eval.n_samples_per_prompt": 8,
        },
    )
    assert any("divided by 8" in note for note in translated("grpo", *flags).notes)
    assert settings("grpo", "--max_steps", "100")["train.max_steps"] == 100


def test_rollouts_of_one_optimizer_step_are_one() -> None:
    found = settings("grpo", "--gradient_accumulation_steps", "4", "--steps_per_generation", "1", "--max_steps", "9")
    assert holds(found, {"rollout.batch_size": 4, "train.batch_size": 32, "train.max_steps": 9})


def test_what_else_trl_does_is_named() -> None:
    assert any("data.apply_chat_template False" in note for note in translated("grpo").notes)


@pytest.mark.parametrize(
    ("flags", "correction"),
    [
        ((), {"level": "sequence", "mode": "mask", "low": 0.0, "high": 3.0}),
        (("--vllm_importance_sampling_mode", "token_truncate"), {"level": "token", "mode": "truncate", "high": 3.0}),
        (
            ("--vllm_importance_sampling_mode", "token_mask", "--vllm_importance_sampling_clip_min", "0.5"),
            {"level": "token", "mode": "mask", "low": 0.5, "high": 3.0},
        ),
        (
            (
                *("--vllm_importance_sampling_mode", "sequence_truncate"),
                *("--vllm_importance_sampling_clip_min", "0.5", "--vllm_importance_sampling_cap", "4"),
            ),
            {"level": "sequence", "mode": "clip", "low": 0.5, "high": 4.0},
        ),
        (("--no_vllm_importance_sampling_correction",), {"level": "auto"}),
        (("--loss_type", "vespo"), {"level": "auto"}),
        (("--top_p", "0.9"), {"level": "auto"}),
        (("--top_p", "0.9", "--loss_type", "vespo"), {"level": "auto"}),
        (("--off_policy_mask_threshold", "0.2"), {"level": "sequence", "mode": "mask", "gate": "opsm"}),
    ],
)
def test_flags_of_corrections_for_vllm_translate(flags: tuple[str, ...], correction: dict[str, Any]) -> None:
    found = translated("grpo", "--use_vllm", *flags)
    chosen = attrs.asdict(found.run.algo.correction)
    assert {key: chosen[key] for key in correction} == correction
    assert any("own ratio" in note for note in found.notes) is (flags == ())
    assert any("less than the full distribution" in note for note in found.notes) is ("--top_p" in flags)
    if "--off_policy_mask_threshold" in flags:
        assert (chosen["threshold"], found.run.algo.old_logprobs) == (0.2, "rollout")


def test_nothing_is_corrected_without_vllm_unless_it_is_masked() -> None:
    found = translated("grpo", "--vllm_importance_sampling_cap", "2")
    assert found.run.algo.correction.level == "auto"
    assert any("--vllm_importance_sampling_cap" in note for note in found.notes)
    assert settings("grpo", "--off_policy_mask_threshold", "0.2")["algo.correction.gate"] == "opsm"
    with pytest.raises(ConfigurationError, match="--vllm_importance_sampling_mode is other"):
        translated("grpo", "--use_vllm", "--vllm_importance_sampling_mode", "other")


def test_engines_share_the_gpus_of_the_processes_that_train() -> None:
    one = settings("grpo", "--use_vllm")
    assert holds(one, {"vllm.gpu_memory_utilization": 0.3, "train.colocate_all": False})
    several = translated("grpo", "--use_vllm", "--num_processes", "4", "--vllm_tensor_parallel_size", "2")
    assert several.run.train.colocate_all
    assert (several.run.vllm.num_engines, several.run.vllm.tensor_parallel_size) == (2, 2)
    assert not any("--vllm_tensor_parallel_size" in note for note in several.notes)
    for size in ("3", "0"):
        with pytest.raises(ConfigurationError, match=rf"--vllm_tensor_parallel_size {size}: so many"):
            translated("grpo", "--use_vllm", "--num_processes", "4", "--vllm_tensor_parallel_size", size)
    assert settings("grpo", "--use_vllm", "--vllm_tensor_parallel_size", "2")["vllm.tensor_parallel_size"] == 2
    assert settings("grpo", "--use_vllm", "--vllm_max_model_length", "4096")["vllm.max_model_len"] == 4096


def test_a_reward_function_of_a_module_is_found_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_lib").mkdir()
    (tmp_path / "my_lib" / "rewards.py").touch()
    words = ["grpo", *LEAST, "--reward_funcs", "my_lib.rewards.length"]
    run = translate_command(words).run
    assert isinstance(run, RLConfig)
    assert run.reward.function_path == "my_lib/rewards.py:length"
    assert any("FILE.py:NAME" in note for note in translate_command([*words[:-1], "elsewhere.length"]).notes)


def test_several_rewards_keep_their_order_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    beside = ("accuracy_reward", "mine.brief", "think_format_reward")
    words = ["grpo", *LEAST, "--reward_model_name_or_path", "rm", "--reward_funcs", *beside, "--reward_weights"]
    result = translate_command([*words, "4", "3", "2", "1"])
    assert isinstance(result.run, RLConfig)
    assert result.run.reward.weights == {"model": 4.0, "math": 3.0, "brief": 2.0, "think_format_reward": 1.0}
    assert result.run.reward.function_path == "mine.py:brief,trl.rewards:think_format_reward"
    assert result.run.reward.verifier == "math"
    assert problems(result) == []
    with pytest.raises(ConfigurationError, match="rewards are model, math, brief, think_format_reward: give one num"):
        translate_command([*words, "1", "2"])
    with pytest.raises(ConfigurationError, match="--reward_weights is 1 2 3 a, "):
        translate_command([*words, "1", "2", "3", "a"])
    alone = translate_command(["grpo", *LEAST, "--reward_funcs", "mine.brief", "--reward_weights", "2"])
    assert any("a reward alone has no weight" in note for note in alone.notes)


def test_no_part_of_the_rewards_is_left_out_in_silence() -> None:
    lost = translate_command(["grpo", *LEAST, "--reward_funcs", "accuracy_reward", "get_soft_overlong_punishment"])
    assert any("get_soft_overlong_punishment: reward.overlong_buffer_len 256 does it" in n for n in lost.notes)
    assert any("No reward is set" in str(problem) for problem in problems(lost))
