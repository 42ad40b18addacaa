"""The settings of verl's programs that `rollgrad verl` translates: those of `names_of_verl`, and of these the kinds and
verl's defaults where several are translated together.
"""

from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args, get_origin

import attrs

from rollgrad.application.settings.run import RLConfig
from rollgrad.entrypoints.names.flags import Flag, Kind, Program
from rollgrad.entrypoints.names.names_of_verl import VERL
from rollgrad.entrypoints.names.names_of_verl_seldom_set import ACTOR, MODEL, REF, ROLLOUT, SELDOM

SWITCH, INTEGER, NUMBER, TEXT, WORDS = Kind.SWITCH, Kind.INTEGER, Kind.NUMBER, Kind.TEXT, Kind.WORDS

IS, RS = "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_rs"
"""Settings of verl's off-policy correction: weights, and masks."""

SAYS_ALWAYS = ("True", "true")
"""Values with which a switch is on."""

DONE: frozenset[str] = frozenset(
    {
        *(f"{MODEL}.use_remove_padding", "critic.model.use_remove_padding", f"{ACTOR}.use_remove_padding"),
        *("reward_model.model.use_remove_padding", f"{ACTOR}.use_prefix_grouper", "trainer.balance_batch"),
        *("data.return_raw_chat", "data.shuffle", "data.return_multi_modal_inputs", "actor_rollout_ref.hybrid_engine"),
        *(f"{ROLLOUT}.free_cache_engine", f"{ROLLOUT}.enable_prefix_caching", f"{ROLLOUT}.calculate_log_probs"),
        *(f"{ROLLOUT}.do_sample", "critic.enable", "critic.use_dynamic_bsz"),
        *(f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{REF}.log_prob_use_dynamic_bsz"),
    }
)
"""Switches that every run has on, whatever is set."""

IDLE: Mapping[str, tuple[str, ...]] = {
    f"{ACTOR}.fsdp_config.fsdp_size": ("-1",),
    f"{REF}.fsdp_config.fsdp_size": ("-1",),
    "engine.fsdp_size": ("-1",),
    f"{ROLLOUT}.mode": ("async", "sync"),
    f"{ROLLOUT}.agent.default_agent_loop": ("single_turn_agent", "tool_agent"),
    f"{ROLLOUT}.over_sample_rate": ("0", "0.0"),
    "trainer.device": ("cuda",),
    "data.dataloader_num_workers": ("0",),
    "data.filter_overlong_prompts_workers": ("1",),
    "reward_model.reward_manager": ("naive", "dapo", "prime", "batch"),
    "reward.reward_manager.name": ("naive", "dapo", "prime", "batch"),
    "reward.reward_manager.source": ("register",),
}
"""Values that ask for nothing."""

COLLECTED = ("data.apply_chat_template_kwargs", f"{ROLLOUT}.engine_kwargs.vllm")
"""Sections whose names are another library's or a template's."""

OFFLOADS = tuple(
    f"{section}.{key}"
    for section in (
        *(f"{ACTOR}.fsdp_config", f"{ACTOR}.megatron", "critic.fsdp", "critic.model.fsdp_config", "critic.megatron"),
    )
    for key in ("param_offload", "optimizer_offload", "grad_offload")
)
"""Switches that move what trains to the CPU's memory while engines sample."""

AS_ACTOR: Mapping[str, str] = {
    "critic.model.enable_gradient_checkpointing": f"{MODEL}.enable_gradient_checkpointing",
    "critic.model.enable_activation_offload": f"{MODEL}.enable_activation_offload",
    "critic.strategy": f"{ACTOR}.strategy",
    "critic.ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{REF}.ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
}
"""Settings of other models that are the actor's here, and the actor's."""

TEACHING = "distillation"
TEACHER = f"{TEACHING}.teacher_models.teacher_model.model_path"
"""Section of what is learned from a teacher, and the setting that names it."""

_KL_CONTROL = "algorithm.kl_ctrl"
_OVERLONG = (
    *("reward_model.overlong_buffer", "custom_reward_function.overlong_buffer"),
    *("reward_model.reward_kwargs.overlong_buffer_cfg", "reward.reward_kwargs.overlong_buffer_cfg"),
    "reward.reward_manager.reward_kwargs.overlong_buffer_cfg",
)

TOGETHER: Mapping[str, Flag] = {
    # The algorithm
    "algorithm.adv_estimator": Flag(TEXT, default="gae"),
    "algorithm.norm_adv_by_std_in_grpo": Flag(SWITCH, default=True),
    "algorithm.gamma": Flag(NUMBER, default=1.0),
    "algorithm.lam": Flag(NUMBER, default=1.0),
    "algorithm.use_kl_in_reward": Flag(SWITCH),
    "algorithm.kl_penalty": Flag(TEXT, default="kl"),
    f"{_KL_CONTROL}.kl_coef": Flag(NUMBER, default=0.001),
    f"{_KL_CONTROL}.type": Flag(TEXT, default="fixed"),
    f"{_KL_CONTROL}.horizon": Flag(NUMBER, default=10000.0),
    f"{_KL_CONTROL}.target_kl": Flag(NUMBER, default=0.1),
    f"{ACTOR}.use_kl_loss": Flag(SWITCH),
    f"{ACTOR}.kl_loss_coef": Flag(NUMBER, default=0.001),
    f"{ACTOR}.kl_loss_type": Flag(TEXT, default="low_var_kl"),
    "algorithm.filter_groups.enable": Flag(SWITCH),
    "algorithm.filter_groups.metric": Flag(TEXT, default="reward"),
    "algorithm.filter_groups.max_num_gen_batches": Flag(INTEGER, default=0),
    IS: Flag(TEXT),
    f"{IS}_threshold": Flag(TEXT, default="2.0"),
    RS: Flag(TEXT),
    f"{RS}_threshold": Flag(TEXT),
    "algorithm.rollout_correction.bypass_mode": Flag(SWITCH),
    f"{ACTOR}.policy_loss.loss_mode": Flag(TEXT, default="vanilla"),
    f"{ACTOR}.clip_ratio": Flag(NUMBER, default=0.2),
    f"{ACTOR}.clip_ratio_low": Flag(NUMBER, default=0.2),
    f"{ACTOR}.clip_ratio_high": Flag(NUMBER, default=0.2),
    f"{ACTOR}.clip_ratio_c": Flag(NUMBER, default=3.0),
    f"{ACTOR}.tau_pos": Flag(NUMBER, default=1.0),
    f"{ACTOR}.tau_neg": Flag(NUMBER, default=1.05),
    f"{ACTOR}.policy_loss.clip_cov_ratio": Flag(NUMBER, default=0.0002),
    f"{ACTOR}.policy_loss.clip_cov_lb": Flag(NUMBER, default=1.0),
    f"{ACTOR}.policy_loss.clip_cov_ub": Flag(NUMBER, default=5.0),
    f"{ACTOR}.policy_loss.kl_cov_ratio": Flag(NUMBER, default=0.0002),
    f"{ACTOR}.policy_loss.ppo_kl_coef": Flag(NUMBER, default=0.1),
    f"{ACTOR}.policy_loss.dro_beta": Flag(NUMBER),
    f"{ACTOR}.loss_agg_mode": Flag(TEXT, default="token-mean"),
    f"{ACTOR}.loss_scale_factor": Flag(NUMBER),
    f"{ACTOR}.router_replay.mode": Flag(TEXT, default="disabled"),
    "algorithm.gigpo.step_advantage_w": Flag(NUMBER),
    # A teacher
    TEACHING: Flag(WORDS, reason="the teacher is a reference in the actor's processes: --ref.url has a server of it"),
    f"{TEACHING}.enabled": Flag(SWITCH),
    TEACHER: Flag(TEXT),
    f"{TEACHING}.teacher_key": Flag(
        TEXT, reason="teachers are found by the column datasource or data_source", idle=("data_source",)
    ),
    f"{TEACHING}.distillation_loss.loss_mode": Flag(TEXT, default="k3"),
    f"{TEACHING}.distillation_loss.topk": Flag(INTEGER, default=32),
    f"{TEACHING}.distillation_loss.use_task_rewards": Flag(SWITCH, default=True),
    f"{TEACHING}.distillation_loss.use_policy_gradient": Flag(SWITCH, default=False),
    f"{TEACHING}.distillation_loss.distillation_loss_coef": Flag(NUMBER, default=1.0),
    f"{TEACHING}.distillation_loss.clip_ratio_low": Flag(NUMBER, default=0.2),
    f"{TEACHING}.distillation_loss.clip_ratio_high": Flag(NUMBER, default=0.2),
    f"{TEACHING}.distillation_loss.clip_ratio": Flag(
        NUMBER, reason="clip_ratio_low and clip_ratio_high say it, in verl too", idle=("0.2",)
    ),
    f"{TEACHING}.distillation_loss.policy_loss_mode": Flag(TEXT, reason="the loss is PPO's", idle=("vanilla",)),
    **{
        f"{TEACHING}.distillation_loss.{key}_clamp": Flag(
            NUMBER, reason="log-ratios of sampled tokens are held within 10 nats", idle=idle
        )
        for key, idle in {"loss_max": ("10", "10.0"), "log_prob_min": ("-10", "-10.0")}.items()
    },
    # Optimizers
    f"{ACTOR}.optim.weight_decay": Flag(NUMBER, "actor.adam.weight_decay", default=0.01),
    f"{ACTOR}.optim.betas": Flag(Kind.PAIR, "actor.adam.betas", default=[0.9, 0.999]),
    f"{ACTOR}.optim.optimizer": Flag(TEXT, default="AdamW"),
    f"{ACTOR}.grad_clip": Flag(NUMBER, "actor.max_norm"),
    "critic.optim.lr": Flag(NUMBER),
    "critic.optim.optimizer": Flag(TEXT, default="AdamW"),
    **{
        f"critic.optim.{key}": Flag(WORDS, reason="it is as the actor's")
        for key in ("clip_grad", "total_training_steps")
    },
    "critic.optim.weight_decay": Flag(NUMBER, default=0.01),
    "critic.optim.betas": Flag(Kind.PAIR, default=[0.9, 0.999]),
    "critic.grad_clip": Flag(NUMBER),
    "critic.cliprange_value": Flag(NUMBER),
    "critic.model.path": Flag(TEXT),
    "trainer.critic_warmup": Flag(INTEGER, idle=("0",), default=0),
    **{
        f"{section}.optim.{key}": flag
        for section in (ACTOR, "critic")
        for key, flag in {
            "lr_scheduler_type": Flag(TEXT),
            "warmup_style": Flag(TEXT),
            "min_lr_ratio": Flag(NUMBER, default=0.0),
            "lr_warmup_steps_ratio": Flag(NUMBER, default=0.0),
            "lr_warmup_steps": Flag(INTEGER),
        }.items()
    },
    f"{ACTOR}.optim.total_training_steps": Flag(
        INTEGER, reason="trainer.total_training_steps says how long the run is", idle=("-1",)
    ),
    # The model
    f"{MODEL}.enable_gradient_checkpointing": Flag(SWITCH, "actor.gradient_checkpointing", default=True),
    f"{MODEL}.lora_rank": Flag(INTEGER),
    f"{MODEL}.lora.rank": Flag(INTEGER),
    f"{MODEL}.lora_alpha": Flag(INTEGER),
    f"{MODEL}.lora.alpha": Flag(INTEGER),
    f"{MODEL}.lora.dropout": Flag(NUMBER),
    f"{MODEL}.target_modules": Flag(WORDS),
    f"{MODEL}.lora.target_modules": Flag(WORDS),
    **{
        name: Flag(SWITCH, reason="it compiles verl's entropy of logits, which is computed in chunks here")
        for name in (f"{ACTOR}.use_torch_compile", f"{ACTOR}.fsdp_config.use_torch_compile")
    },
    f"{ROLLOUT}.dtype": Flag(TEXT, reason="engines compute in the actor's format", idle=("bfloat16",)),
    **{
        name: Flag(WORDS, reason="it is as the actor's", idle=("-1", "1", *SAYS_ALWAYS))
        for name in (
            *AS_ACTOR,
            *("trainer.max_critic_ckpt_to_keep", "reward_model.n_gpus_per_node"),
            *("reward.reward_model.n_gpus_per_node", "critic.checkpoint.async_save"),
        )
    },
    # Batches and lengths
    "data.train_batch_size": Flag(INTEGER, "rollout.batch_size", default=1024),
    "data.gen_batch_size": Flag(INTEGER),
    f"{ROLLOUT}.n": Flag(INTEGER, "rollout.n_samples_per_prompt", default=1),
    f"{ACTOR}.ppo_mini_batch_size": Flag(INTEGER, default=256),
    f"{ACTOR}.ppo_micro_batch_size": Flag(INTEGER),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": Flag(INTEGER),
    f"{ACTOR}.use_dynamic_bsz": Flag(SWITCH),
    f"{ACTOR}.ppo_max_token_len_per_gpu": Flag(INTEGER, default=16384),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": Flag(INTEGER),
    f"{REF}.log_prob_max_token_len_per_gpu": Flag(INTEGER),
    "data.max_prompt_length": Flag(INTEGER, "data.max_prompt_tokens", default=512),
    "data.max_response_length": Flag(INTEGER, "rollout.max_new_tokens", default=512),
    f"{ROLLOUT}.top_k": Flag(INTEGER),
    "trainer.total_epochs": Flag(INTEGER, default=30),
    "trainer.total_training_steps": Flag(INTEGER),
    # The data
    "data.train_files": Flag(WORDS),
    "data.val_files": Flag(WORDS),
    "data.prompt_key": Flag(TEXT, "data.input_key", default="prompt"),
    "data.image_key": Flag(TEXT, "data.image_key"),
    "data.train_max_samples": Flag(INTEGER),
    "data.val_max_samples": Flag(INTEGER),
    "data.filter_overlong_prompts": Flag(SWITCH),
    "data.truncation": Flag(TEXT, default="error"),
    # Rewards
    "custom_reward_function.path": Flag(TEXT),
    "custom_reward_function.name": Flag(TEXT, default="compute_score"),
    "reward_model.enable": Flag(SWITCH),
    "reward_model.model.path": Flag(TEXT),
    "reward_model.model.fsdp_config.param_offload": Flag(SWITCH),
    **{f"{_OVERLONG[0]}.{key}": flag for key, flag in {"enable": Flag(SWITCH), "len": Flag(INTEGER)}.items()},
    f"{_OVERLONG[0]}.penalty_factor": Flag(NUMBER, default=1.0),
    f"{_OVERLONG[0]}.log": Flag(SWITCH, reason="the penalty is a metric of every rollout", idle=SAYS_ALWAYS),
    # Evaluation
    f"{ROLLOUT}.val_kwargs.temperature": Flag(NUMBER, default=0.0),
    f"{ROLLOUT}.val_kwargs.top_p": Flag(NUMBER, default=1.0),
    f"{ROLLOUT}.val_kwargs.top_k": Flag(INTEGER, default=-1),
    f"{ROLLOUT}.val_kwargs.n": Flag(INTEGER, default=1),
    f"{ROLLOUT}.val_kwargs.do_sample": Flag(SWITCH, default=False),
    "trainer.test_freq": Flag(TEXT, default="-1"),
    "trainer.val_before_train": Flag(SWITCH, default=True),
    # Agents
    f"{ROLLOUT}.multi_turn.enable": Flag(SWITCH),
    f"{ROLLOUT}.multi_turn.tool_config_path": Flag(TEXT),
    f"{ROLLOUT}.multi_turn.function_tool_path": Flag(TEXT),
    f"{ROLLOUT}.multi_turn.interaction_config_path": Flag(TEXT),
    f"{ROLLOUT}.multi_turn.max_assistant_turns": Flag(INTEGER),
    f"{ROLLOUT}.multi_turn.max_user_turns": Flag(INTEGER),
    f"{ROLLOUT}.multi_turn.max_tool_response_length": Flag(INTEGER),
    f"{ROLLOUT}.multi_turn.tool_response_truncate_side": Flag(TEXT),
    # Processes and engines
    "trainer.nnodes": Flag(INTEGER, default=1),
    "trainer.n_gpus_per_node": Flag(INTEGER, default=8),
    "model_engine": Flag(TEXT),
    "trainer.v1.trainer_mode": Flag(TEXT, default="sync"),
    "trainer.v1.colocate_async.num_warmup_batches": Flag(NUMBER, default=1.0),
    "trainer.v1.separate_async.num_warmup_batches": Flag(NUMBER, default=1.0),
    f"{ROLLOUT}.nnodes": Flag(INTEGER, idle=("0",), default=0),
    f"{ROLLOUT}.n_gpus_per_node": Flag(INTEGER),
    "actor_rollout_ref.nccl_timeout": Flag(NUMBER),
    "trainer.ray_wait_register_center_timeout": Flag(
        NUMBER, reason="processes are waited for as long as cluster.timeout says"
    ),
    f"{ACTOR}.strategy": Flag(TEXT),
    **{name: Flag(SWITCH) for name in OFFLOADS},
    f"{ACTOR}.fsdp_config.offload_policy": Flag(SWITCH),
    f"{REF}.fsdp_config.param_offload": Flag(SWITCH),
    f"{REF}.megatron.param_offload": Flag(SWITCH),
    f"{ACTOR}.ulysses_sequence_parallel_size": Flag(INTEGER, default=1),
    f"{ACTOR}.megatron.tensor_model_parallel_size": Flag(INTEGER, default=1),
    f"{ACTOR}.megatron.expert_model_parallel_size": Flag(INTEGER, default=1),
    f"{ROLLOUT}.name": Flag(TEXT, default="vllm"),
    f"{ROLLOUT}.gpu_memory_utilization": Flag(NUMBER, default=0.5),
    f"{ROLLOUT}.tensor_model_parallel_size": Flag(INTEGER, default=2),
    f"{ROLLOUT}.pipeline_model_parallel_size": Flag(INTEGER, default=1),
    f"{ROLLOUT}.max_num_batched_tokens": Flag(INTEGER),
    f"{ROLLOUT}.enforce_eager": Flag(SWITCH),
    f"{ROLLOUT}.enable_chunked_prefill": Flag(SWITCH),
    **{name: Flag(WORDS) for name in COLLECTED},
    # The run's files
    "trainer.default_local_dir": Flag(TEXT),
    "trainer.save_freq": Flag(TEXT, default="-1"),
    "trainer.max_actor_ckpt_to_keep": Flag(INTEGER),
    "trainer.resume_mode": Flag(TEXT, default="auto"),
    "trainer.resume_from_path": Flag(TEXT),
    "trainer.logger": Flag(WORDS),
    "trainer.project_name": Flag(TEXT, default="verl_examples"),
    "trainer.experiment_name": Flag(TEXT, default="gsm8k"),
}
"""Settings that are translated together with others, or have other defaults in verl."""

SAME: Mapping[str, str] = {
    **{
        f"{other}.{key}": f"{_OVERLONG[0]}.{key}"
        for other in _OVERLONG[1:]
        for key in ("enable", "len", "penalty_factor", "log")
    },
    **{f"reward.{name}": name for name in TOGETHER if name.startswith("custom_reward_function.")},
    f"{TEACHING}.teacher_model.model_path": TEACHER,
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "trainer.seed": f"{ROLLOUT}.seed",
    "reward.reward_model.enable": "reward_model.enable",
    "reward.reward_model.model_path": "reward_model.model.path",
    f"{ROLLOUT}.multi_turn.max_turns": f"{ROLLOUT}.multi_turn.max_assistant_turns",
    "data.tool_config_path": f"{ROLLOUT}.multi_turn.tool_config_path",
    "data.function_tool_path": f"{ROLLOUT}.multi_turn.function_tool_path",
    f"{ACTOR}.optim.clip_grad": f"{ACTOR}.grad_clip",
    f"{ACTOR}.fsdp_config.strategy": f"{ACTOR}.strategy",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ACTOR}.megatron.context_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    **{f"{model}.optim.lr_decay_style": f"{model}.optim.lr_scheduler_type" for model in (ACTOR, "critic")},
    "critic.nccl_timeout": "actor_rollout_ref.nccl_timeout",
    "algorithm.rollout_is": IS,
    "algorithm.rollout_is_threshold": f"{IS}_threshold",
    f"{ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{ROLLOUT}.response_length": "data.max_response_length",
}
"""Other names of settings: of other releases, and of the same thing in another section."""

