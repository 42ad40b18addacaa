"""Policy losses per token. Each docstring gives the formula, with rho = exp(logprobs - old_logprobs), A the advantage,
and sg(x) a constant to the gradient ("stop gradient").

A loss of a whole sequence is repeated at each of its tokens, so that aggregation by sequence_mean gives the paper's
mean over sequences.
"""

import torch
from torch import Tensor

from rollgrad.domain.algorithms.losses.contract import PolicyLoss, PolicyLossInput, PolicyLossParams, policy_loss
from rollgrad.domain.algorithms.losses.covariance import select_for_clip_cov, select_for_kl_cov
from rollgrad.domain.algorithms.losses.ratios import binary_kl, bounded, ratio, sequence_mean, sequence_sum

MAX_WEIGHT = 20.0
"""Largest weight of a token's ratio in the losses with a trust region, as in verl."""


@policy_loss("ppo")
def ppo(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (Schulman et al. 2017, eq. 7; separate bounds: DAPO, Yu et
    al. 2025, eq. 10). With `dual_clip` c > 1 the loss of a negative advantage is at most -c A (Ye et al. 2020, eq. 5).
    """
    return _clipped(ratio(inputs.logprobs_N, inputs.old_logprobs_N), inputs, params)


@policy_loss("sequence_ppo")
def sequence_ppo(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """PPO's clip on the ratio of whole sequences, the product of the tokens' ratios (Ahmadian et al. 2024, the sequence
    as one action; what TRL's RLOOTrainer minimises). A sequence whose log-ratios sum to more than
    20 has no gradient."""
    sums_S = sequence_sum(_log_ratio(inputs), inputs.action_mask_N, inputs.sequence_N, inputs.sequences)
    return _clipped(bounded(sums_S).exp()[inputs.sequence_N], inputs, params)


@policy_loss("gspo")
def gspo(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """PPO's clip on s = exp(mean over the sequence of log rho) (Zheng et al. 2025, "GSPO", eq. 5 to 7)."""
    return _clipped(_geometric(inputs)[inputs.sequence_N], inputs, params)


@policy_loss("gspo_token")
def gspo_token(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """PPO's clip on sg(s) pi / sg(pi): the value of `gspo`, with an advantage of its own for each token (Zheng et al.
    2025, eq. 13 and 14)."""
    own_N = (inputs.logprobs_N - inputs.logprobs_N.detach()).exp()  # 1, with the gradient of log pi
    return _clipped(_geometric(inputs).detach()[inputs.sequence_N] * own_N, inputs, params)


@policy_loss("gmpo")
def gmpo(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """-exp(mean over the sequence of min(sgn(A) log rho, sgn(A) clip(log rho, -clip_low, clip_high)) sgn(A)) A, A the
    sequence's mean advantage: the geometric mean of clipped token ratios (Zhao et al. 2025, "GMPO", eq. 4). The clip
    range is of log rho."""
    log_ratio_N = bounded(_log_ratio(inputs))
    sign_N = inputs.advantages_N.sign()
    kept_N = log_ratio_N.clamp(-params.clip_low, params.clip_high)
    chosen_N = sign_N * torch.minimum(sign_N * log_ratio_N, sign_N * kept_N)
    mean = inputs.action_mask_N, inputs.sequence_N, inputs.sequences
    loss_S = -sequence_mean(chosen_N, *mean).exp() * sequence_mean(inputs.advantages_N, *mean)
    return PolicyLoss(
        loss_N=loss_S[inputs.sequence_N],
        ratio_N=log_ratio_N.exp(),
        clipped_low_N=(sign_N < 0) & (log_ratio_N < -params.clip_low),
        clipped_high_N=(sign_N > 0) & (log_ratio_N > params.clip_high),
    )


@policy_loss("cispo")
def cispo(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi: the weight is clipped, the gradient never lost (MiniMax
    2025, "MiniMax-M1", eq. 4 and 5; a clip_low of 1 is no lower bound)."""
    ratio_N = ratio(inputs.logprobs_N, inputs.old_logprobs_N).detach()
    low, high = 1.0 - params.clip_low, 1.0 + params.clip_high
    return PolicyLoss(
        loss_N=-ratio_N.clamp(low, high) * inputs.advantages_N * inputs.logprobs_N,
        ratio_N=ratio_N,
        clipped_low_N=ratio_N < low,
        clipped_high_N=ratio_N > high,
    )


@policy_loss("sapo")
def sapo(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """-(4 / tau) sigmoid(tau (rho - 1)) A with a tau for positive and one for negative advantages: a soft gate in the
    clip's place (Gao et al. 2025, "SAPO", eq. 5 and 6)."""
    ratio_N = ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    positive, negative = params.sapo_tau
    tau_N = torch.full_like(ratio_N, negative).masked_fill(inputs.advantages_N > 0, positive)
    return _unclipped(-torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N * inputs.advantages_N, ratio_N)


@policy_loss("vespo")
def vespo(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """-sg(phi(W)) A log pi, where W is the ratio of the whole sequence, the product of the tokens' ratios, and phi(W) =
    W^k exp(lambda (1 - W)) is 1 at W = 1 and falls smoothly away from it. k and lambda differ for positive and negative
    advantages (Shen et al. 2026, "VESPO", arXiv:2602.10693; its recipe, and TRL's, for their values)."""
    log_ratio_N = _of_sequence(inputs)
    ratio_N = log_ratio_N.exp()
    negative_N = inputs.advantages_N < 0
    power_N, rate_N = (
        torch.full_like(ratio_N, positive).masked_fill(negative_N, negative)
        for positive, negative in (params.vespo_k, params.vespo_lambda)
    )
    weight_N = (power_N * log_ratio_N + rate_N * (1 - ratio_N)).exp()  # in logs, where neither factor overflows
    return _unclipped(-weight_N * inputs.advantages_N * inputs.logprobs_N, ratio_N)


@policy_loss("topr")
def topr(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """-sg(w) A log pi with w = 1 for advantages of at least 0 and w = min(W, 1) for others, where W is the ratio of the
    whole sequence. A good sequence is imitated however unlikely it has become; a bad one is left alone once it has
    become unlikely (Le Roux et al. 2025, "Tapered Off-Policy REINFORCE", arXiv:2503.14286, section 3, with the
    advantage for the reward)."""
    ratio_N = _of_sequence(inputs).exp()
    weight_N = torch.where(inputs.advantages_N < 0, ratio_N.clamp(max=1.0), 1.0)
    return _unclipped(-weight_N * inputs.advantages_N * inputs.logprobs_N, ratio_N)


@policy_loss("clip_cov", select=select_for_clip_cov)
def clip_cov(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """`ppo` without a gradient at the selected tokens, those where log-prob and advantage covary strongly (Cui et al.
    2025, "The Entropy Mechanism", eq. 12); chosen by `covariance.clip_cov_tokens`.

    Raises:
        ValueError: `selected_N` is missing.
    """
    loss = _clipped(ratio(inputs.logprobs_N, inputs.old_logprobs_N), inputs, params)
    return PolicyLoss(
        loss_N=torch.where(_selected(inputs), 0.0, loss.loss_N),
        ratio_N=loss.ratio_N,
        clipped_low_N=loss.clipped_low_N,
        clipped_high_N=loss.clipped_high_N,
    )


@policy_loss("kl_cov", select=select_for_kl_cov)
def kl_cov(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """-rho A, plus cov_kl_coef |log rho| at the selected tokens (Cui et al. 2025, eq. 14); chosen by
    `covariance.kl_cov_tokens`.

    Raises:
        ValueError: `selected_N` is missing.
    """
    ratio_N = ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    penalty_N = torch.where(_selected(inputs), params.cov_kl_coef * _log_ratio(inputs).abs(), 0.0)
    return _unclipped(-ratio_N * inputs.advantages_N + penalty_N, ratio_N)


@policy_loss("dppo_tv")
def dppo_tv(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """-rho A, without a gradient where a step would lead out of a trust region around the old policy: where p - p_old
    is above clip_high for a positive advantage, or p_old - p above clip_low for a negative one (Qi et al. 2026, "DPPO",
    eq. 11 and 12). A rho above `MAX_WEIGHT` counts as `MAX_WEIGHT`: inside the region a token may rise from 1e-6 to
    0.1."""
    moved_N = (inputs.logprobs_N.exp() - inputs.old_logprobs_N.exp()).detach()
    return _trust_region(inputs, -moved_N > params.clip_low, moved_N > params.clip_high)


@policy_loss("dppo_kl")
def dppo_kl(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """The loss of `dppo_tv` with a trust region in binary KL divergence from the old policy (Qi et al. 2026, eq. 11 and
    13)."""
    divergence_N = binary_kl(inputs.old_logprobs_N, inputs.logprobs_N.detach())
    rises_N = inputs.logprobs_N.detach() > inputs.old_logprobs_N
    return _trust_region(
        inputs, ~rises_N & (divergence_N > params.clip_low), rises_N & (divergence_N > params.clip_high)
    )


@policy_loss("policy_gradient")
def policy_gradient(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """-A log pi: the plain policy gradient, without a ratio (Williams 1992; GPG's loss, Chu et al. 2025, eq. 8)."""
    ratio_N = ratio(inputs.logprobs_N, inputs.old_logprobs_N).detach()
    return _unclipped(-inputs.advantages_N * inputs.logprobs_N, ratio_N)


@policy_loss("dro")
def dro(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    """-A log pi + beta / 2 (log rho)^2: the policy gradient on samples of any age, with a quadratic penalty that holds
    it near the policy from which the ratio starts (Richemond et al. 2024, "DRO", arXiv:2405.19107, with the advantage
    in the place of reward minus value; per token as in verl and the Tinker API)."""
    held_N = params.dro_beta / 2 * _log_ratio(inputs).square()
    ratio_N = ratio(inputs.logprobs_N, inputs.old_logprobs_N).detach()
    return _unclipped(held_N - inputs.advantages_N * inputs.logprobs_N, ratio_N)


def _log_ratio(inputs: PolicyLossInput) -> Tensor:
    return inputs.logprobs_N - inputs.old_logprobs_N


def _of_sequence(inputs: PolicyLossInput) -> Tensor:
    """Returns the log-ratio of each token's whole sequence, bounded, without gradient."""
    sums_S = sequence_sum(_log_ratio(inputs).detach(), inputs.action_mask_N, inputs.sequence_N, inputs.sequences)
    return bounded(sums_S)[inputs.sequence_N]


def _geometric(inputs: PolicyLossInput) -> Tensor:
    """Returns exp(mean of log rho) of each sequence."""
    return bounded(sequence_mean(_log_ratio(inputs), inputs.action_mask_N, inputs.sequence_N, inputs.sequences)).exp()


def _clipped(ratio_N: Tensor, inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
    advantages_N = inputs.advantages_N
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1.0 - params.clip_low, 1.0 + params.clip_high) * advantages_N
    # The minimum is pessimistic: a token is clipped only where that makes the objective smaller.
    loss_N = -torch.minimum(plain_N, clipped_N)
    active_N = clipped_N < plain_N
    high_N = active_N & (advantages_N > 0)
    if params.dual_clip is not None:
        loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, -params.dual_clip * advantages_N), loss_N)
        high_N = high_N | ((advantages_N < 0) & (ratio_N > params.dual_clip))
    return PolicyLoss(
        loss_N=loss_N,
        ratio_N=ratio_N,
        clipped_low_N=active_N & (advantages_N < 0),
        clipped_high_N=high_N,
    )


def _trust_region(inputs: PolicyLossInput, outside_low_N: Tensor, outside_high_N: Tensor) -> PolicyLoss:
    """Returns -rho A, with a gradient only where the step does not lead further outside the region."""
    ratio_N = ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    own_N = (inputs.logprobs_N - inputs.logprobs_N.detach()).exp()  # 1, with the gradient of log pi
    # The clamp bounds the weight alone: the gradient still flows through `own_N`.
    weight_N = ratio_N.detach().clamp(max=MAX_WEIGHT) * own_N
    low_N, high_N = outside_low_N & (inputs.advantages_N < 0), outside_high_N & (inputs.advantages_N > 0)
    return PolicyLoss(
        loss_N=torch.where(low_N | high_N, 0.0, -weight_N * inputs.advantages_N),
        ratio_N=ratio_N,
        clipped_low_N=low_N,
        clipped_high_N=high_N,
    )


def _unclipped(loss_N: Tensor, ratio_N: Tensor) -> PolicyLoss:
    never_N = torch.zeros_like(loss_N, dtype=torch.bool)  # no clip range, so no token is clipped
    return PolicyLoss(loss_N=loss_N, ratio_N=ratio_N, clipped_low_N=never_N, clipped_high_N=never_N)


def _selected(inputs: PolicyLossInput) -> Tensor:
    if inputs.selected_N is None:
        raise ValueError("This loss needs selected_N: tokens chosen from the whole optimizer step.")
    return inputs.selected_N
