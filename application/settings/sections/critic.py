"""The section `critic`: the value model of PPO."""

from attrs import define

from rollgrad.application.settings.sections.actor import AdapterConfig
from rollgrad.application.settings.sections.cluster import IN_CLUSTER
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
from rollgrad.domain.settings import BELOW_ONE, COUNT, NOT_NEGATIVE, POSITIVE, SHARE, section, setting


@define(kw_only=True)
class CriticConfig:
    """The value model of PPO; used by the gae and turn_gae estimators only."""

    model_name_or_path: str | None = setting(
        None,
        "Model the critic starts from; default: the actor's. A reward model (sequence classification with one label) "
        "also gives its head.",
    )
    num_nodes: int | None = setting(
        None, "Machines that the critic is trained on; default: as many as the actor's.", COUNT, only_if=IN_CLUSTER
    )
    num_gpus_per_node: int | None = setting(
        None, "Processes on each of them; default: as many as the actor's.", COUNT, only_if=IN_CLUSTER
    )
    freezing_steps: int = setting(
        0, "First rollouts that train the critic alone, with the actor frozen (value warm-up).", NOT_NEGATIVE
    )
    lora: AdapterConfig = section(
        AdapterConfig, "Low-rank adapters; with a rank above 0 they and the head alone are trained."
    )
    optim: Optim = setting(Optim.ADAM, "As actor.optim.", only_if=BY_NAME)
    optim_path: str | None = optim_path_setting()
    adam: AdamConfig = section(lambda: AdamConfig(lr=9e-6), "AdamW.")
    muon: MuonConfig = section(lambda: MuonConfig(lr=9e-5), "Muon.", only_if=WITH_MUON)
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
    value_clip: float | None = setting(
        0.5, "Largest move of a value from its estimate before the update; none turns it off.", POSITIVE
    )

    @property
    def peak_lr(self) -> float:
        """Learning rate of AdamW after warm-up."""
        return self.adam.lr
