"""Evaluation metrics over several samples of each prompt."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from statistics import fmean, stdev

from rollgrad.domain.algorithms.equality import reaches

MOST_SETS = 64
"""Datasets that have metrics of their own, at most: MMLU's 57 subjects have, a column of ids has not."""


def too_many_sets(names: Collection[str]) -> str | None:
    """Returns a sentence about held-out datasets, by their different names, if there are more than `MOST_SETS`."""
    if len(names) <= MOST_SETS:
        return None
    return (
        f"The rows of eval.dataset are of {len(names):,} datasets, such as {min(names)[:80]!r}, but {MOST_SETS} at "
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
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def summary_names(n: int) -> tuple[str, ...]:
    """Returns the names of what `summarise` gives where the most samples of a prompt are `n`, with that of the vote.

    >>> summary_names(3)
    ('pass@1', 'pass@2', 'pass@3', 'mean@3', 'best@2', 'best@3', 'maj@3')
    """
    several = (*(f"best@{k}" for k in _sizes(n) if k > 1), f"maj@{n}") if n > 1 else ()
    return *(f"pass@{k}" for k in _sizes(n)), f"mean@{n}", *several


def _sizes(n: int) -> list[int]:
    return sorted({n, *(2**p for p in range(n.bit_length()))})


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Unbiased estimate of the best score among `k` samples, from all `scores` of n: their mean over all subsets of k,
    of which C(i - 1, k - 1) have the i-th smallest score as their best. Of scores of 0 and 1 it is `pass_at_k`.

    Raises:
        ValueError: not 1 <= k <= n.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"best@{k} of {n} samples: k must be from 1 to n.")
    ranked = enumerate(sorted(scores))
    return math.fsum(score * (math.comb(place, k - 1) / math.comb(n, k)) for place, score in ranked)


def majority(answers: Sequence[str | None]) -> str | None:
    """Returns the answer that most samples gave; of several with as many votes, the one that was given first; None if
    nobody gave any.

    >>> majority(["7", None, "5", "5", "7"])
    '7'
    """
    votes = _votes(answers)
    return max(votes, key=lambda answer: votes[answer], default=None)


def majority_passes(answers: Sequence[str | None], passed: Sequence[bool]) -> float:
    """Returns whether the answer that most samples gave passes (self-consistency, Wang et al. 2023, arXiv:2203.11171):
    the share of passes among the samples that gave it, of several answers with as many votes the mean of theirs. A
    sample without an answer has no vote; where none has one, nothing passes."""
    votes = _votes(answers)
    if not votes:
        return 0.0
    most = max(votes.values())
    given = [each for answer, each in zip(answers, passed, strict=True) if answer is not None and votes[answer] == most]
    return sum(given) / len(given)


def _votes(answers: Sequence[str | None]) -> Counter[str]:
    return Counter(answer for answer in answers if answer is not None)


def summarise(
    scores_by_prompt: Sequence[Sequence[float]],
    threshold: float,
    answers_by_prompt: Sequence[Sequence[str | None]] | None = None,
) -> dict[str, float]:
    """Means over prompts of `pass@1`, `pass@k` for powers of two up to the greatest sample count n, `pass@n`
    and `mean@n` (mean score). Of several samples also `best@k` (best score) for these k above 1, and `maj@n`, whether
    what most of a prompt's samples answered passes, if any answer is known. Prompts without a sample are left out, and
    of `pass@k` and `best@k` those with fewer than k: an episode that failed changes no metric's name.

    Args:
        scores_by_prompt: scores of each prompt's samples.
        threshold: score from which a sample passes.
        answers_by_prompt: what they answered, in the same order.

    Raises:
        ValueError: no prompt has a sample.
    """
    counted = [scores for scores in scores_by_prompt if scores]
    if not counted:
        raise ValueError("There are no scores to summarise.")
    n = max(len(scores) for scores in counted)
    passes = [(len(scores), sum(reaches(score, threshold) for score in scores)) for scores in counted]
    sizes = _sizes(n)
    metrics = {f"pass@{k}": fmean(pass_at_k(m, c, k) for m, c in passes if m >= k) for k in sizes}
    metrics[f"mean@{n}"] = math.fsum(math.fsum(scores) / len(scores) for scores in counted) / len(counted)
    metrics |= {
        f"best@{k}": fmean(best_at_k(scores, k) for scores in counted if len(scores) >= k) for k in sizes if k > 1
    }
    voting = [answers for answers in answers_by_prompt or () if answers]
    if n > 1 and any(answer is not None for answers in voting for answer in answers):
        passed = [[reaches(score, threshold) for score in scores] for scores in counted]
        metrics[f"maj@{n}"] = math.fsum(map(majority_passes, voting, passed)) / len(counted)
    return metrics


def paired_difference(first: Sequence[float | None], second: Sequence[float | None]) -> tuple[float, float] | None:
    """Returns by how much `second` is greater than `first` in the mean over prompts, and the standard error of that
    difference: the standard deviation of the prompts' differences over the root of their number. How prompts differ in
    difficulty has no part in it (Miller 2024, "Adding Error Bars to Evals", arXiv:2411.00640, section 4.2). None where
    fewer than two prompts have a value in both.

    >>> paired_difference([0.0, 1.0, None], [1.0, 1.0, 1.0])
    (0.5, 0.5)
    """
    pairs = zip(first, second, strict=True)
    differences = [b - a for a, b in pairs if a is not None and b is not None]
    error = standard_error(differences)
    return None if error is None else (fmean(differences), error)


def standard_error(values: Sequence[float]) -> float | None:
    """Returns the standard error of the mean of `values`, one a prompt: their deviation over the root of their number.
    All samples of a prompt make one value, for they are not independent (Miller 2024, arXiv:2411.00640, sections 2.1
    and 2.2). None of fewer than two.

    >>> standard_error([0.0, 1.0])
    0.5
    """
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