_UNITS = {bool: SWITCH, int: INTEGER, float: NUMBER}


def kind_of(setting: str) -> Kind:
    """Returns the kind of one of our settings.

    >>> kind_of("rollout.batch_size"), kind_of("eval.max_samples"), kind_of("actor.lora.target_modules")
    (<Kind.INTEGER: 2>, <Kind.INTEGER: 2>, <Kind.WORDS: 5>)
    """
    kind: Any = RLConfig
    for name in setting.split("."):
        kind = attrs.fields_dict(kind)[name].type
    parts = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if any(get_origin(part) is tuple for part in parts):
        return WORDS if any(str in get_args(part) for part in parts) else Kind.PAIR
    return next((unit for part, unit in _UNITS.items() if part in parts), TEXT)


def _flag(name: str, answer: str) -> Flag:
    idle = (*IDLE.get(name, ()), *(SAYS_ALWAYS if name in DONE else ()))
    if " " in answer:
        return Flag(WORDS, reason=answer.rstrip("."), idle=idle)
    return Flag(kind_of(answer), answer, idle=idle)


_FLAGS = {**{name: _flag(name, answer) for name, answer in {**VERL, **SELDOM}.items()}, **TOGETHER}

PPO = Program(
    name="verl.trainer.main_ppo",
    flags={name: flag for name, flag in _FLAGS.items() if name not in SAME},
    names={**{name: (name,) for name in _FLAGS}, **{name: (same,) for name, same in SAME.items()}},
)
"""verl's trainer by reinforcement learning, and the recipe DAPO's."""
