"""Settings that act on ratios other than 1 are named where every ratio is 1, and there alone."""

import re
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollgrad.application.settings.presets import PRESETS
from rollgrad.application.settings.unit_ratio import (
    BY_RATIO,
    OF_RATIOS,
    idle_sentence,
    idle_settings,
    log_ratios,
    uncorrected_sentence,
)
from rollgrad.domain.algorithms.catalogue import POLICY_LOSSES
from rollgrad.entrypoints.config_io import structure_config

RUN = {"actor": {"model_name_or_path": "m"}, "rollout": {"batch_size": 4, "n_samples_per_prompt": 4}}


def named(**sections: Any) -> list[str]:
    merged = {name: {**RUN.get(name, {}), **sections.get(name, {})} for name in {*RUN, *sections}}
    return [setting.split()[0] for setting in idle_settings(structure_config(merged))]


def test_a_plain_run_has_no_such_setting() -> None:
    assert idle_sentence(structure_config(RUN)) is None
    with capture_logs() as logs:
        log_ratios(structure_config(RUN))
    assert logs == []


@pytest.mark.parametrize(
    ("actor", "idle"),
    [
        ({"eps_clip": 0.1}, ["actor.eps_clip"]),
        ({"eps_clip_low_high": [0.2, 0.28], "dual_clip": 3.0}, ["actor.eps_clip_low_high", "actor.dual_clip"]),
        ({"policy_loss_type": "gspo"}, ["actor.policy_loss_type"]),
        ({"policy_loss_type": "vespo", "vespo_k": [1.0, 1.0]}, ["actor.policy_loss_type", "actor.vespo_k"]),
        ({"policy_loss_type": "policy_gradient"}, []),
        ({"policy_loss_type": "clip_cov", "cov_share": 0.1}, []),
        ({"eps_clip": 0.1, "lora": {"rank": 4, "dropout": 0.1}}, []),
        ({"router_replay": "trainer"}, ["actor.router_replay"]),
        ({"router_replay": "engine"}, []),
    ],
)
def test_ratios_are_1_in_an_only_step(actor: dict[str, Any], idle: list[str]) -> None:
    assert named(actor=actor) == idle
    for several in ({"batch_size": 8}, {"max_epochs": 2}):
        assert named(actor=actor, train=several) == []
    assert named(actor=actor, algo={"old_logprobs": "rollout"}) == []


def test_the_sentence_says_how_they_act() -> None:
    config = structure_config({**RUN, "actor": {"eps_clip": 0.1}, "algo": {"advantage": {"estimator": "rloo"}}})
    sentence = idle_sentence(config)
    assert sentence is not None
    assert sentence.startswith("actor.eps_clip 0.1: without effect")
    assert sentence.endswith("Set --train.batch_size below 16 or --train.max_epochs above 1.")
    config.train.async_enable = True
    assert "--train.max_epochs above 1 or --algo.old_logprobs rollout" in str(idle_sentence(config))
    with capture_logs() as logs:
        log_ratios(config)
    assert [line["log_level"] for line in logs] == ["warning"]


def test_steps_that_nothing_corrects_are_named_with_what_makes_one_of_them() -> None:
    def said(loss: str, **train: int) -> str | None:
        return uncorrected_sentence(structure_config({**RUN, "actor": {"policy_loss_type": loss}, "train": train}))

    for train, way in (
        ({"batch_size": 8}, "feeds 2 optimizer steps.* Set --train.batch_size 16, or --actor.policy_loss_type"),
        ({"max_epochs": 3}, "feeds 3 optimizer steps.* Set --train.max_epochs 1, or --actor.policy_loss_type"),
        ({"batch_size": 8, "max_epochs": 2}, "feeds 4 .* Set --train.batch_size 16 and --train.max_epochs 1, or"),
    ):
        assert re.search(way, str(said("policy_gradient", **train)))
        assert said("ppo", **train) is said("dro", **train) is None
    assert said("policy_gradient") is said("policy_gradient", batch_size=16) is None
    with capture_logs() as logs:
        log_ratios(
            structure_config({**RUN, "actor": {"policy_loss_type": "policy_gradient"}, "train": {"max_epochs": 2}})
        )
    assert [(line["log_level"], line["event"]) for line in logs] == [("warning", "optimizer steps without a ratio")]


def test_values_are_not_clipped_in_an_only_step_either() -> None:
    assert named(critic={"value_clip": 0.1}) == ["critic.value_clip"]
    assert named(critic={"value_clip": 0.1}, train={"max_epochs": 2}) == []
    assert named(critic={"value_clip": None}) == []


def test_the_trainers_experts_are_known_where_the_policy_is_scored() -> None:
    replayed = {"router_replay": "trainer"}
    assert named(actor=replayed, algo={"kl": {"init_coef": 0.1}}) == []
    assert named(actor=replayed, algo={"correction": {"level": "token", "gate": "second_moment"}}) == []
    assert named(actor=replayed, algo={"top_entropy_quantile": 0.2}) == []
    assert named(actor=replayed, algo={"kl": {"init_coef": 0.1, "use_loss": True}}) == ["actor.router_replay"]


def test_names_are_those_of_the_catalogue() -> None:
    assert set(BY_RATIO) <= set(POLICY_LOSSES)
    read = {key for traits in POLICY_LOSSES.values() for key in traits.uses}
    assert set(OF_RATIOS) - {"eps_clip", "eps_clip_low_high"} == read - {"cov_share", "cov_range"}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_named_where_their_loss_is_idle(name: str) -> None:
    config = structure_config(RUN, preset=name)
    by_ratio = config.actor.policy_loss_type in BY_RATIO or config.actor.eps_clip_low_high is not None
    assert bool(idle_settings(config)) is (by_ratio and config.algo.old_logprobs == "recompute")
