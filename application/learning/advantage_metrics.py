"""Metrics of the advantages of a batch, and of the values that they were computed with."""

from collections.abc import Collection

from torch import Tensor

from rollgrad.domain.algorithms.estimators import Advantages
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.errors import ConfigurationError


def advantage_metrics(
    batch: RolloutBatch, result: Advantages, *, estimator: str, others: Collection[str]
) -> dict[str, float]:
    """Returns the metrics of advantages, with those that the estimator reports itself.

    Args:
        batch: its action tokens, and the critic's values if there are any.
        result: what the estimator returned.
        estimator: its name.
        others: names of metrics that are taken already.

    Raises:
        ConfigurationError: the estimator reports a metric that is taken.
    """
    actions = batch.action_mask_N.count_nonzero()  # sums of bool take six times as long
    common = {
        "advantage/mean": float(result.advantages_N.sum() / actions),
        "advantage/abs_mean": float(result.advantages_N.abs().sum() / actions),
    }
    own = {f"advantage/{name}": float(value) for name, value in result.metrics.items()}
    if taken := own.keys() & {*others, *common}:
        raise ConfigurationError(
            f"The estimator {estimator} reports {', '.join(sorted(taken))}, which every estimator has: give its "
            "metrics other names."
        )
    if batch.values_N is None:
        return common | own
    variance = _explained_variance(batch.values_N[batch.action_mask_N], result.returns_N[batch.action_mask_N])
    return common | own | {"critic/explained_variance": variance}


def _explained_variance(values_A: Tensor, returns_A: Tensor) -> float:
    """Returns 1 - Var(returns - values) / Var(returns); 0 if the returns do not vary."""
    variance = returns_A.var(correction=0)
    return 0.0 if variance == 0 else float(1 - (returns_A - values_A).var(correction=0) / variance)
