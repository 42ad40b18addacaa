"""The section `actor`: the policy that is trained."""

from enum import StrEnum
from typing import Any

from attrs import define, fields_dict

from rollgrad.application.settings.sections.cluster import IN_CLUSTER, Strategy
from rollgrad.application.settings.sections.ds import PARAMETERS
from rollgrad.application.settings.sections.optimizer import (
    BY_NAME,
    BY_SCHEDULE,
    DECAYS,
    SCHEDULE,
    WITH_MUON,
    AdamConfig,
    LRScheduler,
    MuonConfig,
    Optim,
    decay_setting,
    optim_path_setting,
    schedule_path_setting,
)
from rollgrad.domain.algorithms.settings import PolicyLossSettings
from rollgrad.domain.settings import (
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Condition,
    Range,
    section,
    setting,
)


class DType(StrEnum):
    """Number format of forward and backward; master weights and losses stay float32."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class RouterReplay(StrEnum):
    """Who chooses the experts that a mixture's tokens are sent to in updates."""

    NONE = "none"
    TRAINER = "trainer"
    ENGINE = "engine"


class Checkpointing(StrEnum):
    """Activations that the backward pass computes again."""

    OFF = "off"
    """None: all that it needs is kept."""
    FULL = "full"
    """All but the input of each layer."""
    SELECTIVE = "selective"
    """All but the input of each layer, and results of attention and of matrix products."""


class LoraSync(StrEnum):
    """Weights of a model with adapters that go to engines."""

    MERGED = "merged"
    ADAPTER = "adapter"


ALL_LINEAR = ("all-linear",)
"""Stands for the names of all linear layers but the vocabulary's head."""

WITH_ADAPTERS = Condition(
    lambda here, run: here.rank > 0,
    "{at}rank is 0, which trains all weights",
    "set --{at}rank above 0",
)


PLAIN_ADAPTERS = Condition(
    lambda here, run: (
        not here.dropout
        and not getattr(here, "load_in_4bit", False)
        and getattr(here, "sync", LoraSync.MERGED) is LoraSync.MERGED
    ),
    "dropout, weights in 4 bits and engines that get adapters alone are not computed with DoRA",
    "leave these out",
)

ONE_PROCESS = Condition(
    lambda here, run: not run.cluster.enable and not run.actor.compile,
    "DoRA is computed in one process, and not by compiled layers",
    "leave --cluster.enable and --actor.compile out",
)


@define(kw_only=True)
class AdapterConfig:
    """Adapters that are trained instead of the weights; the run saves the model with adapters merged."""

    rank: int = setting(0, "Rows of the adapters' narrow matrices; 0 trains all weights.", NOT_NEGATIVE)
    alpha: int = setting(32, "An adapter counts alpha / rank times.", POSITIVE, only_if=WITH_ADAPTERS)
    rslora: bool = setting(
        False,
        "Count adapters alpha / sqrt(rank) times, so that those of a high rank learn as fast as others (rsLoRA, "
        "Kalajdzievski 2023, arXiv:2312.03732).",
        only_if=WITH_ADAPTERS,
    )
    dora: bool = setting(
        False,
        "Train the length of each row of the weights apart from its direction, which alone gets an adapter (DoRA, Liu "
        "et al. 2024, arXiv:2402.09353). An update takes longer.",
        only_if=(WITH_ADAPTERS, PLAIN_ADAPTERS, ONE_PROCESS),
    )
    dropout: float = setting(
        0.0,
        "Share of the inputs of adapters that updates leave out, chosen by the tokens and the step; sampling, scoring "
        "and the saved model leave none out. In reinforcement learning the ratio of an update's log-probs to those "
        "before it then varies by chance as well.",
        BELOW_ONE,
        only_if=WITH_ADAPTERS,
    )
    target_modules: tuple[str, ...] = setting(
        ALL_LINEAR,
        "Linear layers that get adapters, by the last parts of their names (q_proj, mlp.up_proj); all-linear is all "
        "of them but the vocabulary's head. Experts of a mixture, stacks of matrices, get none, nor do layers that "
        "share a weight or are not called as a layer.",
        Range(lambda names: bool(names) and all(names), "at least one name, and none empty"),
        only_if=WITH_ADAPTERS,
    )


