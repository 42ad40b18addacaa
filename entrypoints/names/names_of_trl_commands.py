"""The flags of TRL's commands `trl sft`, `dpo`, `kto`, `reward`, `grpo`, `rloo` and `distillation`: those with a
setting here, and those with a reason of their own. The reasons of the others are those of `names_of_trl`.
"""

from collections.abc import Iterable, Mapping

from rollgrad.entrypoints.names.flags import Flag, Kind, Program
from rollgrad.entrypoints.names.names_of_trl import TRL

SWITCH, INTEGER, NUMBER, TEXT, WORDS = Kind.SWITCH, Kind.INTEGER, Kind.NUMBER, Kind.TEXT, Kind.WORDS

NOTHING = ("none", "None", "null", "False", "false", "no", "0", "0.0")
"""Values that ask for nothing."""
PACKED = "sequences lie end to end without padding, each apart from the others, whatever is set"
EVALUATED = "evaluation takes as many tokens at once as training does"
UPLOADED = "the model is uploaded once, when the run has ended"
CHOSEN = "the tokenizer's own tokens are taken: save it with others beside the model"

TEMPLATE = Flag(TEXT, "data.chat_template")

COMMON: Mapping[str, Flag] = {
    # The model
    "model_name_or_path": Flag(TEXT, "actor.model_name_or_path"),
    "model_revision": Flag(TEXT, reason="the newest revision is taken: name a directory for another", idle=("main",)),
    "dtype": Flag(TEXT),
    "bf16": Flag(SWITCH),
    "fp16": Flag(SWITCH),
    "use_peft": Flag(SWITCH),
    "lora_r": Flag(INTEGER),
    "lora_alpha": Flag(INTEGER),
    "lora_target_modules": Flag(WORDS),
    "lora_dropout": Flag(NUMBER),
    "lora_target_parameters": Flag(
        WORDS, reason="linear layers alone get adapters: name them with --lora_target_modules", idle=NOTHING
    ),
    "lora_modules_to_save": Flag(
        WORDS,
        reason="nothing is trained beside adapters: leave --use_peft out, and all weights are trained",
        idle=NOTHING,
    ),
    "lora_task_type": Flag(TEXT, reason="it follows from the command", idle=("CAUSAL_LM", "SEQ_CLS")),
    "use_rslora": Flag(SWITCH),
    "use_dora": Flag(SWITCH),
    "load_in_4bit": Flag(SWITCH),
    "bnb_4bit_quant_type": Flag(TEXT, reason="weights in 4 bits are NF4", idle=("nf4",)),
    "use_bnb_nested_quant": Flag(SWITCH, reason="quantisation is always double"),
    "bnb_4bit_quant_storage": Flag(TEXT, reason="weights in 4 bits are NF4", idle=NOTHING),
    "router_aux_loss_coef": Flag(NUMBER, "actor.aux_loss_coef"),
    "full_determinism": Flag(SWITCH, "actor.deterministic"),
    "gradient_checkpointing": Flag(SWITCH, "actor.gradient_checkpointing", default=True),
    "torch_compile": Flag(SWITCH, "actor.compile"),
    "activation_offloading": Flag(SWITCH, "actor.offload_activations"),
    "disable_dropout": Flag(SWITCH),
    # The trackers
    "report_to": Flag(WORDS, idle=NOTHING),
    "project": Flag(TEXT),
    "run_name": Flag(TEXT),
    # The data
    "dataset_name": Flag(TEXT),
    "dataset_config": Flag(TEXT),
    "dataset_train_split": Flag(TEXT),
    "dataset_test_split": Flag(TEXT),
    "dataset_streaming": Flag(SWITCH, reason="commands that sample read all prompts before the first step"),
    "streaming": Flag(SWITCH, reason="commands that sample read all prompts before the first step"),
    "ignore_bias_buffers": Flag(SWITCH, reason="gradients are summed without DDP's buffers"),
    "datasets": Flag(WORDS, reason="name several with commas between in --dataset_name", idle=NOTHING),
    "test_split_size": Flag(
        NUMBER, reason="write --dataset_train_split 'train[:90%]' and --dataset_test_split 'train[90%:]'", idle=NOTHING
    ),
    # Training
    "learning_rate": Flag(NUMBER, "actor.adam.lr"),
    "lr_scheduler_type": Flag(TEXT, default="linear"),
    "lr_scheduler_kwargs": Flag(WORDS),
    "warmup_steps": Flag(NUMBER),
    "warmup_ratio": Flag(NUMBER),
    "weight_decay": Flag(NUMBER, "actor.adam.weight_decay"),
    "adam_beta1": Flag(NUMBER, default=0.9),
    "adam_beta2": Flag(NUMBER, default=0.999),
    "adam_epsilon": Flag(NUMBER, "actor.adam.eps"),
    "max_grad_norm": Flag(NUMBER, "actor.max_norm"),
    "optim": Flag(
        TEXT,
        reason="the optimizer is AdamW with float32 master weights, or Muon: write --actor.optim muon",
        idle=("adamw_torch", "adamw_torch_fused", "adamw_hf"),
    ),
    "per_device_train_batch_size": Flag(INTEGER, default=8),
    "gradient_accumulation_steps": Flag(INTEGER, default=1),
    "per_device_eval_batch_size": Flag(INTEGER, reason=EVALUATED),
    "eval_accumulation_steps": Flag(INTEGER, reason=EVALUATED, idle=NOTHING),
    "num_train_epochs": Flag(NUMBER, default=3.0),
    "max_steps": Flag(INTEGER, default=-1),
    "seed": Flag(INTEGER, "train.seed"),
    "num_processes": Flag(INTEGER, default=1),
    "accelerate_config": Flag(TEXT, reason="write --num_processes N for processes on N GPUs"),
    # Evaluation and output
    "eval_strategy": Flag(TEXT, default="no"),
    "eval_steps": Flag(NUMBER),
    "output_dir": Flag(TEXT, "ckpt.output_dir", default="trainer_output"),
    "save_strategy": Flag(TEXT, default="steps"),
    "save_steps": Flag(NUMBER, default=500),
    "save_total_limit": Flag(INTEGER),
    "save_only_model": Flag(SWITCH),
    "resume_from_checkpoint": Flag(TEXT),
    "disable_tqdm": Flag(SWITCH),
    "push_to_hub": Flag(SWITCH),
    "hub_model_id": Flag(TEXT),
    "hub_token": Flag(TEXT, reason="the token is that of HF_TOKEN or of hf auth login", idle=NOTHING),
    "hub_private_repo": Flag(WORDS, reason="a repository that is made is private", idle=("True", "true", "None")),
    "hub_strategy": Flag(TEXT, reason=UPLOADED, idle=("end",)),
    "hub_always_push": Flag(SWITCH, reason=UPLOADED),
    "hub_revision": Flag(
        TEXT, reason="the model goes to the branch main: hf upload takes it to another", idle=("main",)
    ),
    "pad_to_multiple_of": Flag(TEXT, reason=PACKED, idle=(*NOTHING, "auto")),
    "dataset_num_proc": Flag(INTEGER),
    "overwrite_output_dir": Flag(SWITCH, reason="a directory that holds a run is refused without --ckpt.overwrite"),
    "logging_dir": Flag(TEXT, reason="files of TensorBoard are in --output_dir"),
    "eos_token": Flag(TEXT, reason=CHOSEN),
    "pad_token": Flag(TEXT, reason=CHOSEN),
}
"""Flags of every command."""

