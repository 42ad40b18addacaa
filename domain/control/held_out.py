"""Sign that held-out results get worse: what is compared of evaluations, and what is said of it. Pure.

Evaluations play the same prompts each time. The standard errors of their means include how prompts differ, and so are
larger than the effect of chance between two evaluations.
"""

import math

from rollgrad.domain.control.rule import LearningSettings, Metrics, Rule

EVALUATIONS = 2
"""Evaluations in a row that the sign needs."""

FALL = 3.0
"""Fall below the best evaluation before, in standard errors of the difference, from which on it is no chance, though
the best of several is compared."""

MEAN, ERROR = "eval/mean@", "eval/mean_stderr"
"""Beginning of the name of the mean score, behind which is the number of replies to a prompt; and its standard error
over the prompts."""

BEST = "best/"
"""Beginning of the names under which the sign finds the best evaluation before, with its `step`."""


def held_out(metrics: Metrics) -> tuple[float, float] | None:
    """Returns an evaluation's mean score and its standard error; None of one that has not both."""
    mean = next((value for name, value in metrics.items() if name.startswith(MEAN)), math.nan)
    found = mean, metrics.get(ERROR, math.nan)
    return found if all(map(math.isfinite, found)) else None


def _falls(metrics: Metrics, run: LearningSettings) -> bool | None:
    found = held_out(metrics)
    if found is None or f"{BEST}mean" not in metrics:
        return None
    (mean, error), best = found, metrics[f"{BEST}mean"]
    errors = math.hypot(error, metrics[f"{BEST}stderr"])
    # Without any error all prompts have one score, each time another one: of two prompts that may be chance.
    return (errors > 0 and best - mean >= FALL * errors) or None


def _describe_falls(metrics: Metrics, run: LearningSettings, evaluations: int) -> tuple[str, str]:
    found = held_out(metrics)
    assert found is not None
    first, last = metrics.get("first/reward/mean"), metrics.get("last/reward/mean")
    rose = first is not None and last is not None and last > first
    training = f", while the reward of training rose from {first:.3g} to {last:.3g}" if rose else ""
    evidence = (
        f"The held-out mean score fell from {metrics[f'{BEST}mean']:.3g} after step {metrics[f'{BEST}step']:.0f} to "
        f"{found[0]:.3g} (standard error {found[1]:.2g}) in {evaluations} evaluations in a row{training}."
    )
    keeps = "--ckpt.best_metric, which keeps the best model"
    if rose:
        return (
            evidence,
            f"replies in samples.jsonl (does the reward like what it should not?), more prompts, and {keeps}",
        )
    return evidence, f"--actor.adam.lr, and {keeps}"


EVALUATION_RULES = {"evaluation_falls": Rule(sign=_falls, describe=_describe_falls)}
