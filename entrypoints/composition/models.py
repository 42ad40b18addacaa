"""Makes the models of a run in this process from settings: actor, critic, reference, and their optimizers.

It reads sections of settings, and knows nothing else of the run, so that all trainers can use it. Does not own: the
processes with parts of models (`cluster.py`), which call the same functions.
"""

import math
from typing import Any

import torch

from rollgrad.adapters.models.torch.distillation import KeptTeacher, Teacher
from rollgrad.adapters.models.torch.loading import default_device, load_causal_lm, load_critic, resolve_dtype
from rollgrad.adapters.models.torch.lora import add_lora
from rollgrad.adapters.models.torch.models import Optimize, TorchPolicy, TorchValue
from rollgrad.adapters.models.torch.muon import MuonSettings
from rollgrad.adapters.models.torch.optimizer import OptimizerSettings
from rollgrad.adapters.models.torch.trained_reward import TorchReward
from rollgrad.application.settings.sections.actor import ActorConfig, ModelConfig
from rollgrad.application.settings.sections.critic import CriticConfig
from rollgrad.application.settings.sections.examples import ExampleModelConfig
from rollgrad.application.settings.sections.optimizer import Optim
from rollgrad.application.settings.sections.ref import RefConfig
from rollgrad.application.settings.sections.train import TrainConfig

ACTOR_FLAG = "--actor.model_name_or_path"


def make_optimizer(
    section: ActorConfig | CriticConfig, total_steps: int, ema_beta: float | None = None
) -> OptimizerSettings:
    """Returns a model's optimizer settings for a run of `total_steps` optimizer steps."""
    return OptimizerSettings(
        lr=section.peak_lr,
        betas=section.adam.betas,
        eps=section.adam.eps,
        weight_decay=section.adam.weight_decay,
        scheduler=section.lr_scheduler,
        warmup_ratio=section.lr_warmup_ratio,
        min_lr_ratio=section.min_lr_ratio,
        max_norm=section.max_norm,
        total_steps=total_steps,
        muon=MuonSettings(lr=section.muon.lr, momentum=section.muon.momentum) if section.optim is Optim.MUON else None,
        ema_beta=ema_beta,
    )


def averaging(train: TrainConfig) -> float | None:
    """Returns the decay of the moving average of the actor's weights, None if there is none."""
    return train.ema_beta if train.enable_ema else None


def make_actor_model(
    actor: ModelConfig, name: str | None = None, flag: str = ACTOR_FLAG, *, load_in_4bit: bool = False
) -> Any:
    """Loads a causal language model in the actor's format, or frozen and quantised; `name` None is the actor's own."""
    device = default_device()
    return load_causal_lm(
        name or actor.model_name_or_path,
        dtype=resolve_dtype(actor.dtype, device),
        device=device,
        flag=flag,
        load_in_4bit=load_in_4bit,
        float32_head=actor.float32_head,
    )


def make_trained_actor(actor: ModelConfig, seed: int) -> Any:
    """Loads the model that is trained, with adapters if they are set."""
    model = make_actor_model(actor, load_in_4bit=actor.lora.load_in_4bit)
    if actor.lora.rank:
        add_lora(model, actor.lora, seed=seed)
    return model


def make_policy(
    actor: ActorConfig,
    model: Any,
    tokenizer: Any,
    optimizer: OptimizerSettings,
    optimize: Optimize,
    *,
    temperature: float,
    correct: bool,
    neftune_alpha: float,
    teacher: Teacher | KeptTeacher | None,
    outcomes: tuple[int, int] | None,
) -> TorchPolicy:
    """Returns `model` under an optimizer; its log-probs are those of sampling at `temperature`. With `correct` its
    scores say which tokens are the most likely ones, with a `teacher` how far it is from that; `outcomes` are two
    tokens that they compare."""
    return TorchPolicy(
        model,
        tokenizer,
        optimizer,
        temperature=temperature,
        gradient_checkpointing=actor.gradient_checkpointing,
        aux_loss_coef=actor.aux_loss_coef,
        correct=correct,
        neftune_alpha=neftune_alpha,
        teacher=teacher,
        outcomes=outcomes,
        optimize=optimize,
    )


def make_reference_model(actor: ActorConfig, ref: RefConfig) -> Any:
    """Loads the frozen reference: by default the actor's initial model, quantised like it."""
    name = ref.model_name_or_path
    quantised = name is None and actor.lora.load_in_4bit
    return make_actor_model(actor, name, "--ref.model_name_or_path", load_in_4bit=quantised)


def make_critic(
    actor: ActorConfig, critic: CriticConfig, tokenizer: Any, optimizer: OptimizerSettings, optimize: Optimize
) -> TorchValue:
    """Loads the value model, from the critic's or the actor's checkpoint."""
    device = default_device()
    model, head = load_critic(
        critic.model_name_or_path or actor.model_name_or_path,
        dtype=resolve_dtype(actor.dtype, device),
        device=device,
        flag="--critic.model_name_or_path",
    )
    return TorchValue(model, tokenizer, optimizer, head=head, optimize=optimize)


def make_trained_reward(
    actor: ExampleModelConfig, seed: int, tokenizer: Any, optimizer: OptimizerSettings, optimize: Optimize
) -> TorchReward:
    """Loads the model that becomes a reward model, with adapters if they are set. Its head is the one in its files, or
    begins at random, with a standard deviation of 1 / sqrt(H + 1) as OpenRLHF's."""
    device = default_device()
    model, head = load_critic(
        actor.model_name_or_path,
        dtype=resolve_dtype(actor.dtype, device),
        device=device,
        flag=ACTOR_FLAG,
        load_in_4bit=actor.lora.load_in_4bit,
    )
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:  # its padding token was added
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if actor.lora.rank:
        add_lora(model, actor.lora, seed=seed)
    if not head:
        width = model.config.get_text_config().hidden_size
        chance = torch.Generator().manual_seed(seed)
        head = {"weight": torch.randn(1, width, generator=chance) / math.sqrt(width + 1)}
    return TorchReward(
        model,
        tokenizer,
        optimizer,
        head={"weight": head["weight"]},  # a critic's bias is the same for all scores
        gradient_checkpointing=actor.gradient_checkpointing,
        optimize=optimize,
    )


def reference_model_kind(actor: ActorConfig, ref: RefConfig) -> str:
    """Returns the kind of the reference's weights in a run of one process: the actor's without adapters, or its own."""
    return "actor" if actor.lora.rank and ref.model_name_or_path is None else "own"


def has_gpu() -> bool:
    """Returns whether this process trains on a GPU."""
    return default_device().type == "cuda"
