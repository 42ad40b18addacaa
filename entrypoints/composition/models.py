"""Makes the models of a run in this process from settings: actor, critic, reference, and their optimizers.

It reads sections of settings, and knows nothing else of the run, so that all trainers can use it. Does not own: the
processes with parts of models (`cluster.py`), which call the same functions.
"""

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.models.torch.compiling import compile_layers
from rollgrad.adapters.models.torch.experts.router_replay import install_router_replay
from rollgrad.adapters.models.torch.heads.allowed_tokens import Masks, follow_grammars
from rollgrad.adapters.models.torch.heads.distillation import KeptTeacher, Teacher
from rollgrad.adapters.models.torch.kernels.determinism import compute_deterministically
from rollgrad.adapters.models.torch.layers.images import freeze_tower
from rollgrad.adapters.models.torch.loading.image_check import check_images
from rollgrad.adapters.models.torch.loading.loading import default_device, load_causal_lm, load_critic, resolve_dtype
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.loading.weight_shards import Shard, layer_parts, make_whole, whole_layers
from rollgrad.adapters.models.torch.models import Optimize, TorchPolicy
from rollgrad.adapters.models.torch.optimizers.muon import MuonSettings
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.models.torch.rewards.trained_reward import TorchReward
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.adapters.system.cores import usable_cores
from rollgrad.application.settings.sections.actor import ActorConfig, ModelConfig, RouterReplay
from rollgrad.application.settings.sections.critic import CriticConfig
from rollgrad.application.settings.sections.examples import ExampleModelConfig
from rollgrad.application.settings.sections.optimizer import Optim
from rollgrad.application.settings.sections.ref import RefConfig
from rollgrad.application.settings.sections.train import TrainConfig
from rollgrad.domain.algorithms.losses.centering import ScoreCentering
from rollgrad.entrypoints.composition.own_optimizer import load_optim, load_schedule

ACTOR_FLAG = "--actor.model_name_or_path"


def compute_device(actor: ModelConfig) -> torch.device:
    """Returns where this process computes models, by deterministic kernels if the settings say so, and on the CPU with
    no more threads than it has cores; OMP_NUM_THREADS sets another number."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    if actor.deterministic:
        compute_deterministically()
    return default_device()


NO_AVERAGE: Mapping[str, Any] = {}
"""Settings of an optimizer that keeps no moving average."""


def make_optimizer(
    section: ActorConfig | CriticConfig, total_steps: int, average: Mapping[str, Any] = NO_AVERAGE
) -> OptimizerSettings:
    """Returns a model's optimizer settings for a run of `total_steps` optimizer steps; `average` are those of a moving
    average of its weights."""
    name = "critic" if isinstance(section, CriticConfig) else "actor"
    return OptimizerSettings(
        lr=section.peak_lr,
        betas=section.adam.betas,
        eps=section.adam.eps,
        weight_decay=section.adam.weight_decay,
        scheduler=section.lr_scheduler,
        warmup_ratio=section.lr_warmup_ratio,
        min_lr_ratio=section.min_lr_ratio,
        decay_ratio=section.lr_decay_ratio,
        max_norm=section.max_norm,
        total_steps=total_steps,
        factors=load_schedule(section.lr_scheduler_path, total_steps, f"--{name}.lr_scheduler_path"),
        own=load_optim(section.optim_path, f"--{name}.optim_path"),
        muon=MuonSettings(lr=section.muon.lr, momentum=section.muon.momentum) if section.optim is Optim.MUON else None,
        **average,
    )


def averaging(train: TrainConfig) -> Mapping[str, Any]:
    """Returns the optimizer's settings of the moving average of the actor's weights, none if there is none."""
    return {"ema_beta": train.ema_beta} if train.enable_ema else NO_AVERAGE


def following(steps: int, mixup: float) -> Mapping[str, Any]:
    """Returns the optimizer's settings of an average that is a reference: every `steps` optimizer steps it takes the
    share `mixup` of the actor's weights, and it is not saved beside them."""
    return {"ema_beta": 1 - mixup, "ema_every": steps, "ema_saved": False}


def make_actor_model(
    actor: ModelConfig,
    name: str | None = None,
    flag: str = ACTOR_FLAG,
    *,
    images: ImageRenderer | None = None,
    load_in_4bit: bool = False,
    shard: Shard | None = None,
) -> Any:
    """Loads a causal language model in the actor's format, or frozen and quantised; `name` None is the actor's own.
    `images` renders the images that it will see; `shard` divides it over processes while it loads."""
    device = compute_device(actor)
    name = name or actor.model_name_or_path
    model = load_causal_lm(
        name,
        dtype=resolve_dtype(actor.dtype, device),
        device=device,
        flag=flag,
        load_in_4bit=load_in_4bit,
        float32_head=actor.float32_head,
        images=images is not None,
        shard=shard,
    )
    if images is not None:
        check_images(model, images, name, flag)
    return model


def make_trained_actor(
    actor: ActorConfig | ExampleModelConfig,
    seed: int,
    shard: Shard | None = None,
    images: ImageRenderer | None = None,
    masks: Masks | None = None,
) -> Any:
    """Loads the model that is trained, with adapters if they are set; `images` renders the images that it sees, `masks`
    follows the forms of replies."""
    model = make_actor_model(actor, images=images, load_in_4bit=actor.lora.load_in_4bit, shard=shard)
    _freeze_unseen(model, actor, images)
    if actor.lora.rank:
        add_lora(model, actor.lora, seed=seed)
    follow_grammars(model, masks)
    replay = getattr(actor, "router_replay", RouterReplay.NONE)
    if replay is not RouterReplay.NONE:
        with whole_layers(model):
            install_router_replay(model, f"actor.router_replay is {replay}")
    return _compiled(model, actor)


