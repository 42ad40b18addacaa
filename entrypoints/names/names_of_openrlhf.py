"""The flags of `openrlhf.cli.train_ppo_ray`: the older flat names, and what each dotted name becomes here."""

from rollgrad.entrypoints.names.flags import Flag, Kind, Program

OFFLOAD = "models stay where they are loaded"
COLLECTIVES = "NCCL is called without Ray's collectives, which leaves the weights the same"
MICRO = "micro-batches are filled up to train.max_tokens_per_micro_batch tokens, which leaves the gradient the same"
DEEPCOMPILE = "each batch has a layout and a number of passes of its own, which DeepCompile does not take"
KERNELS = "kernels are chosen for the machine, which leaves the results the same up to rounding"
PLACES = "data and models come from the Hugging Face hub or from disk: name a directory"
REMOVED = "OpenRLHF itself has dropped it"

SWITCH, INTEGER, NUMBER, TEXT, PAIR = Kind.SWITCH, Kind.INTEGER, Kind.NUMBER, Kind.TEXT, Kind.PAIR


def _model(name: str) -> dict[str, Flag]:
    """Returns the flags that actor and critic have in common."""
    return {
        f"{name}.adam.lr": Flag(NUMBER, f"{name}.adam.lr"),
        f"{name}.adam.betas": Flag(PAIR, f"{name}.adam.betas"),
        f"{name}.adam.eps": Flag(NUMBER, f"{name}.adam.eps"),
        f"{name}.adam.weight_decay": Flag(NUMBER, f"{name}.adam.weight_decay"),
        f"{name}.max_norm": Flag(NUMBER, f"{name}.max_norm"),
        f"{name}.lr_scheduler": Flag(TEXT),
        f"{name}.lr_warmup_ratio": Flag(NUMBER),
        f"{name}.min_lr_ratio": Flag(NUMBER),
        f"{name}.optim": Flag(TEXT),
        f"{name}.muon.lr": Flag(NUMBER),
        f"{name}.muon.momentum": Flag(NUMBER),
        f"{name}.muon.ns_steps": Flag(INTEGER, always=True),
        f"{name}.muon.nesterov": Flag(SWITCH, always=True),
        f"{name}.muon.no_nesterov": Flag(SWITCH, reason="Muon's momentum is Nesterov's, in DeepSpeed whatever is set"),
    }


