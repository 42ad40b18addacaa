"""Names of verl, in small letters: the setting here, or a sentence, which has spaces.

An answer to a section counts for all names within it that have none of their own.
"""

from collections.abc import Mapping

from rollgrad.entrypoints.names.name_answers import (
    AGENTS,
    CHECKPOINTS,
    CORRECTION,
    EVALUATION,
    KERNELS,
    KL_LOSS,
    KL_REWARD,
    LOADER,
    MICRO_BATCHES,
    NO_REMOTE_CODE,
    NORMALISATION,
    OPTIMIZER,
    PROCESSES,
    REWARD_MODEL,
    VLLM,
    WARMUP,
    alike,
)

ADAPTERS = "merge adapters that are there into their model first: rollgrad merge-lora."
CLIP = "write --actor.eps_clip_low_high LOW HIGH."
ENGINES = "engines are counted: --vllm.num_engines, each over --vllm.tensor_parallel_size GPUs."
ENTROPY = "the vocabulary is evaluated at action positions alone, in chunks, and the entropy is always a metric."
EXTRA = "write engine arguments of vLLM as --vllm.extra.NAME VALUE, such as --vllm.extra.max_num_batched_tokens 16384."
OFFLOAD = "write --ds.adam_offload, with --ds.zero_stage 3 --ds.param_offload, or with FSDP2 --cluster.offload."
MEGATRON = (
    "models are divided by DeepSpeed or FSDP2: see --cluster.strategy, --ds.tensor_parallel_size and docs/cluster.md."
)
MTP = "heads that predict several tokens are not trained."
PACKED = "batches are always packed, without padding."
PROFILE = "write --train.profile_steps N."
QUANTISED = "weights are quantised with --actor.lora.load_in_4bit alone, beside adapters."
RESUME = "write --ckpt.resume auto, which continues the run in --ckpt.output_dir, if there is one."
SCORING = "passes without gradients are filled up to --train.max_tokens_per_scoring_pass tokens."
TOKENIZER = "tokenizer and config.json are those in the model's directory."
TOOLS = "all calls of a reply run at once, and a result is shown whole, up to 131,072 characters."

