"""Names of verl's settings that are seldom set, and those of earlier releases: the setting here, or a sentence, as in
`names_of_verl`."""

from collections.abc import Mapping

from rollgrad.entrypoints.names.name_answers import CHECKPOINTS, LOADER, NO_REMOTE_CODE, alike
from rollgrad.entrypoints.names.names_of_verl import PACKED

ACTOR, MODEL, ROLLOUT, REF = (f"actor_rollout_ref.{section}" for section in ("actor", "model", "rollout", "ref"))
"""Sections of verl's trainer by reinforcement learning."""

OPTIMIZERS: Mapping[str, str] = {
    **alike("optimizer_impl override_optimizer_config", "the optimizer is AdamW with float32 master weights, or Muon."),
    **alike("num_cycles zero_indexed_step lr_wsd_stable_steps_ratio", "the learning rate falls once, to its floor."),
}
"""Settings of verl's optimizers without a counterpart, and why."""

OTHER_ENGINES: Mapping[str, str] = {
    "name": "the optimizer is AdamW with float32 master weights, or Muon.",
    "eps": "write --actor.adam.eps.",
    **alike("min_lr_factor lr_min", "write --actor.min_lr_ratio, a share of the learning rate."),
    **alike("decay_type lr_decay_ratio lr_start", "see --actor.lr_scheduler and --actor.lr_decay_ratio."),
}
"""Settings of the optimizers of torchtitan and VeOmni, and what to write."""

MEGATRONS: Mapping[str, str] = {
    **alike("lr_warmup_init lr_decay_steps", "the learning rate rises from 0, and falls until the run ends."),
    "min_lr": "write --actor.min_lr_ratio, a share of the learning rate.",
    "weight_decay_incr_style": "weight decay stays the same.",
    **alike("lr_wsd_decay_style lr_wsd_decay_steps", "write --actor.lr_scheduler warmup_stable_decay."),
    "use_checkpoint_opt_param_scheduler": "a run continues with the schedule of its settings.",
    **alike(
        "use_precision_aware_optimizer main_grads_dtype exp_avg_dtype exp_avg_sq_dtype "
        "use_layer_wise_distributed_optimizer",
        "masters, gradients and moments are float32.",
    ),
    **alike(
        "muon_momentum muon_nesterov muon_split_qkv muon_scale_mode muon_coefficient_type muon_num_ns_steps "
        "muon_tp_mode muon_fp32_matmul_prec muon_extra_scale_factor muon_scalar_optimizer "
        "muon_match_adamw_update_rms",
        "write --actor.optim muon, with --actor.muon.lr and --actor.muon.momentum.",
    ),
}
"""Settings of Megatron's optimizers without a counterpart, and why."""