EXAMPLES: Mapping[str, Flag] = {
    "dataset_num_proc": Flag(INTEGER, "data.num_workers"),
    "max_length": Flag(INTEGER, "data.max_tokens", default=1024),
    "truncation_mode": Flag(
        TEXT,
        reason="the beginning of a longer example is kept: write --data.overlong drop to learn from whole ones alone",
        idle=("keep_start",),
    ),
    "padding_free": Flag(SWITCH, reason=PACKED),
    "dataset_streaming": Flag(SWITCH, "data.stream"),
    "streaming": Flag(SWITCH, "data.stream"),
}
"""Flags of the commands over examples."""

REFERENCE: Mapping[str, Flag] = {
    **dict.fromkeys(
        ("max_prompt_length", "max_completion_length"),
        Flag(INTEGER, reason="prompt and reply are one example, whose length --max_length bounds", idle=NOTHING),
    ),
    "precompute_ref_log_probs": Flag(
        SWITCH, reason="the reference computes its log-probs before training, unless rows are streamed"
    ),
    "precompute_ref_batch_size": Flag(INTEGER, reason=EVALUATED, idle=NOTHING),
}

MOVING: Mapping[str, Flag] = {
    "sync_ref_model": Flag(SWITCH),
    "ref_model_mixup_alpha": Flag(NUMBER),
    "ref_model_sync_steps": Flag(INTEGER),
}
"""Flags of a reference that moves."""

