"""verl's command lines as settings of `rollgrad train rl` and `rollgrad train sft`."""

import shlex
import subprocess
import sys
from contextlib import suppress
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.translated import problems
from rollgrad.entrypoints.config_io import setting_names
from rollgrad.entrypoints.names.flags import Program
from rollgrad.entrypoints.names.names_of_verl_commands import PPO
from rollgrad.entrypoints.names.names_of_verl_sft import SFT
from rollgrad.entrypoints.translation.draft import TranslatedRun
from rollgrad.entrypoints.verl.command import translate_command
from rollgrad.entrypoints.verl.words import Override, known
from tests.unit.entrypoints.test_suggestions import VERL_NAMES

COMMANDS = Path(__file__).with_name("verl_commands.txt").read_text().split("\n\n")
"""Commands with the settings of verl's launch scripts: GRPO and PPO on GSM8K, DAPO, several turns, Megatron, images."""

SECTIONS = (
    line.split(":") for line in Path(__file__).with_name("verl_names.txt").read_text().replace("\n ", " ").split("\n")
)
GENERATED = [f"{section}.{name}" for section, *names in SECTIONS for name in " ".join(names).split()]
"""Names of verl's `_generated_ppo_trainer.yaml`, and of earlier releases."""

LEAST = ("data.train_files=d.parquet", "actor_rollout_ref.model.path=m", "trainer.logger=[console]")
SFT_LEAST = ("data.train_files=t.parquet", "trainer.logger=[console]")
GROUP = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TEACHING, TEACHER = "distillation.distillation_loss", "distillation.teacher_models.teacher_model.model_path=large"
TAUGHT = ("distillation.enabled=True", TEACHER)


def translated(*overrides: str) -> TranslatedRun:
    """Settings of a command that lacks nothing; it must be one that can be trained."""
    result = translate_command(["python3", "-m", "verl.trainer.main_ppo", *LEAST, *overrides])
    assert problems(result) == []
    return result


def settings_of(result: TranslatedRun) -> dict[str, Any]:
    return {name: attrgetter(name)(result.run) for name in setting_names(type(result.run))}


def settings(*overrides: str) -> dict[str, Any]:
    return settings_of(translated(*overrides))


