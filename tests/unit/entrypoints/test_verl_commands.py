"""Launch scripts of verl are translated, and the translation reads back."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.translated import problems
from rollgrad.entrypoints.names.names_of_verl_sft import SFT
from rollgrad.entrypoints.translation.draft import TranslatedRun
from rollgrad.entrypoints.verl.command import translate_command
from tests.translated_settings import holds, settings_of
from tests.verl_overrides import ACTOR, GROUP, LEAST, ROLLOUT, SFT_LEAST, notes, settings, translated

COMMANDS = Path(__file__).with_name("verl_commands.txt").read_text().split("\n\n")
"""Commands with the settings of verl's launch scripts: GRPO and PPO on GSM8K, DAPO, several turns, Megatron, images."""
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