SAMPLED: Mapping[str, Flag] = {
    "max_completion_length": Flag(INTEGER, "rollout.max_new_tokens", default=512),
    "temperature": Flag(NUMBER, "rollout.temperature"),
    "top_p": Flag(NUMBER, "rollout.top_p"),
    "top_k": Flag(INTEGER, "rollout.top_k"),
    "use_vllm": Flag(SWITCH),
    "vllm_mode": Flag(TEXT, default="colocate"),
    "vllm_server_base_url": Flag(WORDS, "rollout.server_urls"),
    "vllm_gpu_memory_utilization": Flag(NUMBER),
    "vllm_tensor_parallel_size": Flag(INTEGER),
    "vllm_max_model_length": Flag(INTEGER),
    "log_completions": Flag(SWITCH, reason="sampled texts are always written to samples.jsonl"),
    "num_completions_to_print": Flag(INTEGER, "logger.log_samples"),
    "chat_template": TEMPLATE,
    "chat_template_kwargs": Flag(WORDS),
}
"""Flags of the commands whose policy samples."""

GROUPS: Mapping[str, Flag] = {
    **SAMPLED,
    **MOVING,
    "reward_funcs": Flag(WORDS),
    "reward_model_name_or_path": Flag(TEXT, "reward.model_name_or_path"),
    "reward_weights": Flag(WORDS),
    "num_generations_eval": Flag(INTEGER, "eval.n_samples_per_prompt"),
    "max_prompt_length": Flag(INTEGER, "data.max_prompt_tokens"),
    "generation_batch_size": Flag(INTEGER),
    "steps_per_generation": Flag(INTEGER),
    "num_iterations": Flag(INTEGER, "train.max_epochs"),
    "epsilon": Flag(NUMBER, default=0.2),
    "epsilon_high": Flag(NUMBER),
    "mask_truncated_completions": Flag(SWITCH, "algo.mask_truncated"),
}
"""Flags of the commands that compare the rewards of several replies to a prompt."""

