"""Rules of score centering, which subtracts the mean of a token's gradient. See `validation`."""

from collections.abc import Iterator

from rollgrad.application.settings.correction import correction_level, truncated_sampling
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.algorithms.catalogue import ESTIMATORS, POLICY_LOSSES
from rollgrad.domain.algorithms.settings import CorrectionGate, CorrectionLevel, KLEstimator, OldLogprobs

SERVED_TOKENS = 19
"""Likely tokens at each place that vLLM's server says at most besides the sampled one, unless it is started with
another --max-logprobs."""


def centering_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of score centering."""
    algo, top_k = config.algo, config.algo.score_centering_top_k
    if not top_k:
        return
    on = f"algo.score_centering_top_k is {top_k}"
    out = "leave --algo.score_centering_top_k out"
    loss = config.actor.policy_loss_type
    if loss not in POLICY_LOSSES or not POLICY_LOSSES[loss].by_token:
        centred = ", ".join(name for name, traits in POLICY_LOSSES.items() if traits.by_token)
        yield (
            f"{on} with actor.policy_loss_type {loss}, whose gradient at a token is not its score times its advantage: "
            f"set --actor.policy_loss_type to one of {centred}, or {out}."
        )
    correction, level = algo.correction, correction_level(config)
    if level not in (CorrectionLevel.OFF, CorrectionLevel.TOKEN):
        yield (
            f"{on} with algo.correction.level {level}, whose weight depends on the tokens of a whole sequence, so that "
            f"it has no mean at one place: set --algo.correction.level to token or off, or {out}."
        )
    elif level is CorrectionLevel.TOKEN and correction.gate is not CorrectionGate.RATIO:
        yield (
            f"{on} with algo.correction.gate {correction.gate}, but the mean score is weighted by ratios alone: set "
            f"--algo.correction.gate to ratio, or {out}."
        )
    if algo.old_logprobs is not OldLogprobs.RECOMPUTE:
        yield (
            f"{on} with algo.old_logprobs {algo.old_logprobs}, whose ratio is against the policy that sampled and is "
            "clipped by the sign of the advantage, of which the mean score knows nothing: set --algo.old_logprobs to "
            f"recompute, or {out}."
        )
    if (truncated := truncated_sampling(config)) is not None:
        yield (
            f"{on} with {truncated}, but the policy's probabilities are of the whole vocabulary: set --rollout.top_p 1 "
            f"and --rollout.top_k 0, or {out}."
        )
    if algo.kl.init_coef > 0 and algo.kl.estimator == KLEstimator.FULL:
        yield (
            f"{on} with algo.kl.estimator full, but the pass that compares whole distributions finds no mean score: "
            f"set --algo.kl.estimator to k2 or k3, or {out}."
        )
    estimator = algo.advantage.estimator
    if estimator in ESTIMATORS and "collisions" in ESTIMATORS[estimator].needs:
        yield (
            f"{on} with algo.advantage.estimator {estimator}, whose pass over the vocabulary finds no mean score: set "
            f"--algo.advantage.estimator to opo, or {out}."
        )
    if config.rollout.engine is Engine.SERVER and top_k > SERVED_TOKENS:
        yield (
            f"{on} with rollout.engine server, but vLLM's server says {SERVED_TOKENS} likely tokens at most: set "
            f"--algo.score_centering_top_k to {SERVED_TOKENS} or less, or --rollout.engine to vllm or embedded."
        )
    most = (config.vllm.extra or {}).get("max_logprobs")
    if config.rollout.engine is Engine.VLLM and isinstance(most, int) and 0 <= most < top_k:
        yield (
            f"{on}, but vLLM is to say {most} likely tokens at most (vllm.extra.max_logprobs): leave "
            "--vllm.extra.max_logprobs out."
        )
