"""Rules of the algorithm: estimator, policy loss, off-policy correction. See `validation`."""

from collections.abc import Iterable, Iterator

import attrs

from rollgrad.application.settings.correction import correction_level, may_be_stale
from rollgrad.application.settings.derived import first_change
from rollgrad.application.settings.presets import refuse_preset, traits_of
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import ActorConfig
from rollgrad.application.settings.sections.critic import CriticConfig
from rollgrad.domain.algorithms.catalogue import ESTIMATORS, POLICY_LOSSES, policy_loss_traits
from rollgrad.domain.algorithms.settings import (
    AdvantageSettings,
    CorrectionGate,
    CorrectionLevel,
    CorrectionMode,
    CorrectionSettings,
    KLEstimator,
    OldLogprobs,
    Whiten,
)

OF_POLICY_LOSSES = (
    *("dual_clip", "sapo_tau", "vespo_k", "vespo_lambda", "dro_beta"),
    *("cov_share", "cov_range", "cov_kl_coef"),
)
"""Settings of the actor that some policy losses alone read."""


def algorithm_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of the estimator, its settings, and its needs."""
    if config.algo.preset is not None:
        yield (
            f"algo.preset is {config.algo.preset!r}, but a preset is expanded where a file or flags are read: in "
            "Python call rollgrad.load_config(preset=...)."
        )
    advantage = config.algo.advantage
    estimator = advantage.estimator
    traits = traits_of(estimator)
    samples = config.rollout.n_samples_per_prompt
    if "group" in traits.needs and samples < 2:
        yield (
            f"algo.advantage.estimator {estimator} compares the samples of a prompt, but "
            f"rollout.n_samples_per_prompt is {samples}: set --rollout.n_samples_per_prompt to 2 or more."
        )
    if "pass_k" in traits.uses and 2 <= samples <= advantage.pass_k:
        yield (
            f"algo.advantage.pass_k is {advantage.pass_k}, but of a group of {samples} samples there are no several "
            f"choices of {advantage.pass_k} to compare: raise --rollout.n_samples_per_prompt above it, or lower "
            "--algo.advantage.pass_k."
        )
    for key in ("gamma", "lambd", "critic_lambd", "length_adaptive_alpha", "prefix_weight", "pass_k", "step_weight"):
        value = getattr(advantage, key)
        if value != getattr(AdvantageSettings(), key) and key not in traits.uses:
            yield (
                f"algo.advantage.{key} is {value}, which the {estimator} estimator does not use: leave "
                f"--algo.advantage.{key} out, or set --algo.advantage.estimator to {_either(_users_of(key))}."
            )
    if advantage.length_adaptive_alpha is not None and advantage.lambd != AdvantageSettings().lambd:
        yield (
            f"algo.advantage.lambd is {advantage.lambd} and algo.advantage.length_adaptive_alpha is "
            f"{advantage.length_adaptive_alpha}, which replaces it: leave --algo.advantage.lambd out."
        )
    scaled = (advantage.whiten or traits.whiten) != Whiten.NONE or "no_std_norm" in traits.uses
    if advantage.no_std_norm and not scaled:
        yield (
            f"algo.advantage.no_std_norm is True, but the {estimator} estimator's advantages are not whitened: leave "
            "--algo.advantage.no_std_norm out, or set --algo.advantage.whiten to batch or group."
        )
    yield from _critic_problems(config)
    yield from _distillation_problems(config)


def _critic_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of a critic that the estimator does not read, or that alone would be trained."""
    estimator = config.algo.advantage.estimator
    critic = first_change(config.critic, CriticConfig())
    if "critic" not in traits_of(estimator).needs and critic:
        yield (
            f"critic.{critic} is set, but the {estimator} estimator has no critic: leave --critic.{critic} out, or set "
            f"--algo.advantage.estimator to gae."
        )
    frozen, steps = config.critic.freezing_steps, config.train.max_steps
    if steps is not None and frozen >= steps:
        yield (
            f"critic.freezing_steps is {frozen}, but the run has {steps} rollouts, so the actor would never be "
            "trained: lower --critic.freezing_steps or raise --train.max_steps."
        )


