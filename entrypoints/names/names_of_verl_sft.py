"""The settings of verl's trainers by supervised fine-tuning: `verl.trainer.sft_trainer`, and the older one,
`verl.trainer.fsdp_sft_trainer`, whose defaults are others.
"""

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from rollgrad.entrypoints.names.flags import Flag, Kind, Program
from rollgrad.entrypoints.names.name_answers import KERNELS, LOADER, NO_REMOTE_CODE, alike
from rollgrad.entrypoints.names.names_of_verl import MTP, PACKED, PROFILE, TOKENIZER
from rollgrad.entrypoints.names.names_of_verl_commands import SAYS_ALWAYS
from rollgrad.entrypoints.names.names_of_verl_seldom_set import OPTIMIZERS

SWITCH, INTEGER, NUMBER, TEXT, WORDS = Kind.SWITCH, Kind.INTEGER, Kind.NUMBER, Kind.TEXT, Kind.WORDS

REASONS: Mapping[str, str] = {
    **alike("model.trust_remote_code model.external_lib", NO_REMOTE_CODE),
    **alike("use_remove_padding model.use_remove_padding data.pad_mode", PACKED),
    **alike("model.use_liger model.use_fused_kernels model.fused_kernel_options model.tiled_mlp", KERNELS),
    **alike("model.tokenizer_path model.hf_config_path model.override_config", TOKENIZER),
    **alike("data.num_workers data.use_shm data.custom_cls model.use_shm data.shuffle", LOADER),
    **alike("data.balance_dp_token trainer.balance_batch", "each process gets as many tokens as the others."),
    "data.ignore_input_ids_mismatch": "a conversation whose template rewrites the history has a branch for each.",
    "data.tools_key": "tools are those of the row's column tools.",
    **alike("data.enable_thinking_key data.enable_thinking_default", "write --data.chat_template_kwargs."),
    **alike("data.micro_batch_size data.micro_batch_size_per_gpu", "passes are filled up to as many tokens as fit."),
    "model.mtp": MTP,
    "model.exclude_modules": "name the layers that get adapters with --actor.lora.target_modules.",
    **alike("profiler trainer.profile_interval global_profiler", PROFILE),
    **alike("model.fsdp_config engine", "FSDP2 divides each layer over all processes."),
    **alike(
        "engine.param_offload engine.optimizer_offload",
        "nothing else needs the GPUs: --cluster.offload keeps models in the CPU's memory for good.",
    ),
    "checkpoint": "models and states are kept in --ckpt.output_dir: see --ckpt.save_steps.",
    "trainer.default_hdfs_dir": "models are saved in --ckpt.output_dir, and copied to no other place.",
    "trainer.device": "a GPU is used where there is one.",
    **{f"optim.{key}": why for key, why in OPTIMIZERS.items()},
    "hydra": "the run's files are in --ckpt.output_dir.",
}
"""Settings without a counterpart, and why; that of a section is that of all in it which have none of their own."""

_IDLE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("use_remove_padding", "model.use_remove_padding", "trainer.balance_batch", "data.shuffle"), SAYS_ALWAYS
    ),
    "engine": ("fsdp",),
    "data.pad_mode": ("no_padding",),
    "data.tools_key": ("tools",),
    "trainer.device": ("cuda",),
    "data.micro_batch_size_per_gpu": ("0",),
}

