"""The flags of OpenRLHF's trainers over examples: `train_sft`, `train_dpo` and the others, dotted and flat.

Their names are those of the trainer by reinforcement learning (`names_of_openrlhf`) where they mean the same, whatever
they are called on the command line: `model.aux_loss_coef` is `actor.aux_loss_coef`.
"""

from collections.abc import Mapping

from attrs import evolve

from rollgrad.entrypoints.names.flags import Flag, Kind, Program
from rollgrad.entrypoints.names.names_of_openrlhf import FLAGS, FLAT, IMPLIED, MICRO, REMOVED

SWITCH, INTEGER, NUMBER, TEXT = Kind.SWITCH, Kind.INTEGER, Kind.NUMBER, Kind.TEXT

REFERENCE = "the reference computes its log-probs once, before training, and is then left"
UNBALANCED = "reward models are trained without the load-balancing loss: train_sft balances a model's routers before"
METRICS = "--ckpt.best_metric takes our names of metrics, such as eval/loss"
DEEPSPEED = "models are divided over processes by DeepSpeed"
OPTIMIZER = ("optim", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm")

COMMON: dict[str, Flag] = {
    **{
        name: flag
        for name, flag in FLAGS.items()
        if name.startswith(("actor.adam.", "actor.muon.", "ds.", "ckpt.", "logger."))
        or name in {f"actor.{key}" for key in OPTIMIZER}
    },
    **{
        name: FLAGS[name]
        for name in (
            *("actor.model_name_or_path", "actor.aux_loss_coef", "actor.gradient_checkpointing_enable"),
            *("actor.gradient_checkpointing_reentrant", "train.full_determinism_enable", "train.seed", "use_ms"),
            *("data.apply_chat_template", "data.tokenizer_chat_template", "data.input_template", "data.max_samples"),
            "data.disable_fast_tokenizer",
        )
    },
    "data.dataloader_num_workers": Flag(
        INTEGER,
        reason="rows are prepared before the first step: data.num_workers says by how many processes",
        idle=("0",),
    ),
    "ds.zero_stage": Flag(INTEGER),
    "ds.adam_offload": Flag(SWITCH),
    "ds.ring_attn_size": Flag(INTEGER, idle=("1",)),
    "ds.tensor_parallel_size": Flag(INTEGER, idle=("1",)),
    "ds.enable_sleep": Flag(SWITCH, reason="a trainer over examples shares its GPUs with no engine"),
    "ds.dist_backend": Flag(TEXT, reason=DEEPSPEED, idle=("deepspeed",)),
    "train.batch_size": Flag(INTEGER, "train.batch_size", default=128),
    "train.micro_batch_size": Flag(INTEGER, reason=MICRO),
    "train.max_epochs": Flag(INTEGER, "train.num_epochs", default=1),
    "ckpt.best_metric_key": Flag(TEXT, reason=METRICS, idle=("none",)),
    "data.dataset": Flag(TEXT, "data.dataset"),
    "data.dataset_probs": Flag(Kind.PROBABILITIES),
    "data.dataset_split": Flag(TEXT, "data.split"),
    "data.max_len": Flag(INTEGER, "data.max_tokens", default=2048),
    "eval.dataset": Flag(TEXT),
    "eval.split": Flag(TEXT, default="test"),
    "eval.steps": Flag(INTEGER),
    "disable_trace_cache": Flag(SWITCH, reason=REMOVED),
    "torch_compile": Flag(SWITCH, reason=REMOVED),
}
"""Flags of every trainer over examples; `ds.dist_backend` and what follows `eval` are of older releases."""

CONVERSATIONS: dict[str, Flag] = {
    "data.input_key": Flag(TEXT, "data.input_key", default="input"),
    "data.output_key": Flag(TEXT, "data.output_key"),
    "data.input_template": Flag(TEXT, default="User: {}\nAssistant: "),
}
"""Flags of prompts with replies."""

PAIRS: dict[str, Flag] = {
    "data.prompt_key": Flag(TEXT, "data.prompt_key"),
    "data.chosen_key": Flag(TEXT, "data.chosen_key", default="chosen"),
    "data.rejected_key": Flag(TEXT, "data.rejected_key", default="rejected"),
    "data.max_len": Flag(INTEGER, "data.max_tokens", default=512),
}
"""Flags of preference pairs."""


def _trainer(module: str, lr: float, *flags: Mapping[str, Flag], **names: str) -> Program:
    """Returns a trainer with its default learning rate, its own flags, and their flat names."""
    known = {**COMMON, "actor.adam.lr": evolve(COMMON["actor.adam.lr"], default=lr)}
    for own in flags:
        known |= own
    spelled = {_dotted(name): (name,) for name in known if "." in name or name in COMMON}
    for flat, (*_, name) in OF_OLDER_RELEASES.items():
        if name in known:
            spelled[flat] = (name,)
    return Program(
        name=f"openrlhf.cli.{module}",
        flags=known,
        names={**spelled, **{flat: (name,) for flat, name in names.items()}},
        implied={flat: implied for flat, implied in IMPLIED.items() if implied[0] in known},
    )


def _dotted(name: str) -> str:
    """Returns a flag's name on the command line of a trainer over examples."""
    model, _, key = name.partition(".")
    if model != "actor":
        return name
    return key if key in OPTIMIZER or key.startswith(("adam.", "muon.")) else f"model.{key}"


OF_OLDER_RELEASES: dict[str, tuple[str, ...]] = {
    **{flat: tuple(name for name in names if not name.startswith("critic.")) for flat, names in FLAT.items()},
    "learning_rate": ("actor.adam.lr",),
    "min_lr_ratio": ("actor.min_lr_ratio",),
    "dataset": ("data.dataset",),
    "dataset_probs": ("data.dataset_probs",),
    "dataset_split": ("data.dataset_split",),
    "train_split": ("data.dataset_split",),
    "output_key": ("data.output_key",),
    "label_key": ("data.label_key",),
    "prompt_key": ("data.prompt_key",),
    "chosen_key": ("data.chosen_key",),
    "rejected_key": ("data.rejected_key",),
    "multiturn": ("data.multiturn",),
    "ref_pretrain": ("ref.model_name_or_path",),
    "ref_offload": ("ref.offload",),
    "dist_backend": ("ds.dist_backend",),
}
"""Flat names of older releases; those of a trainer's own flags stand with it."""
OF_OLDER_RELEASES = {flat: names for flat, names in OF_OLDER_RELEASES.items() if names}

SFT = _trainer(
    "train_sft",
    5e-6,
    CONVERSATIONS,
    {
        "train.max_epochs": Flag(INTEGER, "train.num_epochs", default=2),
        "eval.split": Flag(TEXT, default="train"),
        "data.multiturn": Flag(SWITCH),
        "pretrain_mode_enable": Flag(SWITCH),
    },
    **{"model.pretrain_mode_enable": "pretrain_mode_enable", "pretrain_mode": "pretrain_mode_enable"},
)
"""Supervised fine-tuning."""

DPO = _trainer(
    "train_dpo",
    1e-5,
    PAIRS,
    {
        "ref.model_name_or_path": Flag(TEXT, "ref.model_name_or_path"),
        "ref.offload": Flag(SWITCH, reason=REFERENCE),
        "beta": Flag(NUMBER, "dpo.beta", default=0.1),
        "ipo_enable": Flag(SWITCH),
        "label_smoothing": Flag(NUMBER),
        "nll_loss_coef": Flag(NUMBER),
    },
    ipo="ipo_enable",
    **{key: key for key in ("beta", "label_smoothing", "nll_loss_coef")},
    **{f"model.{key}": key for key in ("beta", "ipo_enable", "label_smoothing", "nll_loss_coef")},
)
"""Training on preference pairs."""

RM = _trainer(
    "train_rm",
    9e-6,
    PAIRS,
    {
        "eval.split": Flag(TEXT, default="train"),
        "actor.aux_loss_coef": Flag(NUMBER, reason=UNBALANCED, idle=("0", "0.0")),
        "loss_type": Flag(TEXT),
        "margin_loss_enable": Flag(SWITCH, "rm.margin"),
        "compute_fp32_loss_enable": Flag(SWITCH, reason="losses are always computed in float32"),
    },
    loss="loss_type",
    margin_loss="margin_loss_enable",
    compute_fp32_loss="compute_fp32_loss_enable",
    **{f"model.{key}": key for key in ("loss_type", "margin_loss_enable", "compute_fp32_loss_enable")},
)
"""Training of reward models on preference pairs."""

PRM = _trainer(
    "train_prm",
    1e-6,
    {
        "data.input_key": Flag(TEXT, "data.steps_key", default="input"),
        "data.label_key": Flag(TEXT, "data.labels_key", default="label"),
        "placeholder_token": Flag(TEXT, "data.placeholder"),
        "reward_tokens": Flag(Kind.WORDS),
        "specialize_reward_tokens": Flag(SWITCH, reason="the two tokens are those of the vocabulary"),
    },
    **{key: key for key in ("placeholder_token", "reward_tokens", "specialize_reward_tokens")},
)
"""Training of process reward models on labelled steps."""

KTO = _trainer(
    "train_kto",
    1e-5,
    {
        "data.input_key": Flag(TEXT, "data.prompt_key", default="input"),
        "data.output_key": Flag(TEXT, "data.completion_key"),
        "data.label_key": Flag(TEXT, "data.label_key", default="label"),
        "data.input_template": CONVERSATIONS["data.input_template"],
        "ref.offload": Flag(SWITCH, reason=REFERENCE),
        "beta": Flag(NUMBER, "kto.beta", default=0.01),
        "desirable_loss_weight": Flag(NUMBER, "kto.desirable_weight"),
        "undesirable_loss_weight": Flag(NUMBER, "kto.undesirable_weight"),
    },
    **{key: key for key in ("beta", "desirable_loss_weight", "undesirable_loss_weight")},
)
"""Training on replies that are labelled good or bad."""

KD = _trainer(
    "train_kd",
    5e-6,
    CONVERSATIONS,
    {
        "data.output_key": Flag(TEXT, "data.output_key", default="output"),
        "pretrain_mode_enable": Flag(SWITCH),
        "teacher_model": Flag(TEXT, "teacher.model_name_or_path"),
        "teacher_offload": Flag(
            SWITCH,
            reason="the teacher stays where it is loaded: with kd.cache and kd.top_k it is asked before training alone",
        ),
        "kd_coef": Flag(NUMBER, "kd.weight", default=0.4),
    },
    pretrain_mode="pretrain_mode_enable",
    **{key: key for key in ("teacher_model", "teacher_offload", "kd_coef")},
)
"""Distillation of a teacher on examples."""