FLAGS: dict[str, Flag] = {
    **_model("actor"),
    **_model("critic"),
    "actor.model_name_or_path": Flag(TEXT, "actor.model_name_or_path"),
    "actor.policy_loss_type": Flag(TEXT),
    "actor.loss_agg_mode": Flag(TEXT),
    "actor.eps_clip": Flag(NUMBER),
    "actor.eps_clip_low_high": Flag(PAIR),
    "actor.dual_clip": Flag(NUMBER),
    "actor.entropy_coef": Flag(NUMBER, "actor.entropy_coef"),
    "actor.aux_loss_coef": Flag(NUMBER, "actor.aux_loss_coef"),
    "actor.gradient_checkpointing_enable": Flag(SWITCH, "actor.gradient_checkpointing"),
    "actor.gradient_checkpointing_reentrant": Flag(SWITCH, reason=KERNELS),
    "actor.freeze_visual_encoder": Flag(SWITCH),
    "critic.model_name_or_path": Flag(TEXT),
    "critic.value_clip": Flag(NUMBER, "critic.value_clip"),
    "critic.freezing_steps": Flag(INTEGER),
    "critic.save_value_network": Flag(SWITCH),
    "algo.advantage.estimator": Flag(TEXT, "algo.advantage.estimator"),
    "algo.advantage.gamma": Flag(NUMBER),
    "algo.advantage.lambd": Flag(NUMBER),
    "algo.advantage.no_std_norm": Flag(SWITCH),
    "algo.advantage.is_correction_enable": Flag(SWITCH),
    "algo.advantage.is_correction_gating": Flag(TEXT),
    "algo.advantage.is_correction_level": Flag(TEXT),
    "algo.advantage.is_correction_mode": Flag(TEXT),
    "algo.advantage.is_correction_threshold": Flag(Kind.BOUNDS),
    "algo.advantage.is_correction_type": Flag(TEXT),
    "algo.kl.init_coef": Flag(NUMBER),
    "algo.kl.estimator": Flag(TEXT),
    "algo.kl.unbiased_gradient": Flag(SWITCH),
    "algo.kl.use_loss": Flag(SWITCH),
    "algo.kl.target": Flag(NUMBER),
    "algo.kl.horizon": Flag(NUMBER),
    "algo.dynamic_filtering_enable": Flag(SWITCH),
    "algo.dynamic_filtering_range": Flag(PAIR),
    "reward.model_name_or_path": Flag(TEXT),
    "reward.remote_url": Flag(TEXT),
    "reward.normalize_enable": Flag(SWITCH),
    "reward.clip_range": Flag(PAIR),
    "reward.overlong_buffer_len": Flag(INTEGER, "reward.overlong_buffer_len"),
    "reward.overlong_penalty_factor": Flag(NUMBER),
    "reward.stop_properly_penalty_coef": Flag(NUMBER, "reward.stop_properly_penalty_coef"),
    "rollout.batch_size": Flag(INTEGER),
    "rollout.n_samples_per_prompt": Flag(INTEGER),
    "rollout.vllm_generate_batch_size": Flag(INTEGER),
    "rollout.temperature": Flag(NUMBER, "rollout.temperature"),
    "rollout.top_p": Flag(NUMBER, "rollout.top_p"),
    "rollout.max_new_tokens": Flag(INTEGER),
    "rollout.micro_batch_size": Flag(INTEGER),
    "rollout.max_tokens_per_gpu": Flag(INTEGER),
    "rollout.tasks_per_gpu": Flag(INTEGER),
    "train.batch_size": Flag(INTEGER),
    "train.micro_batch_size": Flag(INTEGER),
    "train.max_epochs": Flag(INTEGER, "train.max_epochs"),
    "train.num_episodes": Flag(INTEGER, "train.num_episodes"),
    "train.seed": Flag(INTEGER, "train.seed"),
    "train.full_determinism_enable": Flag(SWITCH, "actor.deterministic"),
    "train.dynamic_batch_enable": Flag(SWITCH),
    "train.max_tokens_per_gpu": Flag(INTEGER),
    "train.async_enable": Flag(SWITCH),
    "train.async_queue_size": Flag(INTEGER),
    "train.partial_rollout_enable": Flag(SWITCH),
    "train.agent_func_path": Flag(TEXT, "train.agent_func_path"),
    "train.enable_ema": Flag(SWITCH, "train.enable_ema"),
    "train.ema_beta": Flag(NUMBER),
    "train.colocate_all": Flag(SWITCH),
    "train.colocate_actor_ref": Flag(SWITCH),
    "train.colocate_critic_reward": Flag(SWITCH),
    **{
        f"{model}.{key}": Flag(INTEGER)
        for model in ("actor", "ref", "critic", "reward")
        for key in ("num_nodes", "num_gpus_per_node")
    },
    "ref.offload": Flag(SWITCH),
    "reward.offload": Flag(SWITCH),
    "vllm.num_engines": Flag(INTEGER),
    "vllm.tensor_parallel_size": Flag(INTEGER),
    "vllm.gpu_memory_utilization": Flag(NUMBER),
    "vllm.enable_sleep": Flag(SWITCH),
    "vllm.enable_prefix_caching": Flag(SWITCH, always=True),
    "vllm.enforce_eager": Flag(SWITCH),
    "vllm.sync_backend": Flag(TEXT),
    "vllm.sync_with_ray": Flag(SWITCH, reason=COLLECTIVES),
    "ds.zero_stage": Flag(INTEGER, "ds.zero_stage"),
    "ds.adam_offload": Flag(SWITCH, "ds.adam_offload"),
    **{
        f"ds.{key}": Flag(kind, reason=reason, idle=idle)
        for key, (kind, reason, idle) in {
            "ring_attn_head_stride": (INTEGER, "attention is divided by heads, without a ring", ("1",)),
            "deepcompile": (SWITCH, DEEPCOMPILE, ()),
            "use_liger_kernel": (SWITCH, KERNELS, ()),
            "attn_implementation": (TEXT, KERNELS, ()),
            "experts_implementation": (TEXT, KERNELS, ()),
        }.items()
    },
    "ds.enable_sleep": Flag(SWITCH),
    "ds.zpg": Flag(INTEGER, idle=("1",)),
    "ds.overlap_comm": Flag(SWITCH),
    "ds.grad_accum_dtype": Flag(TEXT, idle=("fp32",)),
    "ds.use_universal_ckpt": Flag(SWITCH, always=True),
    "ds.local_rank": Flag(INTEGER, always=True),
    "ds.packing_samples": Flag(SWITCH, always=True),
    "ds.value_head_prefix": Flag(TEXT, always=True),
    "ds.tensor_parallel_size": Flag(INTEGER, "ds.tensor_parallel_size", idle=("1",)),
    "ds.ring_attn_size": Flag(INTEGER, "ds.sequence_parallel_size", idle=("1",)),
    "ds.lora.rank": Flag(INTEGER, idle=("0",)),
    "ds.lora.alpha": Flag(INTEGER),
    "ds.lora.dropout": Flag(NUMBER, idle=("0", "0.0")),
    "ds.lora.target_modules": Flag(Kind.WORDS),
    "ds.load_in_4bit": Flag(SWITCH),
    "ds.param_dtype": Flag(TEXT),
    "data.prompt_dataset": Flag(TEXT, "data.prompt_dataset"),
    "data.prompt_probs": Flag(Kind.PROBABILITIES, "data.prompt_probs"),
    "data.prompt_split": Flag(TEXT, "data.prompt_split"),
    "data.input_key": Flag(TEXT, "data.input_key"),
    "data.label_key": Flag(TEXT, "data.label_key"),
    "data.input_template": Flag(TEXT),
    "data.apply_chat_template": Flag(SWITCH),
    "data.tokenizer_chat_template": Flag(TEXT),
    "data.max_samples": Flag(INTEGER),
    "data.max_len": Flag(INTEGER),
    "data.prompt_max_len": Flag(INTEGER),
    "data.disable_fast_tokenizer": Flag(SWITCH, reason="transformers has one tokenizer for a model, the fast one"),
    "data.dataloader_num_workers": Flag(INTEGER, reason="prompts are read in the process itself", idle=("0",)),
    "data.image_key": Flag(TEXT),
    "data.max_images_per_prompt": Flag(INTEGER, idle=("0",)),
    "eval.dataset": Flag(TEXT),
    "eval.split": Flag(TEXT),
    "eval.steps": Flag(INTEGER),
    "eval.temperature": Flag(NUMBER),
    "eval.n_samples_per_prompt": Flag(INTEGER),
    "ckpt.output_dir": Flag(TEXT, "ckpt.output_dir"),
    "ckpt.save_steps": Flag(INTEGER),
    "ckpt.save_hf": Flag(SWITCH),
    "ckpt.path": Flag(TEXT),
    "ckpt.max_num": Flag(INTEGER),
    "ckpt.max_mem": Flag(NUMBER),
    "ckpt.load_enable": Flag(SWITCH),
    "ckpt.disable_ds": Flag(SWITCH),
    "ckpt.best_metric_key": Flag(TEXT, idle=("none",)),
    "logger.tensorboard_dir": Flag(TEXT, "logger.tensorboard_dir"),
    "logger.logging_steps": Flag(INTEGER, idle=("1",)),
    **{f"logger.wandb.{key}": Flag(TEXT) for key in ("key", "org", "group", "project", "run_name")},
    "use_ms": Flag(SWITCH, reason=PLACES),
    "ptx_coef": Flag(NUMBER, reason=REMOVED),
    "pretrain_data": Flag(TEXT, reason=REMOVED),
    "pretrain_data_probs": Flag(TEXT, reason=REMOVED),
    "actor_init_on_gpu": Flag(SWITCH, reason=REMOVED),
    "perf": Flag(SWITCH, reason=REMOVED),
}
"""Flags by the dotted name of the newer release; a few exist in the older one only."""