SELDOM: Mapping[str, str] = {
    **alike(f"{ACTOR}.use_rmpad {MODEL}.use_rmpad critic.model.use_rmpad reward_model.model.use_rmpad", PACKED),
    f"{ACTOR}.use_token_level_loss": "the aggregation is that of actor_rollout_ref.actor.loss_agg_mode.",
    **alike(
        f"data.image_patch_size data.audio_key data.mm_processor_kwargs data.val_only {MODEL}.use_shm data.use_shm",
        LOADER,
    ),
    **alike(f"{ACTOR}.checkpoint.contents trainer.del_local_ckpt_after_load trainer.esi_redundant_time", CHECKPOINTS),
    "trainer.v1": "see --train.async_enable, --train.max_staleness and --train.stale_policy.",
    "trainer.use_v1": "there is one trainer.",
    "skip": "rollouts are kept in trajectories/ of the run: see rollgrad replay.",
    "critic.kl_ctrl": "KL's weight is that of algorithm.kl_ctrl.",
    **{f"{model}.optim.{key}": why for model in (ACTOR, "critic") for key, why in OPTIMIZERS.items()},
    "critic.loss_agg_mode": "the critic's loss is the mean over tokens.",
    **alike("critic.shuffle critic.rollout_n critic.loss_scale_factor", LOADER),
    **alike(
        "critic.forward_max_token_len_per_gpu critic.forward_micro_batch_size_per_gpu",
        "values are computed as log-probs are: see --train.max_tokens_per_scoring_pass.",
    ),
    "critic.ppo_max_token_len_per_gpu": "the critic's passes are as large as the actor's.",
    f"{ACTOR}.calculate_sum_pi_squared": "optimal_token_baseline finds it for itself, and it is no metric.",
    f"{ACTOR}.rollout_n": "it is that of actor_rollout_ref.rollout.n.",
    f"{ROLLOUT}.logprobs_mode": "log-probs are those of the distribution that is sampled from.",
    f"{ROLLOUT}.prometheus": "metrics are in metrics.jsonl: see rollgrad ui.",
    f"{ROLLOUT}.disaggregation": "an engine computes prompts and replies.",
    f"{ROLLOUT}.moe_load_balance_metrics_interval": "the balance of experts is a metric of every update.",
    f"{ROLLOUT}.limit_images": "--data.max_images_per_prompt bounds the images of a prompt.",
    **alike(
        f"{ACTOR}.use_fused_kernels {ROLLOUT}.qat {ROLLOUT}.update_weights_bucket_megabytes transfer_queue",
        "kernels, buffers and number formats of engines are chosen for the machine.",
    ),
    **alike(f"{ACTOR}.router_replay.record_file {ACTOR}.router_replay.replay_file", "experts are replayed in memory."),
    **alike(f"{ROLLOUT}.skip_rollout {ROLLOUT}.skip_dump_dir", "a run samples: see rollgrad replay."),
    f"{MODEL}.lora": "adapters are those of LoRA: see --actor.lora.rank and its neighbours.",
    **alike("data.sampler data.datagen", LOADER),
    "critic.forward_micro_batch_size": "values are computed as log-probs are.",
    **alike(
        "custom_reward_function.reward_kwargs reward.custom_reward_function.reward_kwargs",
        "write them as defaults of the function's parameters.",
    ),
    "reward.reward_kwargs": "a reward function reads what its parameters are called: docs/rewards.md.",
    "algorithm.filter_groups.max_inflight_gen_batches": "prompts are replaced one by one.",
    **alike(
        "algorithm.rollout_is_threshold_lower algorithm.rollout_is_mode algorithm.rollout_is_veto_threshold "
        "algorithm.rollout_is_level",
        "write --algo.correction.level, --algo.correction.mode and their bounds.",
    ),
    "algorithm.gdpo_reward_keys": "return the rewards by their names: several functions, or one that returns a dict of "
    "them as `rewards` (docs/rewards.md).",
    "algorithm.gdpo_reward_weights": "write --reward.weights NAME WEIGHT ..., with the names of the rewards.",
    **alike("trainer.use_legacy_worker_impl", "there is one implementation."),
    **alike("trainer.val_generations_to_log_to_wandb", "write --logger.log_samples."),
    "trainer.log_train_freq": "write --logger.logging_steps.",
    f"{ROLLOUT}.use_fire_sampling": "replies are sampled with one temperature.",
    "critic.model": NO_REMOTE_CODE,
    **alike(
        f"{ACTOR}.fsdp_config {REF}.fsdp_config critic.fsdp critic.model.fsdp_config reward_model.model.fsdp_config",
        "FSDP2 divides each layer over all processes.",
    ),
    **alike(
        " ".join(f"{model}.{engine}" for model in (ACTOR, REF, "critic") for engine in ("torchtitan", "veomni")),
        "models are divided by DeepSpeed or FSDP2: see --cluster.strategy.",
    ),
    "reward_model.model.use_remove_padding": PACKED,
    **{
        f"{model}.optim.{key}": why
        for model in (ACTOR, "critic")
        for key, why in {**MEGATRONS, **OTHER_ENGINES}.items()
    },
    "trainer.checkpoint_callback_class": "see --train.on_step_path, whose function is called after each step.",
    f"{ROLLOUT}.router_config_path": "each request goes to the engine with the fewest.",
    "hydra": "the run's files are in --ckpt.output_dir.",
}
"""Names that `names_of_verl` has not: of earlier releases, and those that are seldom set."""
