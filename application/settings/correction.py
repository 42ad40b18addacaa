"""Decides which off-policy correction a run uses, from its settings alone.

Does not own: the weights themselves (`domain.algorithms.losses.corrections`), and rules across settings (`validation`).
"""

from typing import Any

from rollgrad.application.settings.derived import optimizer_steps_per_rollout
from rollgrad.application.settings.quantized import quantized_engine
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.algorithms.settings import CorrectionGate, CorrectionLevel, CorrectionMode, OldLogprobs


def may_be_stale(config: RLConfig) -> bool:
    """Whether samples may be of an older policy than the one that trains on them."""
    rollout, train = config.rollout, config.train
    if train.async_enable:
        return train.max_staleness > 0
    return (rollout.generate_batch_size or 0) > rollout.batch_size  # what is left over serves the next rollout


def truncated_sampling(config: RLConfig) -> str | None:
    """The settings that sample from less than the full distribution, against which no ratio is unbiased; None if the
    distribution is full."""
    rollout = config.rollout
    if rollout.top_p == 1 and rollout.top_k == 0:
        return None
    return f"rollout.top_p {rollout.top_p} and rollout.top_k {rollout.top_k}"


def correction_level(config: RLConfig) -> CorrectionLevel:
    """Level of the importance ratio by which tokens are weighted, or off.

    `auto` is token where samples may be stale, or of an engine that quantises, and nothing else corrects them: with its
    defaults truncated importance sampling, min(pi / mu, 2) (Yao et al. 2025). Otherwise it is off, also where the
    loss's own ratio already is against the sampler (`algo.old_logprobs`), and where samples are of a truncated
    distribution.
    """
    algo = config.algo
    if algo.correction.level is not CorrectionLevel.AUTO:
        return algo.correction.level
    uncorrected = _of_another_policy(config) and algo.old_logprobs is OldLogprobs.RECOMPUTE
    return CorrectionLevel.TOKEN if uncorrected and not truncated_sampling(config) else CorrectionLevel.OFF


def _of_another_policy(config: RLConfig) -> bool:
    """Whether samples may differ from those of the policy that trains on them by more than rounding."""
    return may_be_stale(config) or quantized_engine(config) is not None


def off_policy(config: RLConfig) -> bool:
    """Whether the loss accounts for samples of older policies."""
    return correction_level(config) is not CorrectionLevel.OFF or config.algo.old_logprobs is not OldLogprobs.RECOMPUTE


def learns_from_stale(config: RLConfig) -> bool:
    """Whether the loss accounts for samples of older policies, or what these have in common is taken out of it."""
    return off_policy(config) or config.algo.score_centering_top_k > 0


def correction_summary(config: RLConfig) -> dict[str, Any]:
    """The correction that acts, between which log-probs, within which bounds, and why, in words; also what is taken
    out."""
    level, top_k = correction_level(config), config.algo.score_centering_top_k
    centred = {"score_centering": f"by the sampler's {top_k} likeliest tokens"} if top_k else {}
    if level is CorrectionLevel.OFF:
        return {"weights": "none", **centred, "why": _why(config)}
    correction = config.algo.correction
    bounds = {
        CorrectionMode.TRUNCATE: f"at most {correction.high}",
        CorrectionMode.CLIP: f"{correction.low} to {correction.high}",
        CorrectionMode.MASK: f"0 outside {correction.low} to {correction.high}",
    }[correction.mode]
    if correction.gate is not CorrectionGate.RATIO:
        gate = f"0 where {correction.gate} is above {correction.threshold}"
        if correction.gate is CorrectionGate.SECOND_MOMENT:
            gate = f"0 at those furthest off, until the others' second moment is at most {correction.threshold}"
        bounds = gate if correction.mode is CorrectionMode.MASK else f"{bounds}; {gate}"
    return {
        "weights": f"{level} importance ratio, {correction.mode}",
        "between": f"{_proximal(config)} and the log-probs recorded when sampling",
        "bounds": bounds,
        **centred,
        "why": _why(config),
    }


def log_correction(config: RLConfig) -> None:
    """Says at the start of a run which correction acts; a warning if samples of another policy have none."""
    import structlog

    uncorrected = _of_another_policy(config) and not learns_from_stale(config)
    log = structlog.get_logger(__name__)
    (log.warning if uncorrected else log.info)("off-policy correction", **correction_summary(config))


def _why(config: RLConfig) -> str:
    algo = config.algo
    stale = "samples may be older than the weights" if may_be_stale(config) else "every sample is of the newest policy"
    if quantized := quantized_engine(config):
        stale += f", but of an engine that quantises ({quantized})"
    if algo.correction.level is not CorrectionLevel.AUTO:
        return f"algo.correction.level is {algo.correction.level}; {stale}"
    if _of_another_policy(config) and algo.old_logprobs is not OldLogprobs.RECOMPUTE:
        return f"{stale}, and algo.old_logprobs {algo.old_logprobs} corrects for that"
    if _of_another_policy(config) and (truncated := truncated_sampling(config)):
        return f"{stale}, but {truncated} leave no unbiased ratio"
    return stale


def _proximal(config: RLConfig) -> str:
    """The policy whose log-probs stand above those of the sampler."""
    kl = config.algo.kl
    if config.algo.old_logprobs is OldLogprobs.INTERPOLATE:
        return "an interpolation of sampler and current policy"
    penalised = kl.init_coef > 0 and not kl.use_loss
    judged = config.algo.correction.gate is CorrectionGate.SECOND_MOMENT  # by the policy before the update
    recomputed = optimizer_steps_per_rollout(config) > 1 or penalised or judged
    if config.algo.old_logprobs is OldLogprobs.RECOMPUTE and recomputed:
        return "the policy before the update"
    return "the policy under training"
