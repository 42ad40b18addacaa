"""Answers to names of other tools, and to misspelt ones."""

from pathlib import Path

import pytest

from rollgrad.entrypoints.cli.commands import COMMANDS
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.config_io import setting_names
from rollgrad.entrypoints.names.names_of_openrlhf import FLAGS, FLAT, IMPLIED
from rollgrad.entrypoints.names.names_of_verl import verl_answer
from rollgrad.entrypoints.names.other_names import OTHER_NAMES
from rollgrad.entrypoints.names.suggestions import (
    OTHER_COMMANDS,
    advice,
    nearest,
    unknown_command,
    unknown_flag,
    unknown_key,
)
from tests.dataclass_fields import fields

SETTINGS = list(setting_names())

VERL_SCRIPT = """
algorithm.adv_estimator=grpo data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=1024
data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error
data.prompt_key=prompt data.image_key=images data.shuffle=True
actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode=token-mean
actor_rollout_ref.actor.ppo_epochs=1 actor_rollout_ref.actor.grad_clip=1.0 actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 actor_rollout_ref.actor.ulysses_sequence_parallel_size=1
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1
actor_rollout_ref.rollout.val_kwargs.temperature=0 actor_rollout_ref.rollout.val_kwargs.n=1
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 algorithm.gamma=1.0 algorithm.lam=0.95
critic.optim.lr=1e-5 critic.model.path=m critic.ppo_micro_batch_size_per_gpu=32 critic.cliprange_value=0.5
reward_model.enable=True reward_model.model.path=rm reward_model.reward_manager=dapo
custom_reward_function.path=r.py custom_reward_function.name=compute_score
trainer.critic_warmup=0 trainer.logger=['console','wandb'] trainer.project_name=p trainer.experiment_name=e
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
trainer.val_before_train=True trainer.resume_mode=auto trainer.default_local_dir=ckpt
"""

VERL_SECTIONS = """
actor_rollout_ref.actor.optim.betas actor_rollout_ref.actor.optim.clip_grad actor_rollout_ref.actor.optim.optimizer
actor_rollout_ref.actor.fsdp_config.reshard_after_forward actor_rollout_ref.actor.fsdp_config.model_dtype
actor_rollout_ref.actor.tau_pos actor_rollout_ref.actor.freeze_vision_tower actor_rollout_ref.actor.loss_scale_factor
actor_rollout_ref.actor.entropy_checkpointing actor_rollout_ref.actor.checkpoint.load_contents
actor_rollout_ref.actor.router_replay.mode actor_rollout_ref.actor.profiler.tool_config.npu.level
actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size actor_rollout_ref.ref.strategy
actor_rollout_ref.rollout.n_gpus_per_node actor_rollout_ref.rollout.seed actor_rollout_ref.rollout.expert_parallel_size
actor_rollout_ref.rollout.enable_prefix_caching actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space
actor_rollout_ref.rollout.multi_turn.max_parallel_calls actor_rollout_ref.rollout.multi_turn.interaction_config_path
actor_rollout_ref.rollout.agent.default_agent_loop actor_rollout_ref.rollout.checkpoint_engine.backend
actor_rollout_ref.rollout.trace.backend actor_rollout_ref.model.mtp.enable actor_rollout_ref.model.lora.rank
actor_rollout_ref.model.override_config.attn_implementation actor_rollout_ref.hybrid_engine data.tool_config_path
critic.fsdp.param_offload reward_model.n_gpus_per_node reward.reward_manager.name reward.num_workers
reward.sandbox_fusion.url algorithm.rollout_correction.loss_type algorithm.filter_groups.metric
distillation.teacher_models.teacher_model.model_path global_profiler.steps ray_kwargs.ray_init.num_cpus
"""
"""Names of verl's `ppo_trainer.yaml` that its launch scripts seldom set."""


TRL_NAMES = sorted(
    {
        *fields("trl", "trl/trainer/grpo_config.py", "GRPOConfig"),
        *fields("transformers", "transformers/training_args.py", "TrainingArguments"),
    }
)
VERL_NAMES = [word.partition("=")[0] for word in (VERL_SCRIPT + VERL_SECTIONS).split()]
OPENRLHF_NAMES = sorted({*FLAT, *FLAGS} - set(SETTINGS))


def is_known(answer: str | None) -> bool:
    """Returns whether it is a setting, several, or a sentence."""
    return answer is not None and (" " in answer or set(answer.split(",")) <= set(SETTINGS))


def test_every_answer_is_a_setting_or_a_sentence() -> None:
    for name, answer in OTHER_NAMES.items():
        assert is_known(answer), name
        assert " " not in answer or answer.endswith("."), name
        assert name == name.lower()
        assert name not in SETTINGS


def test_the_tools_have_as_many_names_as_they_had() -> None:
    assert len(TRL_NAMES) > 150
    assert len(VERL_NAMES) > 60
    assert len(OPENRLHF_NAMES) > 100


