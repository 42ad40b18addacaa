"""Translates what OpenRLHF's trainers have in common: optimizers, schedules, adapters, texts and checkpoints."""

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.translation.draft import Draft
from rollgrad.entrypoints.translation.schedules import SCHEDULERS

MUON_DEFAULTS = {"lr": 0.02, "momentum": 0.95}
"""Muon's settings in OpenRLHF."""

LORA_ALPHA = 16
"""OpenRLHF's default of LoRA's alpha."""


FORMATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def set_format(draft: Draft) -> None:
    """Sets `dtype` of a command that trains nothing, if the flag was given.

    Raises:
        ConfigurationError: OpenRLHF has no such format.
    """
    dtype = draft.value("ds.param_dtype")
    if dtype is None:
        return
    if dtype not in FORMATS:
        given = draft.options["ds.param_dtype"]
        raise ConfigurationError(f"{dtype} is none of {', '.join(FORMATS)}: change {given.flag}.")
    draft.set("dtype", FORMATS[dtype])


def translate_optimizer(draft: Draft, model: str) -> None:
    """Sets the optimizer of `actor` or `critic`.

    Raises:
        ConfigurationError: a value is not of its flag's kind.
    """
    optim = draft.value(f"{model}.optim", "adam")
    draft.set(f"{model}.optim", optim)
    for key, default in MUON_DEFAULTS.items():
        if optim == "muon":
            draft.set(f"{model}.muon.{key}", draft.value(f"{model}.muon.{key}", default))
        else:
            draft.lose(f"{model}.muon.{key}", "the optimizer is AdamW, in OpenRLHF too")
    if optim == "muon" and draft.value(f"{model}.max_norm", 1.0) > 0:
        draft.change(f"{model}.optim", "gradients are clipped before Muon turns them into steps, in OpenRLHF after it")


def translate_schedule(draft: Draft, model: str) -> None:
    """Sets the learning rate over the run of `actor` or `critic`.

    Raises:
        ConfigurationError: a value is not of its flag's kind.
    """
    kind = draft.value(f"{model}.lr_scheduler", "cosine_with_min_lr")
    if kind != "cosine_with_min_lr" and kind not in SCHEDULERS:
        draft.change(f"{model}.lr_scheduler", "cosine_with_min_lr takes its place")
    ours, warms_up, floor = SCHEDULERS.get(kind, ("cosine_with_min_lr", True, None))
    draft.set(f"{model}.lr_scheduler", ours)
    if warms_up:
        draft.set(f"{model}.lr_warmup_ratio", draft.value(f"{model}.lr_warmup_ratio", 0.03))
    else:
        draft.lose(f"{model}.lr_warmup_ratio", f"the {kind} schedule does not warm up, in OpenRLHF neither")
    if kind in SCHEDULERS:
        draft.lose(f"{model}.min_lr_ratio", f"the {kind} schedule has no such floor, in OpenRLHF neither")
    if ours != "constant":
        draft.set(f"{model}.min_lr_ratio", draft.value(f"{model}.min_lr_ratio", 0.1) if floor is None else floor)


ZERO_FLAGS = ("ds.zpg", "ds.overlap_comm", "ds.grad_accum_dtype")
"""Flags that become keys of DeepSpeed's own configuration."""


def translate_zero(draft: Draft) -> None:
    """Sets `ds.extra` of models that are divided.

    Raises:
        ConfigurationError: a value is not of its flag's kind.
    """
    if draft.asks("ds.zpg"):
        if draft.value("ds.zero_stage", 2) == 3:
            draft.set("ds.extra.zero_optimization.zero_hpz_partition_size", draft.value("ds.zpg"))
        else:
            draft.lose("ds.zpg", "ZeRO copies parameters within a machine at stage 3 alone, in OpenRLHF too")
    if draft.asks("ds.overlap_comm"):
        draft.set("ds.extra.zero_optimization.overlap_comm", True)
    if draft.asks("ds.grad_accum_dtype"):
        draft.set("ds.extra.data_types.grad_accum_dtype", draft.value("ds.grad_accum_dtype"))


def lose_zero(draft: Draft) -> None:
    """Notes the same flags where one process has the whole model."""
    for name in ZERO_FLAGS:
        if draft.asks(name):
            draft.lose(name, "one process trains each model, which DeepSpeed does not divide")


