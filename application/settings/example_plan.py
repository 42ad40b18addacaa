"""A run over examples as the memory plan sees it: a reinforcement-learning run that samples nothing.

What a trainer over examples holds is what an actor of that size with the same passes holds, and perhaps a frozen model
beside it; a reward model's head is too small to count. Importable without torch. Does not own: the plan
(`memory_plan`).
"""

import math

from attrs import fields

from rollgrad.application.settings.dpo import DPORun, has_reference
from rollgrad.application.settings.kd import KDRun
from rollgrad.application.settings.kto import KTORun
from rollgrad.application.settings.offline import OfflineRun, ReferencedRun
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import ActorConfig, ModelConfig
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.application.settings.sections.rollout import Engine, RolloutConfig
from rollgrad.application.settings.sections.train import TrainConfig
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.algorithms.settings import KLEstimator

OF_MODELS = ("adam", "lr_scheduler", "lr_warmup_ratio", "lr_scheduler_path")
"""Settings whose defaults differ between trainers, and which hold no memory."""


def as_sampling_nothing(run: OfflineRun, *, longest: int) -> RLConfig:
    """Returns the settings by which the memory of `run` is planned; its longest example has `longest` tokens, all of
    its sequences together."""
    names = [its.name for its in fields(ModelConfig) if its.name not in OF_MODELS]
    budget = run.train.batch_tokens if isinstance(run, SFTRun) else None
    config = RLConfig(
        actor=ActorConfig(**{name: getattr(run.actor, name) for name in names}),
        train=TrainConfig(
            max_tokens_per_micro_batch=run.train.max_tokens_per_micro_batch,
            # A reference that moves is kept as an average of the weights is.
            enable_ema=run.train.enable_ema or moves(run),
        ),
        data=DataConfig(max_len=longest, image_key=run.data.image_key),
        rollout=RolloutConfig(
            engine=Engine.SERVER,  # an engine that takes no memory here
            batch_size=run.train.batch_size if budget is None else math.ceil(budget / longest),
            n_samples_per_prompt=1,
            max_new_tokens=longest,  # any token may be trained
        ),
        cluster=run.cluster,
        ds=run.ds,
        ckpt=run.ckpt,
    )
    config.algo.advantage.estimator = "reinforce"  # which needs no critic
    frozen = frozen_model(run)
    if frozen is not None:
        config.ref.model_name_or_path = frozen
        config.algo.kl.init_coef = 1.0
    if isinstance(run, KDRun) and not run.kd.spans:  # whole in each of the actor's processes
        config.algo.kl.estimator = KLEstimator.FULL
    return config


def moves(run: OfflineRun) -> bool:
    """Returns whether the reference follows the policy."""
    following = run.dpo if isinstance(run, DPORun) else run.kto if isinstance(run, KTORun) else None
    return following is not None and following.ref_sync_steps is not None


def frozen_model(run: OfflineRun) -> str | None:
    """Returns the model that stays in memory beside the one that is trained; None where none does, or where it is the
    same without its adapters. A reference of data that are not streamed is gone before the first step."""
    if isinstance(run, KDRun):
        return None if run.kd.cache or run.kd.spans else run.teacher.model_name_or_path
    compares = isinstance(run, KTORun) or (isinstance(run, DPORun) and has_reference(run.dpo))
    if not compares or not run.data.stream or moves(run):
        return None
    assert isinstance(run, ReferencedRun)
    return run.ref.model_name_or_path or (None if run.actor.lora.rank else run.actor.model_name_or_path)