def test_every_name_of_trl_and_verl_is_answered_by_meaning() -> None:
    """By the table, or because ours has the same name, or in one section; never by how the letters look."""
    for name in {*TRL_NAMES, *VERL_NAMES} - {*SETTINGS}:
        same = [setting for setting in SETTINGS if setting.split(".")[-1] == name]
        assert name in OTHER_NAMES or verl_answer(name) is not None or len(same) == 1, name
        assert is_known(advice(name, SETTINGS)), name


def test_a_setting_of_another_command_is_not_sent_to_the_translation() -> None:
    others = [name for name in SETTINGS if not name.startswith("algo.")]
    assert "this one does not read it: leave it out" in str(advice("algo.advantage.estimator", others))


def test_every_name_of_openrlhf_is_answered() -> None:
    assert [name for name in OPENRLHF_NAMES if not is_known(advice(name, SETTINGS))] == []


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("actor.lr", "actor.adam.lr"),
        ("lr", "actor.adam.lr"),
        ("learning_rate", "actor.adam.lr"),
        ("actor_learning_rate", "actor.adam.lr"),
        ("critic.learning_rate", "critic.adam.lr"),
        ("critic_learning_rate", "critic.adam.lr"),
        ("train.learning_rate", "actor.adam.lr"),
        ("beta", "algo.kl.init_coef"),
        ("init_kl_coef", "algo.kl.init_coef"),
        ("num_generations", "rollout.n_samples_per_prompt"),
        ("max_completion_length", "rollout.max_new_tokens"),
        ("generate_max_len", "rollout.max_new_tokens"),
        ("epsilon", "actor.eps_clip"),
        ("prompt_data", "data.prompt_dataset"),
        ("actor_rollout_ref.rollout.n", "rollout.n_samples_per_prompt"),
        ("data.train_batch_size", "rollout.batch_size"),
        ("n_samples_per_prompt", "rollout.n_samples_per_prompt"),
        ("rollout.max_new_token", "rollout.max_new_tokens"),
        ("Temperature", "rollout.temperature"),
    ],
)
def test_the_same_meaning(name: str, setting: str) -> None:
    assert advice(name, SETTINGS) == setting


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("actor_rollout_ref.actor.router_replay.mode", "actor.router_replay"),
        ("actor_rollout_ref.actor.profiler.enable", "train.profile_steps"),
        ("actor_rollout_ref.rollout.n_gpus_per_node", "vllm.num_engines"),
        ("actor_rollout_ref.rollout.enable_prefix_caching", "common beginnings"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload", "ref.offload"),
        ("custom_reward_function.name", "FILE:NAME"),
        ("reward.num_workers", "reward.remote_url"),
    ],
)
def test_a_name_of_verl_is_never_taken_for_ours_that_only_ends_alike(name: str, words: str) -> None:
    assert words in str(advice(name, SETTINGS))
    assert advice("actor_rollout_ref.model.enable", SETTINGS) is None


@pytest.mark.parametrize("name", ["eval.beta", "critic.eps_clip", "reward.beta", "foo", "xyz.abc", "rate"])
def test_no_suggestion_is_better_than_a_wrong_one(name: str) -> None:
    assert advice(name, SETTINGS) is None


def errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--actor.lr 1e-6", "--actor.lr is not a flag; did you mean --actor.adam.lr?"),
        ("--learning-rate=1e-6", "--learning_rate is not a flag; did you mean --actor.adam.lr?"),
        ("--bf16", "--bf16 is not a flag; write --actor.dtype bfloat16"),
        ("--use_vllm true", "--use_vllm is not a flag; write --rollout.engine vllm."),
        ("--actor.lora.use_dora true", "--actor.lora.use_dora is not a flag; did you mean --actor.lora.dora?"),
        ("--train.z_loss_coef 1e-4", "--train.z_loss_coef is not a flag; there is no z-loss of the vocabulary's"),
        ("--actor.muon.lrs 1", "did you mean --actor.muon.lr?"),
        ("--rewrad.model_name_or_path x", "did you mean --reward.model_name_or_path?"),
        ("--rolout.batch_size 4", "did you mean --rollout.batch_size?"),
        ("trainer.total_epochs=3", "'trainer.total_epochs=3' is no flag of ours: write --train.num_episodes 3."),
        ("+data.train_files=a/x.parquet", "write --data.prompt_dataset a/x.parquet."),
        ("data.train_files=['a','b']", "is no flag of ours: did you mean --data.prompt_dataset?"),
        ("trainer.total_training_steps=null", "did you mean --train.max_steps?"),
        ("train.seed=3", "write --train.seed 3."),
        ("--beta 0.1 --epsilon 0.2", "--beta is not a flag; did you mean --algo.kl.init_coef?"),
        ("--beta 0.1 --epsilon 0.2", "--epsilon is not a flag; did you mean --actor.eps_clip?"),
    ],
)
def test_flags_of_other_tools(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train rl", "eval"):
        assert message in errors([*command.split(), *flags.split()], capsys)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("chat --max_tokens 3", "--max_tokens is not a flag; did you mean --max_new_tokens?"),
        ("serve agent --api-key x", "--api_key is not a flag; write --token_file FILE, or set ROLLGRAD_TOKEN."),
        ("serve agent --max-num-seqs 8", "--max_num_seqs is not a flag; did you mean --max_batch_size?"),
        ("serve agent --enforce-eager", "--enforce_eager is not a flag; write it as an argument of vLLM's"),
        ("chat --use_vllm", "--use_vllm is not a flag; see rollgrad chat --help."),
        ("doctor --learning_rate 1", "--learning_rate is not a flag; see rollgrad doctor --help."),
        ("serve reward --prt 1", "did you mean --port?"),
    ],
)
def test_other_commands_are_not_told_of_training(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in errors(command.split(), capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actor:\n  lr: 1e-6\n", "actor.lr is not a setting; did you mean actor.adam.lr?"),
        ("learning_rate: 1e-6\n", "learning_rate is not a setting; did you mean actor.adam.lr?"),
        ("num_generations: 8\n", "did you mean rollout.n_samples_per_prompt?"),
        ("trainer:\n  total_epochs: 3\n", "trainer.total_epochs is not a setting; did you mean train.num_episodes?"),
        (
            "algorithm:\n  kl_ctrl:\n    kl_coef: 1\n",
            "algorithm.kl_ctrl.kl_coef is not a setting; write --algo.kl.init_coef, if",
        ),
    ],
)
def test_keys_of_other_tools(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert message in errors(["train", "rl", "--config", str(tmp_path / "run.yaml")], capsys)


@pytest.mark.parametrize("command", [*OTHER_COMMANDS, "vllm-serve", "sft --model x"])
def test_commands_of_other_tools(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = errors(command.split(), capsys)
    assert error.count("\n") == 1
    assert "did you mean" not in error
    assert any(f"rollgrad {known}" in error for known in (*COMMANDS, "--help", "--version")) or "vllm serve" in error


@pytest.mark.parametrize(
    ("given", "known"),
    [("trian rl", "train rl"), ("TRAIN KTO", "train kto"), ("servereward", "serve reward"), ("evl", "eval")],
)
def test_misspelt_commands(given: str, known: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"did you mean rollgrad {known}?" in errors(given.split(), capsys)


def test_openrlhf_s_own_suggestions_stay(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --init_kl_coef?" in errors(["openrlhf", "--init_kl_coeff", "1"], capsys)
    assert IMPLIED.keys().isdisjoint(FLAT)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            ["python3", "-m", "verl.trainer.main_ppo", "data.train_batch_size=8"],
            "rollgrad verl before it",
        ),
        (["accelerate", "launch", "trl/scripts/grpo.py"], "rollgrad trl before it"),
        (["deepspeed", "--module", "openrlhf.cli.train_sft"], "rollgrad openrlhf before it"),
    ],
)
def test_a_line_that_starts_another_tool_is_told_what_reads_it(words: list[str], advice: str) -> None:
    assert advice in unknown_command(words, ["train rl", "trl"])


def test_the_words_of_a_name_may_be_in_another_order() -> None:
    assert nearest("vllm_enable_is_correction", ["enable_vllm", "enable_vllm_is_correction"]) == (
        "enable_vllm_is_correction"
    )


def test_a_path_without_a_flag_is_told_its_flag(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    assert unknown_flag(f"{tmp_path}/run.yaml", [*SETTINGS, "config"], "train rl").endswith(
        f"did you mean --config {tmp_path}/run.yaml?"
    )
    assert unknown_flag(str(tmp_path), ["model", "prompt"], "chat").endswith(f"did you mean --model {tmp_path}?")
    assert "did you mean" not in unknown_flag("missing.yaml", ["config"], "train rl")
    assert "models stand before all flags" in unknown_flag(str(tmp_path), ["config"], "eval")
    (tmp_path / "rows.jsonl.gz").touch()
    for command in ("eval", "train rl"):
        told = unknown_flag(f"{tmp_path}/rows.jsonl.gz", ["config"], command)
        assert told.endswith("datasets stand in one word, with commas between them, and a pattern of files in quotes.")


def test_a_key_with_dots_is_told_how_a_file_nests() -> None:
    assert unknown_key("actor.adam.lr", 1e-6, SETTINGS).endswith("write actor: {adam: {lr: VALUE}}.")
    assert "did you mean" in unknown_key("actor.adam-lr", 1e-6, ["actor.adam_lr"])


@pytest.mark.parametrize("name", ["algo.losses.soft.tau", "algo.estimators.mine.limit"])
def test_settings_that_a_file_brings_are_looked_for_in_the_file(name: str) -> None:
    told = "it is known where --algo.extension_path names the file or module that brings it."
    assert unknown_flag(f"--{name}", SETTINGS, "train rl") == f"--{name} is not a flag; {told}"
    section, last = name.rsplit(".", 1)
    assert unknown_key(section, {last: 2}, SETTINGS).endswith(told)
    assert unknown_flag(f"--{name}s", [*SETTINGS, name], "train rl").endswith(f"did you mean --{name}?")