def _same(section: str, *names: str) -> dict[str, tuple[str, ...]]:
    return {name: (f"{section}.{name}",) for name in names}


def _both(**names: str) -> dict[str, tuple[str, ...]]:
    """Flags that the older release gave actor and critic alike."""
    return {flat: (f"actor.{key}", f"critic.{key}") for flat, key in names.items()}


FLAT: dict[str, tuple[str, ...]] = {
    "pretrain": ("actor.model_name_or_path",),
    "critic_pretrain": ("critic.model_name_or_path",),
    "reward_pretrain": ("reward.model_name_or_path",),
    **{
        f"{model}_{key}": (f"{model}.{key}",)
        for model in ("actor", "ref", "critic", "reward")
        for key in ("num_nodes", "num_gpus_per_node")
    },
    "colocate_all_models": ("train.colocate_all",),
    **_same("train", "colocate_actor_ref", "colocate_critic_reward"),
    **{
        f"vllm_{key}": (f"vllm.{key}",)
        for key in (
            *("num_engines", "tensor_parallel_size", "sync_backend", "sync_with_ray", "enable_sleep"),
            "gpu_memory_utilization",
        )
    },
    **_same("vllm", "enable_prefix_caching", "enforce_eager"),
    "advantage_estimator": ("algo.advantage.estimator",),
    **_same("algo.advantage", "gamma", "lambd"),
    "no_advantage_std_norm": ("algo.advantage.no_std_norm",),
    "enable_vllm_is_correction": ("algo.advantage.is_correction_enable",),
    "vllm_is_truncated_threshold": ("algo.advantage.is_correction_threshold",),
    "vllm_is_correction_type": ("algo.advantage.is_correction_type",),
    "is_correction_type": ("algo.advantage.is_correction_type",),
    "init_kl_coef": ("algo.kl.init_coef",),
    "kl_estimator": ("algo.kl.estimator",),
    "kl_target": ("algo.kl.target",),
    "kl_horizon": ("algo.kl.horizon",),
    "use_kl_loss": ("algo.kl.use_loss",),
    "dynamic_filtering": ("algo.dynamic_filtering_enable",),
    "dynamic_filtering_reward_range": ("algo.dynamic_filtering_range",),
    **_same("actor", "eps_clip", "eps_clip_low_high", "dual_clip", "policy_loss_type", "aux_loss_coef"),
    "entropy_loss_coef": ("actor.entropy_coef",),
    "gradient_checkpointing": ("actor.gradient_checkpointing_enable",),
    "gradient_checkpointing_use_reentrant": ("actor.gradient_checkpointing_reentrant",),
    **_same("critic", "value_clip", "save_value_network"),
    "freezing_actor_steps": ("critic.freezing_steps",),
    "remote_rm_url": ("reward.remote_url",),
    "normalize_reward": ("reward.normalize_enable",),
    "reward_clip_range": ("reward.clip_range",),
    **_same("reward", "overlong_buffer_len", "overlong_penalty_factor", "stop_properly_penalty_coef"),
    "ref_reward_offload": ("ref.offload", "reward.offload"),
    "rollout_batch_size": ("rollout.batch_size",),
    "micro_rollout_batch_size": ("rollout.micro_batch_size",),
    **_same("rollout", "n_samples_per_prompt", "vllm_generate_batch_size", "temperature", "top_p"),
    "generate_max_len": ("rollout.max_new_tokens",),
    "rollout_max_tokens_per_gpu": ("rollout.max_tokens_per_gpu",),
    "rollout_tasks_per_gpu": ("rollout.tasks_per_gpu",),
    "train_batch_size": ("train.batch_size",),
    "micro_train_batch_size": ("train.micro_batch_size",),
    **_same("train", "max_epochs", "num_episodes", "seed", "async_queue_size", "agent_func_path"),
    **_same("train", "enable_ema", "ema_beta"),
    "full_determinism": ("train.full_determinism_enable",),
    "use_dynamic_batch": ("train.dynamic_batch_enable",),
    "train_max_tokens_per_gpu": ("train.max_tokens_per_gpu",),
    "async_train": ("train.async_enable",),
    "partial_rollout": ("train.partial_rollout_enable",),
    **_same("ds", "zero_stage", "zpg", "adam_offload", "overlap_comm", "grad_accum_dtype", "deepcompile"),
    **_same("ds", "use_liger_kernel", "packing_samples", "ring_attn_size", "load_in_4bit", "param_dtype"),
    **_same("ds", "attn_implementation", "value_head_prefix", "local_rank"),
    "value_prefix_head": ("ds.value_head_prefix",),
    "deepspeed_enable_sleep": ("ds.enable_sleep",),
    "ring_head_stride": ("ds.ring_attn_head_stride",),
    "ds_tensor_parallel_size": ("ds.tensor_parallel_size",),
    "use_ds_universal_ckpt": ("ds.use_universal_ckpt",),
    "lora_rank": ("ds.lora.rank",),
    "lora_alpha": ("ds.lora.alpha",),
    "lora_dropout": ("ds.lora.dropout",),
    "target_modules": ("ds.lora.target_modules",),
    "actor_learning_rate": ("actor.adam.lr",),
    "critic_learning_rate": ("critic.adam.lr",),
    **_both(
        adam_betas="adam.betas",
        l2="adam.weight_decay",
        lr_scheduler="lr_scheduler",
        lr_warmup_ratio="lr_warmup_ratio",
        max_norm="max_norm",
    ),
    "save_path": ("ckpt.output_dir",),
    "ckpt_path": ("ckpt.path",),
    "save_steps": ("ckpt.save_steps",),
    "max_ckpt_num": ("ckpt.max_num",),
    "max_ckpt_mem": ("ckpt.max_mem",),
    "load_checkpoint": ("ckpt.load_enable",),
    "save_hf_ckpt": ("ckpt.save_hf",),
    "disable_ds_ckpt": ("ckpt.disable_ds",),
    "best_metric_key": ("ckpt.best_metric_key",),
    "logging_steps": ("logger.logging_steps",),
    "use_wandb": ("logger.wandb.key",),
    **{f"wandb_{key}": (f"logger.wandb.{key}",) for key in ("org", "group", "project", "run_name")},
    "use_tensorboard": ("logger.tensorboard_dir",),
    **{f"eval_{key}": (f"eval.{key}",) for key in ("steps", "dataset", "split", "temperature", "n_samples_per_prompt")},
    "prompt_data": ("data.prompt_dataset",),
    "prompt_data_probs": ("data.prompt_probs",),
    **_same("data", "prompt_split", "input_key", "label_key", "input_template", "apply_chat_template"),
    **_same("data", "tokenizer_chat_template", "max_samples", "max_len", "prompt_max_len", "disable_fast_tokenizer"),
}
"""The older release's flat names; the other flags have one name in both."""

IMPLIED: dict[str, tuple[str, str]] = {
    "bf16": ("ds.param_dtype", "bf16"),
    "flash_attn": ("ds.attn_implementation", "flash_attention_2"),
    "use_icepop": ("algo.advantage.is_correction_type", "icepop"),
}
"""Switches of the older release that became a value."""

TRAINER = Program(
    name="openrlhf.cli.train_ppo_ray", flags=FLAGS, names={**{name: (name,) for name in FLAGS}, **FLAT}, implied=IMPLIED
)
"""The trainer by reinforcement learning."""
