"""An estimator of what the best of several samples is worth, rather than one."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from rollgrad.domain.algorithms.equality import SAME
from rollgrad.domain.algorithms.estimators.discounting import reverse_discounted_sum
from rollgrad.domain.algorithms.estimators.group import STD_FLOOR, Rollouts, broadcast
from rollgrad.domain.algorithms.estimators.registry import estimator
from rollgrad.domain.algorithms.estimators.types import Advantages, EstimatorInput, EstimatorParams


@estimator("pass_at_k")
def pass_at_k(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """(b_i - mean) / (std + 1e-9) of the best reward among k of a group's rollouts, where k is `pass_k`. b_i is its
    mean over all choices of k rollouts that contain rollout i; mean and (population) std are over all choices of k.

    For rewards of 0 and 1 these are the advantages of Chen et al. 2025, "Pass@k Training for Adaptively Balancing
    Exploration and Exploitation of Large Reasoning Models", arXiv:2508.10751, by their analytical derivation. For other
    rewards the best one takes the place of a pass (Walder and Karkhanis 2025, "Pass@K Policy Optimization",
    arXiv:2505.15201, eq. 12). With k = 1 they are GRPO's, but for the deviation. A group of k rollouts or fewer has
    nothing to compare: advantage 0.
    """
    rollouts = Rollouts(inputs)
    outcome_R = rollouts.outcome_R
    # Two stable sorts: by outcome, then by group, so that each group's rollouts (Q) stand in the order of theirs.
    order_Q = outcome_R.argsort(stable=True)
    order_Q = order_Q[rollouts.group_R[order_Q].argsort(stable=True)]
    sorted_Q, group_Q = outcome_R[order_Q], rollouts.group_R[order_Q]
    sizes_G = torch.bincount(group_Q)
    best_Q, own_Q, other_Q = torch.cat(
        [_shares(size, params.pass_k) for size in sizes_G.tolist()] or [torch.zeros(3, 0, dtype=torch.float64)], dim=1
    ).to(sorted_Q.device)

    def spread(values_G: Tensor) -> Tensor:
        return values_G[group_Q]

    def group_sum(values_Q: Tensor) -> Tensor:
        return values_Q.new_zeros(len(sizes_G)).index_add_(0, group_Q, values_Q)

    mean_Q = spread(group_sum(best_Q * sorted_Q))
    std_Q = spread(group_sum(best_Q * (sorted_Q - mean_Q).square()).sqrt())
    better_Q = reverse_discounted_sum(other_Q * sorted_Q, sizes_G, 1.0) - other_Q * sorted_Q
    scaled_Q = (own_Q * sorted_Q + better_Q - mean_Q) / (std_Q + STD_FLOOR)
    # The best of k is never among the k - 1 lowest.
    lowest_G, highest_G, size_G = (
        sorted_Q.new_zeros(len(sizes_G)).scatter_reduce(0, group_Q, column_Q, reduce, include_self=False)
        for column_Q, reduce in (
            (torch.where(best_Q > 0, sorted_Q, math.inf), "amin"),
            (sorted_Q, "amax"),
            (rollouts.size_R[order_Q], "amax"),
        )
    )
    equal_Q = spread(highest_G - lowest_G <= SAME * size_G)  # false for NaN
    advantages_R = torch.zeros_like(outcome_R).index_put_((order_Q,), torch.where(equal_Q, 0.0, scaled_Q))
    return broadcast(inputs, advantages_R, rollouts)


@lru_cache(maxsize=64)
def _shares(n: int, k: int) -> Tensor:
    """Returns three shares of choices of k values for each of n ascending values, [3, n] in float64. They are the
    choices whose largest value it is, as a share of all choices, of the choices that contain it, and of the choices
    that contain a given lower value. Where k is above n, n values are chosen."""
    k = min(k, n)
    best = [math.comb(below, k - 1) for below in range(n)]
    other = [math.comb(below - 1, k - 2) if k > 1 and below > 0 else 0 for below in range(n)]
    chosen, having = math.comb(n, k), math.comb(n - 1, k - 1)
    return torch.tensor(
        [[count / chosen for count in best], [count / having for count in best], [count / having for count in other]],
        dtype=torch.float64,
    )
