"""The evaluation with the best value."""

import math

import pytest

from rollgrad.domain.control.best_model import Best, BestModel
from rollgrad.domain.errors import ConfigurationError


def test_the_highest_value_is_the_best_and_of_losses_the_lowest() -> None:
    for metric, values in (("eval/pass@1", (0.1, 0.3, 0.2)), ("eval/failed", (3.0, 1.0, 2.0))):
        best = BestModel(metric)
        for step, value in enumerate((0.0, *values)):
            best = best.after(step, {metric: value})
        assert (best.step, best.value) == (2, values[1])


def test_the_best_value_is_the_one_that_was_asked_for() -> None:
    for best, found in ((Best.AUTO, 30), (Best.HIGHEST, 30), (Best.LOWEST, 20)):
        kept = BestModel("eval/words", best=best)
        for step, value in ((0, 0.5), (10, 2.0), (20, 1.0), (30, 3.0)):
            kept = kept.after(step, {"eval/words": value})
        assert kept.step == found
        assert BestModel("eval/words", best=best).continued(kept.state_dict()) == kept
    assert BestModel("eval/words").continued(kept.state_dict()).step == 0, "another value was the best"


def test_an_evaluation_without_the_metric_is_not_compared_once_one_had_it() -> None:
    """One of each four samples may fail, so that there is no eval/mean@4, which is no reason to end a run."""
    metric = "eval/mean@4"
    best = BestModel(metric).after(0, {metric: 0.5}).after(10, {"eval/mean@3": 0.9})
    assert best.step == 0
    best = best.after(20, {metric: math.nan}).after(30, {metric: 0.25})
    assert (best.step, best.value) == (30, 0.25)
    continued = BestModel(metric).continued({"metric": metric, "step": 0, "value": None})
    assert continued.after(40, {"eval/mean@3": 0.9}).step == 0
    with pytest.raises(ConfigurationError, match=r"eval/mean@4, but evaluations give eval/mean@3"):
        BestModel(metric).after(0, {"eval/mean@3": 0.9})


def test_evaluations_since_the_best_one_are_counted() -> None:
    """A value that is no number is no better; an evaluation without the metric, and that of the model that training
    begins with, are not compared."""
    best, waited = BestModel("eval/loss"), []
    for step, value in enumerate((0.1, math.nan, 3.0, 3.0, 4.0, None, 2.0, 2.5)):
        best = best.after(step, {} if value is None else {"eval/loss": value})
        waited.append(best.waited)
    assert waited == [0, 1, 0, 1, 2, 2, 0, 1]
    assert BestModel("eval/loss").continued(best.state_dict()) == best
    assert BestModel("eval/loss").continued({"metric": "eval/loss", "step": 6, "value": 2.0}).waited == 0


def test_values_of_other_evaluations_are_not_compared_and_the_best_one_is_left() -> None:
    easy, hard = {"dataset": "easy.jsonl"}, {"dataset": "hard.jsonl"}
    state = BestModel("eval/pass@1", measured=easy).after(10, {"eval/pass@1": 0.9}).state_dict()
    assert BestModel("eval/pass@1", measured=easy).continued(state).step == 10
    other = BestModel("eval/pass@1", measured=hard).continued(state)
    assert (other.value, other.waited, other.left) == (None, 0, state)
    assert other.after(20, {"eval/pass@1": 0.1}).step == 20
    moved, others = ({"dataset": "moved.jsonl", "rows": rows} for rows in ("1", "2"))
    known = BestModel("eval/pass@1", measured={**easy, "rows": "1"}).after(10, {"eval/pass@1": 0.9}).state_dict()
    assert BestModel("eval/pass@1", measured=moved).continued(known).step == 10
    assert BestModel("eval/pass@1", measured=others).continued(known).left == known
    del state["measured"]  # a state of an earlier version
    assert BestModel("eval/pass@1", measured=hard).continued(state).step == 10
    empty = BestModel("eval/pass@1", measured=easy).state_dict()
    assert BestModel("eval/pass@1", measured=hard).continued(empty).left == {}, "there was no best one yet"


def test_a_run_without_a_metric_forgets_no_best_model() -> None:
    state = BestModel("eval/loss").after(10, {"eval/loss": 0.5}).state_dict()
    between = BestModel().continued(state).after(20, {"eval/loss": 0.1}).state_dict()
    assert BestModel("eval/loss").continued(between).after(30, {"eval/loss": 0.6}).step == 10