def _distillation_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of an estimator that learns from a teacher."""
    estimator = config.algo.advantage.estimator
    traits = traits_of(estimator)
    kl = config.algo.kl
    taught = kl.estimator == (KLEstimator.FULL if kl.use_loss else KLEstimator.K1)
    more = (config.ref.model_name_or_path, kl.teacher_template) != (None, None) or config.ref.served
    if "teacher" in traits.needs and (not more or kl.init_coef == 0 or not taught):
        yield (
            f"algo.advantage.estimator {estimator} learns from the log-probs of a teacher: name it with "
            "--ref.model_name_or_path, --ref.url or --ref.urls, or let the model itself be one with "
            "--algo.kl.teacher_template; set --algo.kl.init_coef above 0 (1 is usual), and leave --algo.kl.use_loss "
            "and --algo.kl.estimator out, or turn on --algo.kl.use_loss and set --algo.kl.estimator to full."
        )
    elif "prefix_weight" in traits.uses and kl.use_loss:
        yield (
            f"algo.advantage.estimator {estimator} weighs the log-ratios of sampled tokens, but with algo.kl.use_loss "
            "the divergence from the teacher is a loss of its own, which nothing weighs: leave --algo.kl.use_loss and "
            "--algo.kl.estimator out, or set --algo.advantage.estimator to on_policy_distill."
        )


def brought_problems(config: RLConfig) -> Iterator[str]:
    """Settings that an algorithm brings which is not the one that runs."""
    algo = config.algo
    chosen = {
        "estimators": (algo.estimators, "algo.advantage.estimator", algo.advantage.estimator),
        "losses": (algo.losses, "actor.policy_loss_type", config.actor.policy_loss_type),
    }
    for kind, (sections, key, running) in chosen.items():
        for name in attrs.fields_dict(type(sections)):
            own = getattr(sections, name)
            changed = first_change(own, type(own)())
            if changed and name != running:
                yield (
                    f"algo.{kind}.{name}.{changed} is {getattr(own, changed)!r}, but {key} is {running}: set --{key} "
                    f"{name}, or leave --algo.{kind}.{name}.{changed} out."
                )


def policy_loss_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of the policy loss and its settings."""
    actor, default = config.actor, ActorConfig()
    name = actor.policy_loss_type
    if name not in POLICY_LOSSES:
        refuse_preset(name, "actor.policy_loss_type")
    traits = policy_loss_traits(name)
    for key in ("eps_clip", "eps_clip_low_high"):
        if getattr(actor, key) is not None and traits.clip is None:
            yield f"actor.{key} is {getattr(actor, key)}, but the {name} loss does not clip: leave --actor.{key} out."
    for key in OF_POLICY_LOSSES:
        value = getattr(actor, key)
        if value != getattr(default, key) and key not in traits.uses:
            users = [loss for loss, other in POLICY_LOSSES.items() if key in other.uses]
            yield (
                f"actor.{key} is {value}, which the {name} loss does not use: leave --actor.{key} out, or set "
                f"--actor.policy_loss_type to {_either(users)}."
            )
    old, corrected = config.algo.old_logprobs, correction_level(config) is not CorrectionLevel.OFF
    if traits.on_policy and old is not OldLogprobs.RECOMPUTE and (corrected or may_be_stale(config)):
        yield (
            f"algo.old_logprobs is {old} with actor.policy_loss_type {name}, which has no ratio, so that samples of "
            "other policies would weigh as if they were the current one's: leave --algo.old_logprobs out, or set "
            "--actor.policy_loss_type to ppo."
        )
    if actor.eps_clip is not None and actor.eps_clip_low_high is not None:
        yield (
            f"actor.eps_clip is {actor.eps_clip} and actor.eps_clip_low_high is {actor.eps_clip_low_high}, which "
            "replaces it: leave --actor.eps_clip out."
        )


def correction_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of the off-policy correction."""
    correction, level = config.algo.correction, correction_level(config)
    default = CorrectionSettings(level=correction.level)
    if level is CorrectionLevel.OFF:
        changed = first_change(correction, default)
        if changed:
            yield (
                f"algo.correction.{changed} is {getattr(correction, changed)}, but nothing is corrected "
                f"(algo.correction.level is {correction.level}): set --algo.correction.level to token, sequence or "
                f"geometric, or leave --algo.correction.{changed} out."
            )
        return
    mode, gate = correction.mode, correction.gate
    masks_ratio = mode is CorrectionMode.MASK and gate is CorrectionGate.RATIO
    reads = {
        "low": mode is CorrectionMode.CLIP or masks_ratio,
        "high": mode is not CorrectionMode.MASK or masks_ratio,
        "threshold": gate is not CorrectionGate.RATIO,
    }
    for key, read in reads.items():
        value = getattr(correction, key)
        if not read and value != getattr(default, key):
            yield (
                f"algo.correction.{key} is {value}, which mode {mode} with gate {gate} does not use: leave "
                f"--algo.correction.{key} out."
            )
    if correction.low >= correction.high:
        yield (
            f"algo.correction.low is {correction.low} and algo.correction.high is {correction.high}, but the lower "
            "bound must be below the upper: change --algo.correction.low or --algo.correction.high."
        )
    if gate is CorrectionGate.OPSM and level is CorrectionLevel.TOKEN:
        yield (
            f"algo.correction.gate is opsm, which judges whole sequences, but algo.correction.level is "
            f"{correction.level}, here token: set --algo.correction.level to sequence."
        )
    if gate is CorrectionGate.SECOND_MOMENT and level is not CorrectionLevel.TOKEN:
        yield (
            f"algo.correction.gate is second_moment, which compares the tokens of an optimizer step, but "
            f"algo.correction.level is {correction.level}: set --algo.correction.level to token."
        )
    if gate is CorrectionGate.SECOND_MOMENT and config.algo.old_logprobs is not OldLogprobs.RECOMPUTE:
        yield (
            f"algo.correction.gate is second_moment, which compares the policy before the update with the one that "
            f"sampled, but algo.old_logprobs is {config.algo.old_logprobs}, which does not compute its log-probs: set "
            "--algo.old_logprobs to recompute."
        )
    if config.algo.old_logprobs is OldLogprobs.ROLLOUT and mode is not CorrectionMode.MASK:
        yield (
            f"algo.correction.mode is {mode} with algo.old_logprobs rollout, whose ratio already is against the policy "
            "that sampled, so only leaving out remains: set --algo.correction.mode to mask, or --algo.old_logprobs to "
            "recompute."
        )


def _users_of(key: str) -> list[str]:
    return [name for name, traits in ESTIMATORS.items() if key in traits.uses]


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)
