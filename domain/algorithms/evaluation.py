"""Evaluation metrics over several samples of each prompt."""

import math
from collections.abc import Collection, Sequence

MOST_SETS = 64
"""Held-out data sets that have metrics of their own, at most: MMLU's 57 subjects have, a column of ids has not."""


def too_many_sets(names: Collection[str]) -> str | None:
    """Returns a sentence about held-out data sets, by their different names, if there are more than `MOST_SETS`."""
    if len(names) <= MOST_SETS:
        return None
    return (
        f"The rows of eval.dataset are of {len(names):,} data sets, such as {min(names)[:80]!r}, but {MOST_SETS} at "
        "most have metrics of their own: all are measured together alone. List fewer in --eval.dataset, or name "
        "fewer in the column datasource of its rows."
    )


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of `k` samples passes, from `n` samples of which `c` passed.

    1 - C(n-c, k) / C(n, k), as a product (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1).

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {c} passes in {n} samples: k must be from 1 to n, and passes from 0 to n.")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def summary_names(n: int) -> tuple[str, ...]:
    """Returns the names of what `summarise` gives where the fewest samples of a prompt are `n`.

    >>> summary_names(6)
    ('pass@1', 'pass@2', 'pass@4', 'pass@6', 'mean@6')
    """
    return *(f"pass@{k}" for k in _sizes(n)), f"mean@{n}"


def _sizes(n: int) -> list[int]:
    return sorted({n, *(2**p for p in range(n.bit_length()) if 2**p <= n)})


def summarise(scores_by_prompt: Sequence[Sequence[float]], threshold: float) -> dict[str, float]:
    """Means over prompts of `pass@1`, `pass@k` for powers of two up to the smallest sample count n, `pass@n`
    and `mean@n` (mean score). Prompts without a sample are left out.

    Args:
        scores_by_prompt: scores of each prompt's samples.
        threshold: score from which a sample passes.

    Raises:
        ValueError: no prompt has a sample.
    """
    counted = [scores for scores in scores_by_prompt if scores]
    if not counted:
        raise ValueError("There are no scores to summarise.")
    n = min(len(scores) for scores in counted)
    passes = [(len(scores), sum(score >= threshold for score in scores)) for scores in counted]
    metrics = {f"pass@{k}": math.fsum(pass_at_k(m, c, k) for m, c in passes) / len(counted) for k in _sizes(n)}
    metrics[f"mean@{n}"] = math.fsum(math.fsum(scores) / len(scores) for scores in counted) / len(counted)
    return metrics