def translate_adapters(draft: Draft, *, critic: bool = False) -> None:
    """Sets `actor.lora`, and `critic.lora` if there is a `critic`.

    Raises:
        ConfigurationError: a value is not of its flag's kind.
    """
    rank = draft.value("ds.lora.rank", 0)
    if not rank:
        for key in ("lora.alpha", "lora.target_modules", "load_in_4bit"):
            draft.lose(f"ds.{key}", "all weights are trained without --lora_rank")
        if draft.asks("ds.lora.dropout"):
            draft.lose("ds.lora.dropout", "all weights are trained without --lora_rank")
        return
    for model in ("actor", "critic") if critic else ("actor",):
        draft.set(f"{model}.lora.rank", rank)
        draft.set(f"{model}.lora.alpha", draft.value("ds.lora.alpha", LORA_ALPHA))
        draft.set(f"{model}.lora.dropout", draft.value("ds.lora.dropout", 0.0))
        draft.set(f"{model}.lora.target_modules", draft.value("ds.lora.target_modules", ["all-linear"]))
    if draft.value("ds.load_in_4bit", False):
        draft.set("actor.lora.load_in_4bit", True)


def translate_tracking(draft: Draft) -> None:
    """Sets where metrics are reported.

    Raises:
        ConfigurationError: a value is not of its flag's kind.
    """
    if draft.asks("logger.logging_steps"):
        if draft.asks("logger.wandb.key") or draft.asks("logger.tensorboard_dir"):
            draft.set("logger.logging_steps", draft.value("logger.logging_steps"))
        else:
            draft.lose("logger.logging_steps", "nothing is reported without --use_wandb or --use_tensorboard")
    names = {"org": "organization", "group": "group", "project": "project", "run_name": "run_name"}
    key = draft.value("logger.wandb.key")
    if key is None:
        for name in names:
            draft.lose(f"logger.wandb.{name}", "nothing is reported without --use_wandb, in OpenRLHF neither")
        return
    draft.set("logger.report_to", ["wandb"])
    if key.lower() != "true":
        flag = draft.options["logger.wandb.key"].flag  # without the key, which is a secret
        draft.changed.append(f"{flag}: the key is read from WANDB_API_KEY, or is that of `wandb login`: set it there")
    for name, ours in names.items():
        if f"logger.wandb.{name}" in draft.options:
            draft.set(f"logger.{ours}", draft.value(f"logger.wandb.{name}"))


def translate_text(draft: Draft) -> None:
    """Sets how prompts become text, how many are read, and the number format of models.

    Raises:
        ConfigurationError: a value is not of its flag's kind.
    """
    chat, template = draft.value("data.apply_chat_template", False), draft.value("data.input_template")
    draft.set("data.apply_chat_template", chat)
    if template is not None:
        if chat:
            draft.lose("data.input_template", "the chat template is on, which counts more, in OpenRLHF too")
        elif "{}" not in template:
            draft.lose("data.input_template", "it has no {} where the prompt goes; OpenRLHF ignores it too")
        else:
            draft.set("data.input_template", template)
    if chat and "data.tokenizer_chat_template" in draft.options:
        draft.set("data.chat_template", draft.value("data.tokenizer_chat_template"))
    else:
        draft.lose("data.tokenizer_chat_template", "no chat template is used without --apply_chat_template")
    if "data.max_samples" in draft.options:
        draft.set("data.max_samples", draft.value("data.max_samples"))
    dtype = FORMATS.get(draft.value("ds.param_dtype"))
    if dtype is not None:
        draft.set("actor.dtype", dtype)
    else:
        draft.change("ds.param_dtype", "bfloat16 where the hardware multiplies it natively, else float32")


def translate_checkpoints(draft: Draft) -> None:
    """Sets `ckpt`. OpenRLHF's `save_steps` saves training states (to `ckpt_path`), and models as well with
    `save_hf_ckpt`; `load_checkpoint` continues from the newest state if there is one.

    Raises:
        ConfigurationError: a value is not of its flag's kind.
    """
    draft.set("ckpt.output_dir", draft.value("ckpt.output_dir", "./ckpt"))
    steps = draft.value("ckpt.save_steps", -1)
    if draft.value("ckpt.disable_ds", False):
        draft.set("ckpt.state_minutes", None)
        for flag in ("ckpt.path", "ckpt.max_num"):
            draft.lose(flag, "no training state is saved with --disable_ds_ckpt, in OpenRLHF neither")
    else:
        draft.set("ckpt.state_steps", steps)
        draft.set("ckpt.state_dir", draft.value("ckpt.path"))
        if "ckpt.max_num" in draft.options:
            draft.set("ckpt.keep_states", draft.value("ckpt.max_num"))
    if draft.value("ckpt.save_hf", False):
        draft.set("ckpt.save_steps", steps)
        draft.change("ckpt.save_hf", "models are saved in the run's directory (ckpt.output_dir), as step_N")
    if draft.value("ckpt.load_enable", False):
        draft.set("ckpt.resume", "auto")
    draft.lose("ckpt.max_mem", "training states are kept by their number, ckpt.keep_states")
    if draft.value("critic.save_value_network", False):
        draft.change("critic.save_value_network", "the critic is saved below the model, in the directory critic")