@define(kw_only=True)
class LoraConfig(AdapterConfig):
    """Adapters of the model that is trained; the run saves them in `adapter` below it, too."""

    load_in_4bit: bool = setting(
        False,
        "QLoRA: keep the weights beside the adapters in 4 bits (NF4 with double quantisation, pip install "
        "rollgrad[qlora]). The reference, the saved model and whatever samples from it then have the "
        "dequantised weights.",
        only_if=WITH_ADAPTERS,
    )
    sync: LoraSync = setting(
        LoraSync.MERGED,
        "What engines get after an update: merged is all weights with the adapters added; adapter is the adapters "
        "alone, which vLLM then computes beside the weights of actor.model_name_or_path.",
        only_if=WITH_ADAPTERS,
    )


WITHOUT_DROPOUT = Condition(
    lambda here, run: not any(part.lora.dropout for part in (here, getattr(run, "critic", here))),
    "what lora.dropout leaves out is not computed by compiled layers",
    "leave --{at}lora.dropout and --critic.lora.dropout out",
)

WITHOUT_FETCHING = Condition(
    lambda here, run: (
        not run.cluster.enable
        or run.cluster.strategy is Strategy.FSDP2
        or (run.ds.zero_stage < PARAMETERS and run.ds.tensor_parallel_size == 1)
    ),
    "DeepSpeed's ds.zero_stage 3 and ds.tensor_parallel_size cut layers into pieces too small to compile",
    "set --cluster.strategy fsdp2, or leave these out",
)


WHERE_IT_SELECTS = (
    Condition(
        lambda here, run: here.gradient_checkpointing is not Checkpointing.SELECTIVE or not here.compile,
        "inside of compiled layers ({at}compile) nobody sees which results to keep",
        "set --{at}gradient_checkpointing full, or leave --{at}compile out",
    ),
    Condition(
        lambda here, run: (
            here.gradient_checkpointing is not Checkpointing.SELECTIVE or WITHOUT_FETCHING.holds(here, run)
        ),
        "DeepSpeed's ds.zero_stage 3 fetches weights in the midst of layers, and ds.tensor_parallel_size adds up kept "
        "results in place",
        "set --{at}gradient_checkpointing full, or --cluster.strategy fsdp2",
    ),
)

WITH_CHECKPOINTING = Condition(
    lambda here, run: here.gradient_checkpointing is not Checkpointing.OFF,
    "{at}gradient_checkpointing is off, which keeps what each operation needs where it was computed",
    "set --{at}gradient_checkpointing full",
)


