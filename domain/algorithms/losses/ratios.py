"""Log-ratios, bounded before exp so that nothing overflows, and sampled-token divergences.

All arguments are log-probs of the sampled token, at most 0, with 0 at masked positions.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are bounded by this before exp: e^20 is finite in float32 and far outside any useful range."""
CERTAIN = -1e-7
"""Upper bound of log-probs where 1 - p is needed: in float32 a larger one gives p = 1."""


def ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """Returns exp(logprobs - base_logprobs), from e^-20 to e^20."""
    return bounded(logprobs - base_logprobs).exp()


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamps to +-`MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def binary_kl(base_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Returns KL(base || new) of "this token or another": p log(p/q) + (1-p) log((1-p)/(1-q)), at least 0 (Qi et al.
    2026, "Rethinking the Trust Region in LLM RL", eq. 13)."""
    p, q = base_logprobs.clamp(max=CERTAIN), logprobs.clamp(max=CERTAIN)
    rest_p, rest_q = _log_of_rest(p), _log_of_rest(q)
    return (p.exp() * bounded(p - q) + rest_p.exp() * bounded(rest_p - rest_q)).clamp(min=0)


def binary_tv(base_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Returns the total variation of "this token or another": |p - q| (Qi et al. 2026, eq. 12)."""
    return (base_logprobs.exp() - logprobs.exp()).abs()


def sequence_sum(values_N: Tensor, action_mask_N: Tensor, sequence_N: Tensor, count: int) -> Tensor:
    """Returns the sum over each sequence's action tokens, [S]; a masked NaN reaches neither value nor gradient."""
    return values_N.new_zeros(count).index_add(0, sequence_N, torch.where(action_mask_N, values_N, 0.0))


def sequence_mean(values_N: Tensor, action_mask_N: Tensor, sequence_N: Tensor, count: int) -> Tensor:
    """Returns the mean over each sequence's action tokens, [S]; 0 for a sequence without any."""
    actions_S = sequence_sum(torch.ones_like(values_N), action_mask_N, sequence_N, count)
    return sequence_sum(values_N, action_mask_N, sequence_N, count) / actions_S.clamp(min=1)


def _log_of_rest(logprobs: Tensor) -> Tensor:
    """Returns log(1 - p)."""
    return (-torch.expm1(logprobs)).log()