OWN: Mapping[str, Mapping[str, Flag]] = {
    "sft": {
        **EXAMPLES,
        "chat_template_path": TEMPLATE,
        "dataset_text_field": Flag(TEXT),
        "dataset_kwargs": Flag(
            WORDS, reason="rows are rendered and tokenised here, but for those with input_ids", idle=NOTHING
        ),
        "shuffle_dataset": Flag(SWITCH, reason="examples are in an order that train.seed decides"),
        "packing": Flag(
            SWITCH,
            reason="a step has as many examples as without it, in TRL as many rows of max_length tokens that are each "
            "filled with several: raise --per_device_train_batch_size",
        ),
        "packing_strategy": Flag(TEXT, reason=PACKED),
        "eval_packing": Flag(SWITCH, reason=PACKED),
        "completion_only_loss": Flag(SWITCH),
        "assistant_only_loss": Flag(SWITCH),
        "label_smoothing_factor": Flag(NUMBER, "train.label_smoothing"),
        "neftune_noise_alpha": Flag(NUMBER, "train.neftune_alpha"),
        "loss_type": Flag(TEXT, "train.loss"),
    },
    "dpo": {
        **EXAMPLES,
        **REFERENCE,
        "loss_type": Flag(WORDS),
        "loss_weights": Flag(Kind.PROBABILITIES, "dpo.loss_weights"),
        "rpo_alpha": Flag(NUMBER, reason="write --loss_type sigmoid sft --loss_weights 1 ALPHA", idle=NOTHING),
        "ld_alpha": Flag(NUMBER),
        "f_divergence_type": Flag(TEXT, "dpo.f_divergence"),
        "f_alpha_divergence_coef": Flag(NUMBER),
        "label_smoothing": Flag(NUMBER),
        "beta": Flag(NUMBER, default=0.1),
        "use_weighting": Flag(SWITCH),
        **MOVING,
        "discopop_tau": Flag(NUMBER),
    },
    "kto": {
        **EXAMPLES,
        **REFERENCE,
        **MOVING,
        "loss_type": Flag(TEXT, "kto.loss"),
        "beta": Flag(NUMBER, "kto.beta", default=0.1),
        "desirable_weight": Flag(NUMBER, "kto.desirable_weight"),
        "undesirable_weight": Flag(NUMBER, "kto.undesirable_weight"),
    },
    "reward": {
        **EXAMPLES,
        "chat_template_path": TEMPLATE,
        "center_rewards_coefficient": Flag(NUMBER, "rm.centring"),
    },
    "grpo": {
        **GROUPS,
        "num_generations": Flag(INTEGER, "rollout.n_samples_per_prompt", default=8),
        "beta": Flag(NUMBER, default=0.0),
        "use_bias_correction_kl": Flag(SWITCH, default=True),
        "delta": Flag(NUMBER),
        "sapo_temperature_pos": Flag(NUMBER, default=1.0),
        "sapo_temperature_neg": Flag(NUMBER, default=1.05),
        "vespo_k_pos": Flag(NUMBER, default=2.0),
        "vespo_k_neg": Flag(NUMBER, default=3.0),
        "vespo_lambda_pos": Flag(NUMBER, default=3.0),
        "vespo_lambda_neg": Flag(NUMBER, default=2.0),
        "importance_sampling_level": Flag(TEXT, default="token"),
        "scale_rewards": Flag(TEXT, default="group"),
        "loss_type": Flag(TEXT, default="dapo"),
        "entropy_coef": Flag(NUMBER, "actor.entropy_coef"),
        "top_entropy_quantile": Flag(NUMBER, "algo.top_entropy_quantile"),
        "cast_lm_head_to_fp32": Flag(SWITCH, "actor.float32_head"),
        "vllm_importance_sampling_correction": Flag(SWITCH, default=True),
        "vllm_importance_sampling_mode": Flag(TEXT, default="sequence_mask"),
        "vllm_importance_sampling_clip_max": Flag(NUMBER, default=3.0),
        "vllm_importance_sampling_clip_min": Flag(NUMBER),
        "vllm_importance_sampling_cap": Flag(NUMBER),
        "off_policy_mask_threshold": Flag(NUMBER),
    },
    "rloo": {
        **GROUPS,
        "num_generations": Flag(INTEGER, "rollout.n_samples_per_prompt", default=2),
        "beta": Flag(NUMBER, default=0.05),
        "normalize_advantages": Flag(SWITCH),
        "reward_clip_range": Flag(Kind.PAIR, "reward.clip_range"),
    },
    "distillation": {
        **SAMPLED,
        "teacher_model_name_or_path": Flag(TEXT, "ref.model_name_or_path"),
        "teacher_model_revision": COMMON["model_revision"],
        "beta": Flag(NUMBER, "algo.kl.beta", default=1.0),
    },
}
"""Flags of each command."""