def holds(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return {name: found[name] for name in expected} == expected


def notes(*overrides: str) -> str:
    return "\n".join(translated(*overrides).notes)


# The launch scripts.

EXPECTED: list[dict[str, Any]] = [
    {
        "data.prompt_dataset": "gsm8k/train.parquet",
        "data.overlong": "drop",
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0.001,
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "k3",
        "actor.policy_loss_type": "ppo",
        "actor.eps_clip_low_high": (0.2, 0.2),
        "actor.dual_clip": 3.0,
        "actor.loss_aggregation": "token_mean",
        "actor.adam.lr": 1e-6,
        "actor.adam.weight_decay": 0.01,
        "actor.adam.betas": (0.9, 0.999),
        "actor.gradient_checkpointing": "full",
        "actor.num_gpus_per_node": 8,
        "rollout.batch_size": 1024,
        "rollout.n_samples_per_prompt": 5,
        "rollout.max_new_tokens": 1024,
        "rollout.top_k": 0,
        "train.batch_size": 1280,
        "train.num_episodes": 15,
        "train.colocate_all": True,
        "train.optimizer_sleeps": False,
        "cluster.strategy": "fsdp2",
        "ref.offload": True,
        "vllm.num_engines": 4,
        "vllm.tensor_parallel_size": 2,
        "vllm.gpu_memory_utilization": 0.6,
        "eval.dataset": "gsm8k/test.parquet",
        "eval.steps": 5,
        "eval.temperature": 0.0,
        "ckpt.output_dir": "checkpoints/gsm8k/grpo",
        "ckpt.save_steps": 20,
        "ckpt.state_steps": 20,
        "ckpt.resume": "auto",
        "logger.report_to": ("wandb",),
        "logger.run_name": "grpo",
    },
    {
        "data.prompt_dataset": "gsm8k/train.parquet,math/train.parquet",
        "data.overlong": "error",
        "algo.advantage.estimator": "gae",
        "algo.advantage.lambd": 0.95,
        "algo.kl.init_coef": 0.01,
        "algo.kl.use_loss": False,
        "algo.kl.estimator": "k1",
        "actor.lr_warmup_ratio": 0.1,
        "critic.model_name_or_path": "Qwen/Qwen2-7B-Instruct",
        "critic.adam.lr": 2e-5,
        "critic.adam.weight_decay": 0.01,
        "critic.lr_warmup_ratio": 0.05,
        "critic.value_clip": 0.4,
        "critic.freezing_steps": 1,
        "actor.gradient_checkpointing": "full",
        "train.batch_size": 256,
        "train.max_tokens_per_micro_batch": 4 * 1536,
        "reward.model_name_or_path": "sfairXC/FsfairX-LLaMA3-RM-v0.1",
        "reward.offload": True,
        "vllm.num_engines": 8,
        "logger.tensorboard_dir": "tensorboard_log/verl_examples/gsm8k",
        "ckpt.resume": "never",
        "ckpt.save_steps": -1,
    },
    {
        "cluster.address": "auto",
        "actor.num_nodes": 16,
        "actor.eps_clip_low_high": (0.2, 0.28),
        "actor.dual_clip": 10.0,
        "actor.max_norm": 0.5,
        "actor.adam.weight_decay": 0.1,
        "algo.kl.init_coef": 0.0,
        "algo.dynamic_filtering_enable": True,
        "algo.dynamic_filtering_budget": 30.0,
        "reward.overlong_buffer_len": 4096,
        "reward.overlong_penalty_factor": 0.9,
        "rollout.batch_size": 512,
        "train.batch_size": 512,
        "train.max_tokens_per_micro_batch": 22528,
        "train.max_tokens_per_scoring_pass": 30000,
        "train.optimizer_sleeps": True,
        "ref.offload": False,
        "ds.sequence_parallel_size": 8,
        "vllm.num_engines": 32,
        "vllm.extra": {"enable_chunked_prefill": True, "max_num_batched_tokens": 22528},
        "eval.temperature": 1.0,
        "eval.n_samples_per_prompt": 32,
        "ckpt.output_dir": "ckpts/DAPO",
    },
    {
        "agent.tools": "config/gsm8k_tool_config.py",
        "agent.max_result_chars": 256,
        "rollout.max_turns": 5,
        "rollout.max_episode_tokens": 2048,
        "rollout.engine": "vllm",
        "train.batch_size": 4096,
    },
    {
        "cluster.strategy": "deepspeed",
        "ds.tensor_parallel_size": 2,
        "train.optimizer_sleeps": True,
        "train.num_episodes": 30,
    },
    {
        "data.image_key": "images",
        "data.chat_template_kwargs": {"enable_thinking": False},
        "actor.lora.rank": 64,
        "actor.lora.alpha": 32,
        "actor.lora.target_modules": ("q_proj", "v_proj"),
        "cluster.offload": True,
        "train.optimizer_sleeps": False,
        "reward.function_path": "my/reward.py:score",
        "vllm.extra": {"disable_mm_preprocessor_cache": True},
        "vllm.num_engines": 2,
        "logger.report_to": (),
    },
]

TOLD: list[tuple[str, ...]] = [
    ("PYTHONUNBUFFERED=1: set it in front of rollgrad", "the verifier math judges"),
    ("trainer.val_before_train=False: evaluates before", "critic.model.enable_gradient_checkpointing=False: it is"),
    (
        "data.gen_batch_size=1536: a group that is filtered is replaced",
        "lr_warmup_steps=10: a share of the steps is needed",
        "+actor_rollout_ref.model.override_config.attention_dropout=0.: tokenizer and config.json",
        "ref.fsdp_config.param_offload=True: no reference is loaded",
        "fsdp_config.param_offload=True: what the optimizer keeps sleeps",
        "data.truncation=left: longer prompts are dropped",
    ),
    (
        "config/gsm8k_multiturn_grpo.yaml: there is no such file",
        "config/gsm8k_tool_config.py, a file that has functions with @rollgrad.tool",
        "actor_rollout_ref.rollout.name=sglang: vLLM samples",
    ),
    ("pipeline_model_parallel_size=2: models are divided by DeepSpeed or FSDP2", "DeepSpeed divides the layers"),
    ("offload_policy=True: the optimizer steps on the CPU",),
]


def test_there_are_six_commands() -> None:
    assert len(COMMANDS) == len(EXPECTED) == len(TOLD) == 6


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("words", ["split by a shell", "one text", "continuations kept"])
def test_the_settings_of_launch_scripts(index: int, words: str) -> None:
    command = COMMANDS[index]
    argv = {
        "split by a shell": shlex.split(command),
        "one text": [command.replace("\n", " \\\n")],
        "continuations kept": [*shlex.split(command)[:3], "\\", *shlex.split(command)[3:], "$@"],
    }[words]
    result = translate_command(argv)
    assert problems(result) == []
    assert holds(settings_of(result), EXPECTED[index])
    for told in TOLD[index]:
        assert any(told in note for note in result.notes), told


# Rollouts that overlap with updates.

APART = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ppo_mini_batch_size=32")


def asynchronous(module: str, *overrides: str) -> TranslatedRun:
    result = translate_command(["python3", "-m", f"verl.experimental.{module}", *LEAST, *GROUP, *APART, *overrides])
    assert problems(result) == []
    return result


def test_fully_asynchronous_training_translates() -> None:
    result = asynchronous(
        "fully_async_policy.fully_async_main",
        *("--config-name=fully_async_ppo_trainer", "data.train_batch_size=0", "data.gen_batch_size=1"),
        *("async_training.trigger_parameter_sync_step=4", "async_training.require_batches=2"),
        *("async_training.staleness_threshold=0.5", "rollout.total_rollout_steps=51200"),
        *("rollout.nnodes=2", "rollout.n_gpus_per_node=4", "actor_rollout_ref.hybrid_engine=False", "rollout.n=4"),
    )
    expected = {
        "rollout.batch_size": 4 * 2 * 32,
        "train.batch_size": 32 * 4,
        "train.max_steps": 51200 // 256,
        "train.num_episodes": settings(*GROUP, "trainer.total_training_steps=1")["train.num_episodes"],
        "train.async_enable": True,
        "train.max_staleness": 1,
        "train.partial_rollout": "recompute",
        "train.colocate_all": False,
        "algo.old_logprobs": "rollout",
        "actor.num_gpus_per_node": 2,
        "vllm.num_engines": 4,
    }
    assert holds(settings_of(result), expected)
    assert len(result.notes) == 2, "the verifier, and whole rollouts"
    assert "staleness_threshold=0.5: 1, for whole rollouts may be ahead" in "\n".join(result.notes)


def test_training_one_step_off_policy_translates() -> None:
    result = asynchronous("one_step_off_policy.main_ppo", "data.train_batch_size=64", "rollout.n_gpus_per_node=4")
    expected = {"train.async_enable": True, "train.max_staleness": 1, "train.partial_rollout": "none"}
    others = {"algo.old_logprobs": "rollout", "vllm.num_engines": 2, "train.colocate_all": False}
    assert holds(settings_of(result), expected | others | {"train.num_episodes": 30, "rollout.batch_size": 64})


@pytest.mark.parametrize(("older", "newer"), [("main_ppo_sync", "main_ppo"), ("sft_trainer_ray", "sft_trainer")])
def test_programs_that_read_the_same_settings(older: str, newer: str) -> None:
    least = SFT_LEAST if newer in SFT else LEAST
    found = [translate_command(["python3", "-m", f"verl.trainer.{module}", *least]) for module in (older, newer)]
    assert found[0] == found[1]


def test_modes_of_the_trainer_translate() -> None:
    mode, engines = "trainer.v1.trainer_mode=", f"{ROLLOUT}.nnodes=1"
    assert translated(*GROUP, f"{mode}sync").run == translated(*GROUP).run
    apart = settings(*GROUP, f"{mode}separate_async", engines, f"{ACTOR}.use_kl_loss=True")
    expected = {"train.async_enable": True, "train.partial_rollout": "recompute", "vllm.num_engines": 4}
    assert holds(apart, expected | {"train.colocate_all": False, "train.colocate_actor_ref": True})
    assert "are corrected (algo.correction.level auto), in verl only if asked" in notes(
        *GROUP, f"{mode}separate_async", engines
    )
    together = settings(*GROUP, f"{mode}colocate_async", "trainer.v1.colocate_async.num_warmup_batches=0.5")
    assert "num_warmup_batches=2: the trainer's mode is sync" in notes("trainer.v1.separate_async.num_warmup_batches=2")
    assert holds(together, {"train.async_enable": False, "rollout.generate_batch_size": 2048})


# The table.


def test_every_setting_named_in_the_table_exists() -> None:
    assert {flag.to for flag in PPO.flags.values() if flag.to} <= set(setting_names())
    assert {name for names in PPO.names.values() for name in names} <= set(PPO.flags)


def test_every_name_of_verl_is_known() -> None:
    assert len(GENERATED) > 330
    overrides = [Override(name, ("1",), written=f"{name}=1") for name in (*VERL_NAMES, *GENERATED)]
    _, options = known(PPO, overrides, [])
    assert set(options.values()) <= set(overrides)


UNUSUAL = {
    "algorithm.adv_estimator": "reinforce_plus_plus",
    "algorithm.norm_adv_by_std_in_grpo": "False",
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.filter_groups.metric": "seq_reward",
    "algorithm.kl_penalty": "mse",
    f"{ACTOR}.kl_loss_type": "mse",
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    f"{ACTOR}.policy_loss.loss_mode": "gspo",
    f"{ACTOR}.router_replay.mode": "R2",
    f"{ROLLOUT}.tensor_model_parallel_size": "4",
    f"{ROLLOUT}.top_k": "7",
    "trainer.resume_mode": "resume_path",
    "trainer.logger": "wandb",
    "trainer.device": "npu",
    "trainer.v1.trainer_mode": "separate_async",
    "engine": "megatron",
    "optim": None,
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_rs": "token",
    "model_engine": "megatron",
    "data.truncation": "left",
    f"{TEACHING}.loss_mode": "mse",
}
"""Values that ask for something; of the others a switch is turned on, and off."""

BESIDE = {
    f"{ACTOR}.kl_loss": (f"{ACTOR}.use_kl_loss=True",),
    "algorithm.kl_": ("algorithm.use_kl_in_reward=True",),
    "trainer.val_before_train": ("data.val_files=v",),
    "critic": ("algorithm.adv_estimator=gae",),
    "trainer.critic_warmup": ("algorithm.adv_estimator=gae",),
    "reward_model.model": ("reward_model.enable=True",),
    "custom_reward_function.name": ("custom_reward_function.path=r.py",),
    f"{ACTOR}.use_dynamic_bsz": (f"{ACTOR}.ppo_max_token_len_per_gpu=999",),
    f"{ACTOR}.megatron": ("model_engine=megatron",),
    f"{ROLLOUT}.val_kwargs.d": ("data.val_files=v", f"{ROLLOUT}.val_kwargs.temperature=0.5"),
    f"{ROLLOUT}.val_kwargs": ("data.val_files=v",),
    "reward_model.overlong_buffer.enable": ("reward_model.overlong_buffer.len=7",),
    "trainer.v1.trainer_mode": (f"{ROLLOUT}.nnodes=1",),
    "trainer.project_name": (),
    "data.use_dynamic_bsz": ("data.max_token_len_per_gpu=999",),
    "distillation.enabled": (TEACHER,),
    "distillation.teacher_models": ("distillation.enabled=True",),
    "distillation.distillation_loss.topk": (*TAUGHT, f"{TEACHING}.loss_mode=forward_kl_topk"),
    "distillation.distillation_loss.clip": (
        *(*TAUGHT, f"{TEACHING}.use_policy_gradient=True", f"{TEACHING}.use_task_rewards=False"),
    ),
    "distillation.": TAUGHT,
}
"""Words that a setting depends on, by the beginning of its name."""


@pytest.mark.parametrize("module", ["main_ppo", *SFT])
def test_every_setting_is_honoured_or_the_reason_is_said(module: str) -> None:
    """One that is given with an unusual value changes the settings, or is on a line of the notes."""
    words = {"SWITCH": ("True", "False"), "INTEGER": ("3",), "NUMBER": ("0.25",), "PAIR": ("[0.1,0.2]",)}
    program, least = (SFT[module], SFT_LEAST) if module in SFT else (PPO, (*LEAST, *GROUP))

    @cache
    def run(*overrides: str) -> TranslatedRun | str:
        try:
            return translate_command(["python3", "-m", f"verl.trainer.{module}", *least, *overrides])
        except ConfigurationError as error:  # which names it
            return str(error)

    silent = []
    for name, flag in program.flags.items():
        base = next((given for beginning, given in BESIDE.items() if name.startswith(beginning)), ())
        values = (UNUSUAL[name],) if name in UNUSUAL else words.get(flag.kind.name, ("['unusual']",))
        if (
            all(run(*base, f"{name}={value}") == run(*base) for value in values if value is not None)
            and name != "optim"
        ):
            silent.append(name)
    assert silent == []


def test_a_setting_that_is_taken_away_is_no_defect() -> None:
    on = ("data.val_files=v", "reward_model.overlong_buffer.enable=True", "algorithm.use_kl_in_reward=True")
    for name in PPO.flags:
        with suppress(ConfigurationError):
            translate_command(["python3", "-m", "verl.trainer.main_ppo", *LEAST, *on, f"~{name}"])


# What they mean.


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


# Supervised fine-tuning.


def fine_tuned(module: str, *overrides: str, launcher: tuple[str, ...] = ("torchrun", "-m")) -> dict[str, Any]:
    result = translate_command([*launcher, f"verl.trainer.{module}", *SFT_LEAST, *overrides])
    assert result.command == "train sft"
    assert problems(result) == []
    return settings_of(result)


def test_the_older_trainer_has_columns_of_prompts_and_replies() -> None:
    found = fine_tuned(
        "fsdp_sft_trainer",
        *("data.prompt_key=extra_info", "data.response_key=extra_info", "data.prompt_dict_keys=['question']"),
        *("+data.response_dict_keys=['answer']", "model.partial_pretrain=m", "model.lora_rank=32", "optim.lr=1e-4"),
        *("data.val_files=v.parquet", "data.micro_batch_size_per_gpu=4", "trainer.default_hdfs_dir=null"),
        launcher=("torchrun", "--standalone", "--nnodes=2", "--nproc_per_node=4", "-m"),
    )
    expected = {
        "actor.model_name_or_path": "m",
        "actor.num_nodes": 2,
        "actor.num_gpus_per_node": 4,
        "actor.lora.rank": 32,
        "actor.lora.alpha": 16,
        "actor.adam.lr": 1e-4,
        "actor.adam.betas": (0.9, 0.95),
        "actor.lr_scheduler": "cosine_with_min_lr",
        "actor.min_lr_ratio": 0.0,
        "actor.lr_warmup_ratio": 0.1,
        "actor.gradient_checkpointing": "off",
        "cluster.strategy": "fsdp2",
        "data.format": "prompt_completion",
        "data.input_key": "extra_info.question",
        "data.output_key": "extra_info.answer",
        "data.max_tokens": 1024,
        "data.overlong": "error",
        "eval.dataset": "v.parquet",
        "train.batch_size": 256,
        "train.num_epochs": 4,
        "ckpt.output_dir": "checkpoints/gsm8k-sft/test",
        "ckpt.resume": "never",
    }
    assert holds(found, expected)


def test_the_newer_trainer_has_conversations() -> None:
    found = fine_tuned(
        "sft_trainer",
        *("model.path=m", "engine=fsdp", "optim=fsdp", "engine.strategy=fsdp2", "engine.fsdp_size=-1"),
        *("engine.ulysses_sequence_parallel_size=2", "data.max_token_len_per_gpu=65536", "data.truncation=right"),
        *("trainer.save_freq=10", "trainer.max_ckpt_to_keep=3", "optim.warmup_style=cosine", "optim.min_lr_ratio=0.2"),
        launcher=("torchrun", "--nproc-per-node", "8", "-m"),
    )
    expected = {
        "actor.adam.lr": 1e-3,
        "actor.adam.betas": (0.9, 0.999),
        "actor.min_lr_ratio": 0.2,
        "actor.gradient_checkpointing": "full",
        "actor.num_gpus_per_node": 8,
        "ds.sequence_parallel_size": 2,
        "data.format": "messages",
        "data.input_key": "messages",
        "data.overlong": "cut",
        "train.max_tokens_per_micro_batch": 65536,
        "train.seed": 1,
        "ckpt.keep_states": 3,
        "ckpt.resume": "auto",
    }
    assert holds(found, expected)


def test_one_process_fine_tunes_without_a_launcher_that_says_more() -> None:
    words = ["python3", "-m", "verl.trainer.sft_trainer", *SFT_LEAST, "model.path=m", "engine.strategy=fsdp2"]
    result = translate_command([*words, "trainer.save_freq=after_each_epoch"])
    assert settings_of(result)["cluster.enable"] is False
    assert any("engine.strategy=fsdp2: one process trains" in note for note in result.notes)
    assert any("after_each_epoch: a number of steps is needed" in note for note in result.notes)


@pytest.mark.parametrize("program", SFT.values(), ids=lambda program: program.name)
def test_the_settings_of_fine_tuning_exist(program: Program) -> None:
    assert {flag.to for flag in program.flags.values() if flag.to} <= set(setting_names(SFTRun))
    assert {name for names in program.names.values() for name in names} == set(program.flags)


def test_columns_are_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("data.prompt_key=problem", "data.response_key=solution", "model.partial_pretrain=m")
    assert main(["verl", "python3", "-m", "verl.trainer.fsdp_sft_trainer", *SFT_LEAST, *words]) == 0
    data = yaml.safe_load(capsys.readouterr().out)["data"]
    assert (data["input_key"], data["output_key"]) == ("problem", "solution")


# Hydra.


def test_the_grammar_of_hydra() -> None:
    """A later override counts, null and ~ take a value away, and + adds one."""
    assert settings("trainer.total_epochs=2", "trainer.total_epochs=3")["train.num_episodes"] == 3
    assert settings("data.val_files=null", "trainer.test_freq=-1")["eval.dataset"] is None
    assert settings(f"~{ACTOR}.clip_ratio_c")["actor.dual_clip"] is None
    assert settings("++trainer.total_epochs=4")["train.num_episodes"] == 4
    mapping = "+data.apply_chat_template_kwargs={enable_thinking:False,effort:'low'}"
    assert settings(mapping)["data.chat_template_kwargs"] == {"enable_thinking": False, "effort": "low"}
    assert settings("data.train_files=['~/a.parquet','b.parquet']")["data.prompt_dataset"] == (
        f"{Path.home()}/a.parquet,b.parquet"
    )
    assert "+my.own=1: rollgrad knows no setting of verl's" in notes("+my.own=1")


def test_a_file_of_settings_is_read_and_overrides_win(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [here]}\ndefaults: [ppo_trainer, _self_, other]\n"
        "data: {train_batch_size: 64, max_response_length: 32}\nalgorithm: {gamma: '${data.x}'}\n"
    )
    result = translate_command(
        ["python3", "-m", "verl.trainer.main_ppo", f"--config-path={tmp_path}", "--config-name", "mine", *LEAST,
         "data.max_response_length=16", "--cfg=job"]
    )  # fmt: skip
    assert holds(settings_of(result), {"rollout.batch_size": 64, "rollout.max_new_tokens": 16})
    text = "\n".join(result.notes)
    assert "mine.yaml: other: of files" in text
    assert "algorithm.gamma=${data.x}: Hydra would fill it in" in text
    assert "--cfg=job: it is a flag of Hydra" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.trian_files=x"], "did you mean data.train_files?"),
        (["dta.train_files=x"], "did you mean data.train_files?"),
        ([f"{ACTOR}.clip_ratio_hihg=0.28"], f"did you mean {ACTOR}.clip_ratio_high?"),
        ([f"{ROLLOUT}.zzz=1"], "remove it."),
        (["data.train_files=$HOME/x.parquet"], "a value is not filled in from '$H' on"),
        (["data.train_batch_size=", "data.max_prompt_length="], "data.max_prompt_length= has no value"),
        (["data.train_batch_size=many"], "it takes one integer"),
        (["data.train_batch_size=0"], "data.train_batch_size is 0, but it must be at least 1"),
        (["data.apply_chat_template_kwargs=[a]"], "is no mapping: write data.apply_chat_template_kwargs.NAME=VALUE."),
        (["data.train_files=['a',", "'b']"], "close brackets, and quote what has spaces"),
        (["algorithm.adv_estimator=mine"], "algorithm.adv_estimator is mine, but there are gae"),
        ([f"{ACTOR}.policy_loss.loss_mode=mine"], "loss_mode is mine"),
        (["algorithm.rollout_correction.rollout_rs=token_k1,seq_max_k3"], "has no counterpart: write algo.correction"),
        ([f"{ACTOR}.loss_agg_mode=mine"], "loss_agg_mode is mine"),
        ([f"{ACTOR}.router_replay.mode=R4"], "router_replay.mode is R4, but there are disabled, R2, R3: change it."),
        (["trainer.resume_mode=never"], "trainer.resume_mode is never, but there are auto, disable, resume_path"),
        (["trainer.v1.trainer_mode=async"], "trainer_mode is async, but there are sync, colocate_async"),
        (
            ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=mine"],
            "kl_ctrl.type is mine, but there are fixed",
        ),
        (["reward_model.overlong_buffer.enable=True"], "add reward_model.overlong_buffer.len=4096, say"),
        (["distillation.enabled=True"], f"there is no teacher: add {TEACHER.removesuffix('large')}MODEL"),
        ([*TAUGHT, f"{TEACHING}.loss_mode=k1"], "whose gradient does not depend on the teacher, in verl neither"),
        ([*TAUGHT, f"{TEACHING}.loss_mode=mine"], "loss_mode is mine, but there are k1"),
        (["distillation.enabled=True", "+distillation.teacher_models.a.key=x"], "--ref.urls KEY http://host:8000"),
        ([f"{ROLLOUT}.tensor_model_parallel_size=3"], "which do not divide the 8 that engines have"),
        (["python3", "-m", "verl.trainer.main_eval", "data.path=x"], "write rollgrad score"),
        (["python3", "-m", "verl.trainer.main_generation", "data.path=x"], "write rollgrad generate"),
        (["python3", "-m", "recipe.mine.main_ppo", "a.b=1"], "the programs that are translated are"),
        (["python3", "-m", "recipe.mine.main_mine"], "the programs that are translated are main_ppo"),
        (["python3", "train.py"], "The command names no program of verl"),
        (["data.train_batch_size=8", "--run"], "No model is set"),
        (["bash -c 'x"], "cannot be split into words"),
    ],
)
def test_each_error_is_a_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verl", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


# The command.


def test_printed_settings_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verl", *shlex.split(COMMANDS[0])]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("# rollgrad train rl --config FILE\n")
    path = tmp_path / "run.yaml"
    path.write_text(output.out)
    assert main(["train", "rl", "--config", str(path), "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["rollout"]["batch_size"] == 1024


def test_help_does_not_import_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verl", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: rollgrad verl")
    code = "import sys, rollgrad.entrypoints.verl.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