VERL: Mapping[str, str] = {
    **alike("algorithm.adv_estimator", "algo.advantage.estimator"),
    "algorithm.gamma": "algo.advantage.gamma",
    "algorithm.lam": "algo.advantage.lambd",
    "algorithm.norm_adv_by_std_in_grpo": NORMALISATION,
    "algorithm.use_kl_in_reward": KL_REWARD,
    **alike("algorithm.kl_penalty actor_rollout_ref.actor.kl_loss_type", "algo.kl.estimator"),
    "actor_rollout_ref.actor.kl_loss_coef": "algo.kl.init_coef",
    "algorithm.kl_ctrl.kl_coef": "write --algo.kl.init_coef, if algorithm.use_kl_in_reward is True.",
    "algorithm.kl_ctrl.type": "KL's weight is fixed without --algo.kl.target, and adaptive with it.",
    "algorithm.kl_ctrl.horizon": "algo.kl.horizon",
    "algorithm.kl_ctrl.target_kl": "algo.kl.target",
    **alike(
        "algorithm.use_pf_ppo algorithm.pf_ppo",
        "samples are not weighed by their rewards: see --algo.dynamic_filtering_enable.",
    ),
    "algorithm.filter_groups.metric": "groups are filtered by their scores, which a reward may return beside rewards.",
    "algorithm.filter_groups.enable": "algo.dynamic_filtering_enable",
    "algorithm.filter_groups.max_num_gen_batches": "algo.dynamic_filtering_budget",
    **alike("algorithm.rollout_correction.rollout_is algorithm.rollout_is algorithm.rollout_correction", CORRECTION),
    "algorithm.rollout_correction.rollout_is_threshold": "algo.correction.high",
    "algorithm.rollout_correction.rollout_rs": "write --algo.correction.mode mask.",
    "algorithm.rollout_correction.rollout_rs_threshold": "write --algo.correction.low and --algo.correction.high.",
    "algorithm.rollout_correction.bypass_mode": "write --algo.old_logprobs rollout.",
    "actor_rollout_ref.hybrid_engine": "engines share GPUs with models by --train.colocate_all.",
    "actor_rollout_ref.nccl_timeout": "cluster.timeout",
    "actor_rollout_ref.model.path": "actor.model_name_or_path",
    **alike(
        "actor_rollout_ref.model.tokenizer_path actor_rollout_ref.model.hf_config_path critic.model.tokenizer_path "
        "actor_rollout_ref.model.override_config critic.model.override_config data.tokenizer",
        TOKENIZER,
    ),
    "actor_rollout_ref.model.mtp": MTP,
    "actor_rollout_ref.model.custom_chat_template": "data.chat_template",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "actor.gradient_checkpointing",
    "actor_rollout_ref.model.enable_activation_offload": "actor.offload_activations",
    "actor_rollout_ref.model.lora_rank": "actor.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "actor.lora.alpha",
    **alike(
        "actor_rollout_ref.model.target_modules actor_rollout_ref.model.lora.target_modules",
        "actor.lora.target_modules",
    ),
    **alike(
        "actor_rollout_ref.model.exclude_modules actor_rollout_ref.model.lora.exclude_modules",
        "name the layers that get adapters with --actor.lora.target_modules.",
    ),
    **alike("actor_rollout_ref.model.lora_adapter_path actor_rollout_ref.model.lora.adapter_path", ADAPTERS),
    "actor_rollout_ref.model.lora.rank": "actor.lora.rank",
    "actor_rollout_ref.model.lora.alpha": "actor.lora.alpha",
    "actor_rollout_ref.model.lora.dropout": "actor.lora.dropout",
    "actor_rollout_ref.model.lora.merge": "write --actor.lora.sync merged, or adapter.",
    **alike(
        "actor_rollout_ref.model.trust_remote_code actor_rollout_ref.model.external_lib data.trust_remote_code "
        "critic.model.trust_remote_code critic.model.external_lib reward_model.model.external_lib",
        NO_REMOTE_CODE,
    ),
    **alike(
        "actor_rollout_ref.model.use_remove_padding actor_rollout_ref.actor.use_remove_padding "
        "actor_rollout_ref.actor.pad_to_length critic.model.use_remove_padding",
        PACKED,
    ),
    **alike(
        "actor_rollout_ref.model.use_liger actor_rollout_ref.model.use_fused_kernels "
        "actor_rollout_ref.model.fused_kernel_options actor_rollout_ref.model.tiled_mlp",
        KERNELS,
    ),
    "actor_rollout_ref.actor.optim.lr": "actor.adam.lr",
    "actor_rollout_ref.actor.optim.betas": "actor.adam.betas",
    "actor_rollout_ref.actor.optim.optimizer": OPTIMIZER,
    "actor_rollout_ref.actor.optim.total_training_steps": "train.max_steps",
    "actor_rollout_ref.actor.optim.weight_decay": "actor.adam.weight_decay",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "actor.lr_warmup_ratio",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": WARMUP,
    "actor_rollout_ref.actor.optim.min_lr_ratio": "actor.min_lr_ratio",
    **alike("actor_rollout_ref.actor.optim.warmup_style", "actor.lr_scheduler"),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "actor.lr_scheduler",
    **alike("actor_rollout_ref.actor.grad_clip actor_rollout_ref.actor.optim.clip_grad", "actor.max_norm"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": (
        "write --train.batch_size, which counts samples: that many prompts times --rollout.n_samples_per_prompt."
    ),
    **alike("actor_rollout_ref.actor.ppo_micro_batch_size", MICRO_BATCHES),
    **alike(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu actor_rollout_ref.actor.use_dynamic_bsz", MICRO_BATCHES
    ),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "train.max_tokens_per_micro_batch",
    "actor_rollout_ref.actor.ppo_epochs": "train.max_epochs",
    "actor_rollout_ref.actor.clip_ratio": "actor.eps_clip",
    **alike("actor_rollout_ref.actor.clip_ratio_low actor_rollout_ref.actor.clip_ratio_high", CLIP),
    **alike(
        "actor_rollout_ref.actor.tau_pos actor_rollout_ref.actor.tau_neg", "write --actor.sapo_tau POSITIVE NEGATIVE."
    ),
    "actor_rollout_ref.actor.clip_ratio_c": "actor.dual_clip",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "actor.policy_loss_type",
    "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": "actor.cov_share",
    **alike(
        "actor_rollout_ref.actor.policy_loss.clip_cov_lb actor_rollout_ref.actor.policy_loss.clip_cov_ub",
        "write --actor.cov_range LOW HIGH.",
    ),
    "actor_rollout_ref.actor.policy_loss.kl_cov_ratio": "actor.cov_share",
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": "actor.cov_kl_coef",
    "actor_rollout_ref.actor.policy_loss.dro_beta": "actor.dro_beta",
    "actor_rollout_ref.actor.loss_agg_mode": "actor.loss_aggregation",
    "actor_rollout_ref.actor.loss_scale_factor": "write --actor.loss_aggregation constant_length.",
    "actor_rollout_ref.actor.entropy_coeff": "actor.entropy_coef",
    **alike(
        "actor_rollout_ref.actor.calculate_entropy actor_rollout_ref.actor.entropy_checkpointing "
        "actor_rollout_ref.actor.entropy_from_logits_with_chunking "
        "actor_rollout_ref.actor.entropy_from_logits_chunk_size",
        ENTROPY,
    ),
    "actor_rollout_ref.actor.freeze_vision_tower": "actor.freeze_visual_encoder",
    "actor_rollout_ref.actor.use_prefix_grouper": "a prompt that samples share is always computed once.",
    **alike("actor_rollout_ref.actor.router_replay.mode", "write --actor.router_replay trainer (R2) or engine (R3)."),
    **alike("actor_rollout_ref.actor.profiler actor_rollout_ref.ref.profiler critic.profiler", PROFILE),
    **alike("actor_rollout_ref.rollout.profiler global_profiler trainer.profile_steps", PROFILE),
    **alike("actor_rollout_ref.actor.qat", QUANTISED),
    "actor_rollout_ref.actor.use_kl_loss": KL_LOSS,
    **alike("actor_rollout_ref.actor.shuffle actor_rollout_ref.actor.data_loader_seed critic.data_loader_seed", LOADER),
    **alike("actor_rollout_ref.actor.strategy critic.strategy", "cluster.strategy"),
    **alike(
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size critic.ulysses_sequence_parallel_size "
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size "
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
        "ds.sequence_parallel_size",
    ),
    **alike("actor_rollout_ref.actor.megatron critic.megatron actor_rollout_ref.ref.megatron", MEGATRON),
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "ds.tensor_parallel_size",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "cluster.expert_parallel_size",
    **alike(
        "actor_rollout_ref.actor.fsdp_config.param_offload actor_rollout_ref.actor.fsdp_config.optimizer_offload "
        "actor_rollout_ref.actor.fsdp_config.offload_policy critic.fsdp.param_offload critic.fsdp.optimizer_offload "
        "critic.model.fsdp_config.param_offload critic.model.fsdp_config.optimizer_offload",
        OFFLOAD,
    ),
    **alike("actor_rollout_ref.actor.fsdp_config critic.fsdp critic.model.fsdp_config", PROCESSES),
    **alike("actor_rollout_ref.actor.fsdp_config.dtype", "actor.dtype"),
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "master weights are float32; models compute in --actor.dtype.",
    "actor_rollout_ref.actor.fsdp_config.seed": "train.seed",
    "actor_rollout_ref.actor.fsdp_config.strategy": "cluster.strategy",
    **alike(
        "actor_rollout_ref.actor.fsdp_config.full_determinism actor_rollout_ref.rollout.full_determinism",
        "actor.deterministic",
    ),
    **alike(
        "actor_rollout_ref.actor.use_torch_compile actor_rollout_ref.actor.fsdp_config.use_torch_compile",
        "actor.compile",
    ),
    **alike("actor_rollout_ref.actor.checkpoint critic.checkpoint", CHECKPOINTS),
    **alike("actor_rollout_ref.actor.checkpoint.async_save critic.checkpoint.async_save", "ckpt.async_save"),
    "actor_rollout_ref.ref": "the reference is divided and computed as the actor is: see --ref.offload.",
    **alike("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", SCORING),
    **alike("actor_rollout_ref.ref.log_prob_micro_batch_size actor_rollout_ref.ref.log_prob_use_dynamic_bsz", SCORING),
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "train.max_tokens_per_scoring_pass",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "ref.offload",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.mode": VLLM,
    "actor_rollout_ref.rollout.n": "rollout.n_samples_per_prompt",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.top_k": "write --rollout.top_k, of which 0 keeps all.",
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_tokens",
    "actor_rollout_ref.rollout.response_length": "rollout.max_new_tokens",
    "actor_rollout_ref.rollout.dtype": "actor.dtype",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "vllm.tensor_parallel_size",
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.max_batch_size",
    "actor_rollout_ref.rollout.max_model_len": "vllm.max_model_len",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": "vllm.pipeline_parallel_size",
    "actor_rollout_ref.rollout.expert_parallel_size": "write --vllm.extra.enable_expert_parallel true.",
    **alike(
        "actor_rollout_ref.rollout.nnodes actor_rollout_ref.rollout.n_gpus_per_node "
        "actor_rollout_ref.rollout.data_parallel_size",
        ENGINES,
    ),
    "actor_rollout_ref.rollout.seed": "train.seed",
    **alike(
        "actor_rollout_ref.rollout.log_prob_micro_batch_size actor_rollout_ref.rollout.log_prob_use_dynamic_bsz "
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        SCORING,
    ),
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": "train.max_tokens_per_scoring_pass",
    **alike(
        "actor_rollout_ref.rollout.max_num_batched_tokens actor_rollout_ref.rollout.enforce_eager "
        "actor_rollout_ref.rollout.enable_chunked_prefill actor_rollout_ref.rollout.cudagraph_capture_sizes "
        "actor_rollout_ref.rollout.disable_log_stats actor_rollout_ref.rollout.scheduling_policy "
        "actor_rollout_ref.rollout.quantization actor_rollout_ref.rollout.quantization_config_file "
        "actor_rollout_ref.rollout.engine_kwargs",
        EXTRA,
    ),
    "actor_rollout_ref.rollout.enable_prefix_caching": "engines always keep common beginnings of prompts.",
    **alike(
        "actor_rollout_ref.rollout.free_cache_engine actor_rollout_ref.rollout.multi_stage_wake_up",
        "engines on the GPUs of models sleep while these train.",
    ),
    **alike(
        "actor_rollout_ref.rollout.load_format actor_rollout_ref.rollout.ignore_eos "
        "actor_rollout_ref.rollout.skip_tokenizer_init",
        "engines load and stop by themselves.",
    ),
    **alike(
        "actor_rollout_ref.rollout.layered_summon actor_rollout_ref.rollout.checkpoint_engine",
        "weights reach engines in buckets: see --vllm.sync_backend.",
    ),
    "actor_rollout_ref.rollout.over_sample_rate": "write --rollout.generate_batch_size, in prompts.",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": "write --actor.router_replay engine.",
    "actor_rollout_ref.rollout.trace": "episodes are traced where OpenTelemetry's environment variables say.",
    "actor_rollout_ref.rollout.mtp": MTP,
    "actor_rollout_ref.rollout.do_sample": "replies are sampled; --eval.temperature 0 evaluates greedily.",
    "actor_rollout_ref.rollout.calculate_log_probs": "log-probs of the engine are always kept.",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "eval.temperature",
    "actor_rollout_ref.rollout.val_kwargs.n": "eval.n_samples_per_prompt",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "eval.top_p",
    "actor_rollout_ref.rollout.val_kwargs.top_k": "eval.top_k",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "evaluation is greedy unless --eval.temperature is above 0.",
    "actor_rollout_ref.rollout.multi_turn": AGENTS,
    **alike(
        "actor_rollout_ref.rollout.multi_turn.tool_config_path actor_rollout_ref.rollout.multi_turn.function_tool_path "
        "data.tool_config_path data.function_tool_path",
        "write --agent.tools tools.py, a file of functions with @rollgrad.tool.",
    ),
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls": TOOLS,
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": "agent.max_result_chars",
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": "a long result of a tool loses its middle: "
    "see --agent.max_result_chars.",
    "actor_rollout_ref.rollout.multi_turn.format": "calls are read in the format that the chat template shows.",
    **alike(
        "actor_rollout_ref.rollout.multi_turn.max_turns actor_rollout_ref.rollout.multi_turn.max_assistant_turns "
        "actor_rollout_ref.rollout.multi_turn.max_user_turns",
        "rollout.max_turns",
    ),
    "actor_rollout_ref.rollout.agent": AGENTS,
    "actor_rollout_ref.rollout.agent.num_workers": "episodes are played in one process: see --rollout.max_concurrent.",
    "data.train_files": "data.prompt_dataset",
    "data.val_files": "eval.dataset",
    "data.prompt_key": "data.input_key",
    "data.reward_fn_key": "one reward judges all rows, and may read their columns: --reward.function_path.",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.train_batch_size": "rollout.batch_size",
    "data.gen_batch_size": "rollout.generate_batch_size",
    "data.val_batch_size": "--rollout.max_batch_size bounds what is sampled together, in evaluation too.",
    "data.val_max_samples": "eval.max_samples",
    "data.train_max_samples": "data.max_samples",
    **alike(
        "data.shuffle data.validation_shuffle data.sampler.class_path data.dataloader_num_workers data.seed "
        "data.filter_overlong_prompts_workers",
        LOADER,
    ),
    "data.filter_overlong_prompts": "longer prompts than --data.max_prompt_tokens are dropped and counted.",
    "data.truncation": "prompts are never cut: see --data.max_prompt_tokens.",
    "data.video_key": "videos are not there yet: --data.image_key names the column of images.",
    "data.return_multi_modal_inputs": "--data.image_key names the column of images.",
    **alike(
        "data.return_raw_chat data.return_raw_input_ids data.return_full_prompt",
        "reward functions get the prompt as text and as messages.",
    ),
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "data.custom_cls": "prompts are rows of --data.prompt_dataset.",
    "critic.optim.lr_warmup_steps_ratio": "critic.lr_warmup_ratio",
    "critic.optim.weight_decay": "critic.adam.weight_decay",
    "critic.optim.betas": "critic.adam.betas",
    "critic.model.path": "critic.model_name_or_path",
    "critic.cliprange_value": "critic.value_clip",
    "critic.grad_clip": "critic.max_norm",
    "algorithm.gigpo.step_advantage_w": "algo.advantage.step_weight",
    "algorithm.gigpo.mode": "the estimator gigpo always divides by deviations, as mean_std_norm.",
    **alike(
        "algorithm.gigpo.enable_similarity algorithm.gigpo.similarity_thresh",
        "turns are compared whose states are equal: an environment names its own by `state` of a StepResult.",
    ),
    "critic.enable": "a critic is trained where --algo.advantage.estimator is gae or turn_gae.",
    **alike("critic.ppo_micro_batch_size critic.ppo_micro_batch_size_per_gpu critic.use_dynamic_bsz", MICRO_BATCHES),
    **alike(
        "critic.ppo_mini_batch_size critic.ppo_epochs", "the critic takes the actor's steps: see --train.batch_size."
    ),
    "critic.model.enable_gradient_checkpointing": "actor.gradient_checkpointing",
    "critic.model.enable_activation_offload": "actor.offload_activations",
    **alike("reward_model reward.reward_model", REWARD_MODEL),
    **alike("reward_model.model.path reward.reward_model.model_path", "reward.model_name_or_path"),
    **alike("reward_model.n_gpus_per_node reward.reward_model.n_gpus_per_node", "reward.num_gpus_per_node"),
    **alike(
        "reward_model.reward_manager reward.reward_manager",
        "write --reward.function_path FILE, whose reward_func or compute_score judges.",
    ),
    **alike(
        "reward_model.num_workers reward.num_workers",
        "a function judges in the process of the run, and may be async; a server shares the work: --reward.remote_url.",
    ),
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": "reward.overlong_buffer_len",
    "reward_model.overlong_buffer.len": "reward.overlong_buffer_len",
    "reward_model.overlong_buffer.penalty_factor": "reward.overlong_penalty_factor",
    "reward_model.overlong_buffer.enable": "write --reward.overlong_buffer_len.",
    **alike(
        "reward_model.micro_batch_size_per_gpu reward_model.micro_batch_size", "replies are scored by their tokens."
    ),
    **alike(
        "reward_model.sandbox_fusion reward.sandbox_fusion sandbox_fusion",
        "code runs in a sandbox here with --agent.tools python; a server of yours judges by --reward.remote_url.",
    ),
    **alike("custom_reward_function.path reward.custom_reward_function.path", "reward.function_path"),
    **alike(
        "custom_reward_function.name reward.custom_reward_function.name",
        "write --reward.function_path FILE:NAME.",
    ),
    "distillation": "write --algo.preset on_policy_distill, the teacher as --ref.model_name_or_path (with --ref.url), "
    "several by their datasources as --ref.urls.",
    "trainer.total_epochs": "train.num_episodes",
    "trainer.total_training_steps": "train.max_steps",
    "trainer.project_name": "logger.project",
    "trainer.experiment_name": "logger.run_name",
    "trainer.logger": "logger.report_to",
    **alike(
        "trainer.rollout_data_dir trainer.validation_data_dir",
        "replies are kept in trajectories/ of --ckpt.output_dir: see --logger.trajectories_max_gib.",
    ),
    "trainer.log_val_generations": "logger.log_samples",
    "trainer.nnodes": "actor.num_nodes",
    "trainer.n_gpus_per_node": "actor.num_gpus_per_node",
    "trainer.save_freq": "ckpt.save_steps",
    "trainer.test_freq": "eval.steps",
    "trainer.val_before_train": EVALUATION,
    "trainer.val_only": "write rollgrad eval, with the same settings.",
    **alike("trainer.resume_mode trainer.resume_from_path", RESUME),
    "trainer.default_local_dir": "ckpt.output_dir",
    "trainer.default_hdfs_dir": "models are saved in --ckpt.output_dir, and copied to no other place.",
    "trainer.critic_warmup": "critic.freezing_steps",
    **alike(
        "trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep trainer.remove_previous_ckpt_in_save",
        "ckpt.keep_models",
    ),
    "trainer.ray_wait_register_center_timeout": "cluster.timeout",
    "trainer.balance_batch": MICRO_BATCHES,
    "trainer.device": "a GPU is used where there is one.",
    **alike(
        "ray_kwargs ray_init",
        "--cluster.address names a Ray cluster that runs; without it one is started with all that the machine has.",
    ),
}
"""Dotted names of verl's trainers (`ppo_trainer.yaml`)."""


def verl_answer(name: str) -> str | None:
    """Returns the answer to a name of verl, or to the section that it is in; None without one.

    >>> verl_answer("algorithm.gamma"), verl_answer("actor_rollout_ref.actor.profiler.ranks")
    ('algo.advantage.gamma', 'write --train.profile_steps N.')
    """
    while name and name not in VERL:
        name = name.rpartition(".")[0]
    return VERL.get(name)