_FLAGS: Mapping[str, Flag] = {
    **{name: Flag(WORDS, reason=why.rstrip("."), idle=_IDLE.get(name, ())) for name, why in REASONS.items()},
    # The model
    "model.path": Flag(TEXT, "actor.model_name_or_path"),
    "model.enable_gradient_checkpointing": Flag(SWITCH, "actor.gradient_checkpointing", default=True),
    "model.enable_activation_offload": Flag(SWITCH, "actor.offload_activations"),
    "model.custom_chat_template": Flag(TEXT, "data.chat_template"),
    "model.lora_rank": Flag(INTEGER),
    "model.lora.rank": Flag(INTEGER),
    "model.lora_alpha": Flag(INTEGER),
    "model.lora.alpha": Flag(INTEGER),
    "model.lora.dropout": Flag(NUMBER),
    "model.target_modules": Flag(WORDS),
    "model.lora.target_modules": Flag(WORDS),
    "engine.dtype": Flag(TEXT, "actor.dtype"),
    # The data
    "data.train_files": Flag(WORDS),
    "data.val_files": Flag(WORDS),
    "data.train_max_samples": Flag(INTEGER),
    "data.val_max_samples": Flag(INTEGER),
    "data.train_batch_size": Flag(INTEGER, "train.batch_size", default=256),
    "data.use_dynamic_bsz": Flag(SWITCH, default=True),
    "data.max_token_len_per_gpu": Flag(INTEGER),
    "data.max_length": Flag(INTEGER, "data.max_tokens", default=1024),
    "data.truncation": Flag(TEXT, default="error"),
    "data.messages_key": Flag(TEXT, default="messages"),
    "data.multiturn.enable": Flag(SWITCH, default=True),
    "data.prompt_key": Flag(TEXT, default="question"),
    "data.response_key": Flag(TEXT, default="answer"),
    "data.prompt_dict_keys": Flag(WORDS),
    "data.response_dict_keys": Flag(WORDS),
    "data.apply_chat_template_kwargs": Flag(WORDS),
    # The optimizer
    "optim.lr": Flag(NUMBER, default=1e-3),
    "optim.betas": Flag(Kind.PAIR, default=[0.9, 0.999]),
    "optim.weight_decay": Flag(NUMBER, default=0.01),
    "optim.clip_grad": Flag(NUMBER, "actor.max_norm"),
    "optim.optimizer": Flag(TEXT, default="AdamW"),
    "optim": Flag(TEXT),  # as "engine": the file of verl's defaults
    "optim.lr_scheduler_type": Flag(TEXT, default="constant"),
    "optim.warmup_style": Flag(TEXT),
    "optim.min_lr_ratio": Flag(NUMBER, default=0.0),
    "optim.lr_warmup_steps_ratio": Flag(NUMBER, default=0.0),
    "optim.lr_warmup_steps": Flag(INTEGER),
    # Processes
    "trainer.nnodes": Flag(INTEGER, default=1),
    "trainer.n_gpus_per_node": Flag(INTEGER, default=1),
    "engine.strategy": Flag(TEXT),
    "engine.offload_policy": Flag(SWITCH),
    "engine.ulysses_sequence_parallel_size": Flag(INTEGER, default=1),
    # The run
    "trainer.total_epochs": Flag(INTEGER, default=4),
    "trainer.total_training_steps": Flag(INTEGER),
    "trainer.seed": Flag(INTEGER, "train.seed", default=1),
    "trainer.save_freq": Flag(TEXT, default="-1"),
    "trainer.test_freq": Flag(TEXT, default="-1"),
    "trainer.max_ckpt_to_keep": Flag(INTEGER),
    "trainer.default_local_dir": Flag(TEXT),
    "trainer.resume_mode": Flag(TEXT, default="auto"),
    "trainer.resume_from_path": Flag(TEXT),
    "trainer.logger": Flag(WORDS),
    "trainer.project_name": Flag(TEXT, default="gsm8k-sft"),
    "trainer.experiment_name": Flag(TEXT, default="test"),
}

_SAME: Mapping[str, str] = {
    "model.partial_pretrain": "model.path",
    "data.multiturn.messages_key": "data.messages_key",
    "data.multiturn.tools_key": "data.tools_key",
    "data.multiturn.enable_thinking_key": "data.enable_thinking_key",
    "data.chat_template": "model.custom_chat_template",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
    "model.fsdp_config.cpu_offload": "engine.offload_policy",
    "model.strategy": "engine.strategy",
    "trainer.resume_path": "trainer.resume_from_path",
}
"""Other names, most of them of the older trainer."""

_OLDER_DEFAULTS: Mapping[str, Any] = {
    "model.enable_gradient_checkpointing": False,
    "data.multiturn.enable": False,
    "data.use_dynamic_bsz": False,
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.lr_scheduler_type": "cosine",
    "trainer.resume_mode": "disable",
}


def _program(module: str, defaults: Mapping[str, Any]) -> Program:
    return Program(
        name=f"verl.trainer.{module}",
        flags={name: evolve(flag, default=defaults.get(name, flag.default)) for name, flag in _FLAGS.items()},
        names={**{name: (name,) for name in _FLAGS}, **{name: (same,) for name, same in _SAME.items()}},
    )


SFT: Mapping[str, Program] = {
    "sft_trainer": _program("sft_trainer", {}),
    "fsdp_sft_trainer": _program("fsdp_sft_trainer", _OLDER_DEFAULTS),
}
"""By the name of the module."""
