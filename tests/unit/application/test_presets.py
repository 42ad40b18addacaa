"""Presets stand for settings that work, and the documentation names all there is."""

from pathlib import Path

import pytest

from rollgrad.application.settings.presets import PRESETS, preset_settings
from rollgrad.application.settings.rules import validate
from rollgrad.domain.algorithms.catalogue import ESTIMATORS, POLICY_LOSSES, policy_loss_traits
from rollgrad.domain.algorithms.settings import Aggregation
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.config_io import setting_names, structure_config

DOCUMENT = Path(__file__).parents[3] / "docs" / "algorithms.md"
BASE = {
    "actor": {"model_name_or_path": "m"},
    "data": {"prompt_dataset": "d.jsonl", "label_key": "label"},
    "reward": {"verifier": "last_number"},
}


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_valid(name: str) -> None:
    needs = ESTIMATORS[str(preset_settings(name).get("algo.advantage.estimator", "gae"))].needs
    told = "algo.kl.teacher_template" in preset_settings(name)  # its teacher is the model itself
    ref = {"ref": {"model_name_or_path": "teacher"}} if "teacher" in needs and not told else {}
    plays = {"agent": {"attempts": 2}} if "states" in needs else {}
    config = structure_config({**BASE, **ref, **plays}, preset=name)
    validate(config)
    assert set(preset_settings(name)) <= set(setting_names())


def test_of_two_presets_the_later_counts() -> None:
    config = structure_config(BASE, preset="dapo, gspo")
    assert config.rollout.n_samples_per_prompt == 8
    assert config.algo.dynamic_filtering_enable
    assert config.actor.policy_loss_type == "gspo"


def test_a_file_may_name_its_preset() -> None:
    config = structure_config({**BASE, "algo": {"preset": "dapo", "dynamic_filtering_budget": 3.0}})
    assert config.algo.dynamic_filtering_enable
    assert config.algo.dynamic_filtering_budget == 3.0


def test_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ConfigurationError, match=r"'grppo' is none of ppo, vapo"):
        preset_settings("dapo,grppo")


def test_every_name_is_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    missing = [name for name in (*ESTIMATORS, *POLICY_LOSSES, *PRESETS) if f"`{name}`" not in text]
    assert not missing
    assert all(policy_loss_traits(name).aggregation in list(Aggregation) for name in POLICY_LOSSES)