@define(kw_only=True)
class ModelConfig:
    """A model that is trained, and its optimizer."""

    model_name_or_path: str = setting("", "Hugging Face name or directory of the model. Required.")
    num_nodes: int = setting(
        1, "Machines that the model is trained on, with cluster.enable.", COUNT, only_if=IN_CLUSTER
    )
    num_gpus_per_node: int = setting(
        1, "Processes on each of them, with one GPU each where there are any.", COUNT, only_if=IN_CLUSTER
    )
    dtype: DType = setting(
        DType.AUTO,
        "Compute format of all models of the run, wherever they compute; auto is bfloat16 where the hardware "
        "multiplies it natively, else float32. float16 rounds eight times finer than bfloat16 but overflows early: its"
        " loss is scaled, and steps whose gradients overflow are skipped.",
    )
    float32_head: bool = setting(
        False,
        "Compute logits in float32 from the hidden states and the output embedding, whatever dtype is: log-probs "
        "are then free of the rounding of logits (0.02 on average with logits of a standard deviation of 5 in "
        "bfloat16), but for those of other programs that sample.",
    )
    deterministic: bool = setting(
        False,
        "Compute models with deterministic kernels, which are slower: on the same machines the same numbers give the "
        "same bits. An operation that has no such kernel is warned of.",
    )
    gradient_checkpointing: Checkpointing = setting(
        Checkpointing.OFF,
        "Recompute activations in the backward pass: full keeps the input of each layer alone, for about a third more "
        "compute; selective also keeps results of attention and of matrix products, which take nearly all of that "
        "third, and holds about two fifths of what off does. True is full, False is off.",
        only_if=WHERE_IT_SELECTS,
    )
    offload_activations: bool = setting(
        False,
        "Keep the inputs of layers, from which activations are recomputed, in the machine's memory: they are copied "
        "there and back while layers are computed, and a GPU holds those of two layers alone. Without a GPU they are "
        "copied for nothing.",
        only_if=WITH_CHECKPOINTING,
    )
    compile: bool = setting(
        False,
        "Compile each layer of the models that are trained, and of the reference, by torch.compile, which fuses what "
        "lies between matrix products: less memory is read and written. Packs of all sizes share what is compiled; the "
        "first step takes up to some minutes longer. Needs a C++ compiler, on a GPU Triton.",
        only_if=(WITHOUT_DROPOUT, WITHOUT_FETCHING),
    )
    aux_loss_coef: float = setting(
        0.0,
        "Weight of the load-balancing loss of a mixture of experts (Switch Transformers), over all tokens of an "
        "optimizer step; above 0 it takes one more forward pass.",
        NOT_NEGATIVE,
    )
    router_z_loss_coef: float = setting(
        0.0,
        "Weight of the z-loss of a mixture's routers, the mean of logsumexp(router logits)^2 over all tokens of an "
        "optimizer step and all layers (Zoph et al. 2022, ST-MoE; there 0.001); above 0 it takes one more forward "
        "pass, which aux_loss_coef shares.",
        NOT_NEGATIVE,
    )
    lora: LoraConfig = section(LoraConfig, "Low-rank adapters; with a rank above 0 they alone are trained.")
    optim: Optim = setting(
        Optim.ADAM,
        "adam steps everything by AdamW, muon hidden matrices by Muon and the rest by AdamW.",
        only_if=BY_NAME,
    )
    optim_path: str | None = optim_path_setting()
    adam: AdamConfig = section(AdamConfig, "AdamW.")
    muon: MuonConfig = section(MuonConfig, "Muon.", only_if=WITH_MUON)
    lr_scheduler: LRScheduler = setting(LRScheduler.CONSTANT, SCHEDULE, only_if=BY_SCHEDULE)
    lr_scheduler_path: str | None = schedule_path_setting()
    lr_warmup_ratio: float = setting(
        0.0, "Share of the run's optimizer steps spent warming up.", BELOW_ONE, only_if=BY_SCHEDULE
    )
    min_lr_ratio: float = setting(
        0.1, "Floor of the decaying schedules, as a share of the peak.", SHARE, only_if=(BY_SCHEDULE, DECAYS)
    )
    lr_decay_ratio: float = decay_setting()
    max_norm: float = setting(
        1.0, "Gradient norm above which gradients are scaled down; 0 turns clipping off.", NOT_NEGATIVE
    )

    def __setattr__(self, name: str, value: object) -> None:
        if name == "gradient_checkpointing" and isinstance(value, bool):  # a switch, as in other libraries
            value = Checkpointing.FULL if value else Checkpointing.OFF
        super().__setattr__(name, value)

    @property
    def peak_lr(self) -> float:
        """Learning rate of AdamW after warm-up."""
        return self.adam.lr


def frozen_tower_setting() -> Any:
    """Returns the setting `freeze_visual_encoder` of a model that is trained on images."""
    return setting(
        False,
        "Train the language model alone, not what makes its input of images: the tower and its projection.",
        only_if=Condition(
            lambda here, run: run.data.image_key is not None,
            "data.image_key is not set, which images are read from",
            "set --data.image_key",
        ),
    )


@define(kw_only=True)
class ActorConfig(PolicyLossSettings, ModelConfig):
    """The policy that is trained."""

    router_replay: RouterReplay = setting(
        RouterReplay.NONE,
        "Experts of a mixture to which an update sends its tokens. none: those that the routers choose now. trainer: "
        "those that they chose before the first update with these tokens (R2). engine: those that the tokens went to "
        "when they were sampled (R3), also for log-probs before the update. Weights of the experts, and gradients, are "
        "the routers' own.",
    )
    freeze_visual_encoder: bool = frozen_tower_setting()

    def __setattr__(self, name: str, value: object) -> None:
        # Of two bases one has a __dict__, in which a misspelt setting would be kept without a word.
        if name not in fields_dict(type(self)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        super().__setattr__(name, value)
