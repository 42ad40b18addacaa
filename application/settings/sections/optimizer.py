"""Optimizers: AdamW, Muon, and the learning rate."""

from enum import StrEnum
from typing import Any

from attrs import define

from rollgrad.domain.settings import BELOW_ONE, NOT_NEGATIVE, POSITIVE, SOME_SHARE, Condition, Range, setting


class Optim(StrEnum):
    """Optimizer of hidden matrices; embeddings, head, norms and biases are AdamW's either way."""

    ADAM = "adam"
    MUON = "muon"


class LRScheduler(StrEnum):
    """Learning rate over the run, after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"
    """The peak, and in the last lr_decay_ratio of the run linearly to the floor."""


WITH_MUON = Condition(lambda here, run: here.optim is Optim.MUON, "{at}optim is {here.optim}", "set --{at}optim muon")

BY_SCHEDULE = Condition(
    lambda here, run: here.lr_scheduler_path is None,
    "{at}lr_scheduler_path {here.lr_scheduler_path} gives the learning rate of every step",
    "leave --{at}lr_scheduler_path out",
)

BY_NAME = Condition(
    lambda here, run: here.optim_path is None,
    "{at}optim_path {here.optim_path} is the optimizer",
    "leave --{at}optim_path out",
)

DECAYS = Condition(
    lambda here, run: here.lr_scheduler is not LRScheduler.CONSTANT,
    "a constant learning rate has no floor",
    "set --{at}lr_scheduler to linear, cosine_with_min_lr or warmup_stable_decay",
)

DECAYS_LATE = Condition(
    lambda here, run: here.lr_scheduler is LRScheduler.WARMUP_STABLE_DECAY,
    "{at}lr_scheduler is {here.lr_scheduler}, which says by itself when the learning rate falls",
    "set --{at}lr_scheduler warmup_stable_decay",
)

SCHEDULE = (
    "Learning rate after warm-up: constant; linear or cosine_with_min_lr, which fall to the floor until the run's end;"
    " or warmup_stable_decay, which keeps the peak and falls linearly at the end, so that a run may be made longer "
    "before the fall (Hu et al. 2024, arXiv:2404.06395)."
)
"""Text of the setting `lr_scheduler`."""


def schedule_path_setting() -> Any:
    """Returns the setting `lr_scheduler_path`, which actor and critic have."""
    return setting(
        None,
        "Python file, or module (my_lib.rates), with a function lr_scheduler(step, total_steps), or FILE:NAME: it "
        "returns the learning rate of optimizer step `step`, from 0, as a share of the peak, in the place of "
        "lr_scheduler and its warm-up.",
    )


def optim_path_setting() -> Any:
    """Returns the setting `optim_path`, which actor and critic have."""
    return setting(
        None,
        "Python file, or module (torch.optim:SGD), with a function or class optim(groups), or FILE:NAME: it returns a "
        "torch.optim.Optimizer of parameter groups, which have the rate and the weight decay of adam, in its place.",
    )


def decay_setting() -> Any:
    """Returns the setting `lr_decay_ratio`, which actor and critic have."""
    return setting(
        0.1,
        "Last share of the run's optimizer steps, in which warmup_stable_decay lowers the learning rate.",
        SOME_SHARE,
        only_if=(BY_SCHEDULE, DECAYS_LATE),
    )


@define(kw_only=True)
class AdamConfig:
    """AdamW on float32 master weights; biases and norm weights are not decayed."""

    lr: float = setting(1e-6, "Peak learning rate.", NOT_NEGATIVE)
    betas: tuple[float, float] = setting(
        (0.9, 0.95),
        "Decay of the first and second moment.",
        Range(lambda betas: all(0 <= beta < 1 for beta in betas), "two numbers at least 0 and below 1"),
    )
    eps: float = setting(1e-8, "Added to the root of the second moment.", POSITIVE)
    weight_decay: float = setting(0.0, "Decoupled weight decay.", NOT_NEGATIVE)


@define(kw_only=True)
class MuonConfig:
    """Muon on hidden matrices, with optim muon: each step turns all directions of a matrix alike. Its weight decay is
    that of adam."""

    lr: float = setting(
        1e-5,
        "Peak learning rate: about the length of a step in each direction. 1e-5 moves the weights of a model of a "
        "billion parameters about as far as AdamW does with 1e-6.",
        NOT_NEGATIVE,
    )
    momentum: float = setting(0.95, "Decay of the momentum, which is Nesterov's.", BELOW_ONE)
