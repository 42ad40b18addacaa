"""Settings by which weights stay as they are are told."""

from attrs import evolve

from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.optimizer import Optim
from rollgrad.application.settings.sft import SFTRun
from rollgrad.application.settings.still_weights import still_sentences


def test_a_learning_rate_or_a_norm_that_leaves_the_weights_alone_is_named() -> None:
    run = RLConfig()
    run.algo.advantage.estimator = "group_norm"
    assert still_sentences(run) == []
    run.actor.adam.lr, run.critic.adam.lr, run.actor.max_norm = 1e-15, 0.0, 1e-9
    rate, norm = still_sentences(run)
    assert rate.startswith("actor.adam.lr is 1e-15, with which the weights stay as they are")
    assert norm.startswith("actor.max_norm is 1e-09, which scales each gradient down below actor.adam.eps (1e-08)")
    run.actor.optim = Optim.MUON
    assert still_sentences(run) == []
    run.algo.advantage.estimator = "gae"
    (critic,) = still_sentences(run)
    assert critic.startswith("critic.adam.lr is 0")


def test_those_of_runs_over_examples_are_named_too() -> None:
    run = SFTRun()
    assert still_sentences(run) == []
    run.actor.adam.lr = 0.0
    assert len(still_sentences(run)) == 1
    assert still_sentences(evolve(run, actor=evolve(run.actor, max_norm=0.0, adam=SFTRun().actor.adam))) == []