OTHERS = """
accelerator_config auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16_full_eval
data_seed dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers
ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed do_eval do_predict
do_train enable_jit_checkpoint eval_delay eval_do_concat_batches eval_on_start eval_use_gather_object
fp16_full_eval fsdp fsdp_config gradient_checkpointing_kwargs greater_is_better ignore_data_skip include_for_metrics
include_num_input_tokens_seen label_names length_column_name liger_kernel_config load_best_model_at_end
local_rank log_level log_level_replica log_on_each_node logging_first_step logging_nan_inf_filter logging_steps
logging_strategy metric_for_best_model model_init_kwargs neftune_noise_alpha optim_args
optim_target_modules parallelism_config prediction_loss_only remove_unused_columns
restore_callback_states_from_checkpoint save_on_each_node skip_memory_metrics tf32
torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id
trackio_static_space_id train_sampling_strategy trust_remote_code use_cache use_cpu use_liger_kernel
label_smoothing_factor load_in_8bit attn_implementation
"""
"""The other flags of every command, about which `names_of_trl` has something to say."""

SAMPLED_OTHERS = """
cache_implementation ds3_gather_for_generation generation_kwargs log_unique_prompts min_p
repetition_penalty shuffle_dataset
vllm_enable_sleep_mode vllm_group_port vllm_model_impl vllm_server_host vllm_server_port vllm_server_timeout
vllm_structured_outputs_regex
"""
"""Those of the commands whose policy samples."""

GROUPS_OTHERS = """
log_multimodal transformers_continuous_batching_config use_transformers_continuous_batching use_transformers_paged
"""

OWN_OTHERS: Mapping[str, str] = {
    "grpo": f"""{SAMPLED_OTHERS} {GROUPS_OTHERS}
    entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target log_completions_hub_repo
    max_tool_calling_iterations multi_objective_aggregation use_adaptive_entropy""",
    "rloo": f"{SAMPLED_OTHERS} {GROUPS_OTHERS}",
    "distillation": f"{SAMPLED_OTHERS} max_tool_calling_iterations teacher_model_init_kwargs",
}
"""Those of each command."""

OLDER_NAMES: Mapping[str, str] = {
    "chat_template": "chat_template_path",
    "torch_dtype": "dtype",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "group_by_length": "train_sampling_strategy",
    "use_liger_loss": "use_liger_kernel",
    "max_seq_length": "max_length",
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
}
"""Names that flags had in earlier releases, or have in the recipes of Open R1 and the Alignment Handbook."""

DEFAULT_LR = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "reward": 1e-4, "grpo": 1e-6, "rloo": 1e-6, "distillation": 1e-6}
"""TRL's default learning rate of each command."""

WITHOUT_DROPOUT = ("dpo", "kto", "reward")
"""Commands of TRL that turn dropout off unless they are told not to."""


def _program(command: str) -> Program:
    """Returns a command with its flags, and those that only `names_of_trl` has something to say about."""
    own: dict[str, Flag] = {**COMMON, **OWN[command]}
    own["learning_rate"] = Flag(NUMBER, "actor.adam.lr", default=DEFAULT_LR[command])
    if command in WITHOUT_DROPOUT:
        own["disable_dropout"] = Flag(SWITCH, default=True)
    names = [*OTHERS.split(), *OWN_OTHERS.get(command, "").split()]
    others = {name: Flag(WORDS, reason=_reason(name), idle=NOTHING) for name in names if name not in own}
    flags = {**others, **own}
    return Program(
        name=f"trl {command}",
        flags=flags,
        names={
            **{name: (flag,) for name, flag in OLDER_NAMES.items() if flag in flags},
            **{name: (name,) for name in flags},
        },
        implied={f"no_{name}": (name, "False") for name in (*others, *_switches(flags.items()))},
    )


def _reason(name: str) -> str:
    answer = TRL[name]
    return answer.rstrip(".") if " " in answer else f"write --{answer}"


def _switches(flags: Iterable[tuple[str, Flag]]) -> Iterable[str]:
    return (name for name, flag in flags if flag.kind is SWITCH)


COMMANDS: Mapping[str, Program] = {command: _program(command) for command in OWN}
"""TRL's commands that have a counterpart."""