def _compiled(model: Any, actor: ModelConfig) -> Any:
    """Returns a model that nothing but division changes any more, with its layers compiled if the settings say so."""
    if actor.compile:
        compile_layers(model)
    return model


def _freeze_unseen(model: Any, actor: ActorConfig | ExampleModelConfig, images: ImageRenderer | None) -> None:
    """Freezes what makes a model's input of images where there are none, or the settings say so."""
    if images is None or actor.freeze_visual_encoder:
        freeze_tower(model)


def make_policy(
    actor: ActorConfig,
    model: Any,
    tokenizer: Any,
    optimizer: OptimizerSettings,
    optimize: Optimize,
    *,
    temperature: float,
    correct: bool,
    mean: bool,
    collision: bool,
    neftune_alpha: float,
    teacher: Teacher | KeptTeacher | None,
    outcomes: tuple[int, int] | None,
    centering: ScoreCentering | None,
) -> TorchPolicy:
    """Returns `model` under an optimizer; its log-probs are those of sampling at `temperature`. With `correct` its
    scores say which tokens are the most likely ones, with `mean` also the mean log-prob over the vocabulary, with
    `collision` the collision entropy, and with a `teacher` the divergence from it. `outcomes` are two tokens that the
    scores compare. With `centering` they have, in updates, the term that score centering subtracts."""
    return TorchPolicy(
        model,
        tokenizer,
        optimizer,
        temperature=temperature,
        gradient_checkpointing=actor.gradient_checkpointing,
        offload_activations=actor.offload_activations,
        aux_loss_coef=actor.aux_loss_coef,
        router_z_loss_coef=actor.router_z_loss_coef,
        correct=correct,
        mean=mean,
        collision=collision,
        neftune_alpha=neftune_alpha,
        teacher=teacher,
        outcomes=outcomes,
        keeps_experts=getattr(actor, "router_replay", None) is RouterReplay.TRAINER,
        centering=centering,
        optimize=optimize,
    )


def make_reference_model(
    actor: ActorConfig,
    ref: RefConfig,
    shard: Shard | None = None,
    images: ImageRenderer | None = None,
    masks: Masks | None = None,
) -> Any:
    """Loads the frozen reference: by default the actor's initial model, quantised like it. Arguments as for the
    actor."""
    name = ref.model_name_or_path
    quantised = name is None and actor.lora.load_in_4bit
    flag = "--ref.model_name_or_path"
    model = make_actor_model(actor, name, flag, images=images, load_in_4bit=quantised, shard=shard)
    follow_grammars(model, masks)
    return _compiled(model, actor)


def make_critic(
    actor: ActorConfig,
    critic: CriticConfig,
    tokenizer: Any,
    optimizer: OptimizerSettings,
    optimize: Optimize,
    shard: Shard | None = None,
    images: ImageRenderer | None = None,
    *,
    seed: int,
) -> TorchValue:
    """Loads the value model, from the critic's or the actor's checkpoint, with adapters if they are set; `images`
    renders the images that it sees."""
    device, flag = compute_device(actor), "--critic.model_name_or_path"
    name = critic.model_name_or_path or actor.model_name_or_path
    model, head = load_critic(
        name,
        dtype=resolve_dtype(actor.dtype, device),
        device=device,
        flag=flag,
        images=images is not None,
        shard=shard,
    )
    if images is not None:
        check_images(model, images, name, flag)
    if critic.lora.rank:
        add_lora(model, critic.lora, seed=seed, at="critic.lora")
    return TorchValue(
        _compiled(model, actor),
        tokenizer,
        optimizer,
        head=head,
        gradient_checkpointing=actor.gradient_checkpointing,
        offload_activations=actor.offload_activations,
        optimize=optimize,
    )


def make_trained_reward(
    actor: ExampleModelConfig,
    seed: int,
    tokenizer: Any,
    optimizer: OptimizerSettings,
    optimize: Optimize,
    shard: Shard | None = None,
    images: ImageRenderer | None = None,
) -> TorchReward:
    """Loads the model that becomes a reward model, with adapters if they are set. Its head is the one in its files, or
    begins at random, with a standard deviation of 1 / sqrt(H + 1) as OpenRLHF's. `images` renders the images that it
    sees."""
    device = compute_device(actor)
    model, head = load_critic(
        actor.model_name_or_path,
        dtype=resolve_dtype(actor.dtype, device),
        device=device,
        flag=ACTOR_FLAG,
        load_in_4bit=actor.lora.load_in_4bit,
        shard=shard,
    )
    if images is not None:
        check_images(model, images, actor.model_name_or_path, ACTOR_FLAG)
    _freeze_unseen(model, actor, images)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:  # its padding token was added
        make_whole(model, but=layer_parts(model))
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if actor.lora.rank:
        add_lora(model, actor.lora, seed=seed)
    if not head:
        width = model.config.get_text_config().hidden_size
        chance = torch.Generator().manual_seed(seed)
        head = {"weight": torch.randn(1, width, generator=chance) / math.sqrt(width + 1)}
    return TorchReward(
        _compiled(model, actor),
        tokenizer,
        optimizer,
        head={"weight": head["weight"]},  # a critic's bias is the same for all scores
        gradient_checkpointing=actor.gradient_checkpointing,
        offload_activations=actor.offload_activations,
        optimize=optimize,
    )


def reference_model_kind(actor: ActorConfig, ref: RefConfig) -> str:
    """Returns the kind of the reference's weights in a run of one process: the actor's without adapters, or its own."""
    return "actor" if actor.lora.rank and ref.model_name_or_path is None else "own"


def has_gpu() -> bool:
    """Returns whether this process trains on a GPU."""
    return default_device().type == "cuda"
