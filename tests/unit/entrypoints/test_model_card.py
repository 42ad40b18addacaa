"""The README of a trained model."""

from pathlib import Path

import yaml

from rollgrad.application.settings.run import RLConfig
from rollgrad.entrypoints.model_card import write_model_card


def config_of(model: str) -> RLConfig:
    config = RLConfig()
    config.actor.model_name_or_path = model
    config.algo.kl.init_coef = 0.25
    config.data.prompt_dataset = "/home/me/prompts.jsonl"
    return config


def test_it_says_what_the_model_began_as_how_it_was_trained_and_what_it_learned(tmp_path: Path) -> None:
    model = tmp_path / "sums" / "model"
    model.mkdir(parents=True)
    write_model_card(model, config_of("org/base"), steps=16, before={"eval/pass@1": 0.25}, after={"eval/pass@1": 0.875})
    _, metadata, text = (model / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(metadata) == {"library_name": "transformers", "tags": ["rollgrad"], "base_model": "org/base"}
    assert "# sums\n" in text
    assert "\nTrained with rollgrad " in text
    assert "in 16 steps from org/base." in text
    assert "://" not in text  # no address is rollgrad's yet
    assert "| `eval/pass@1` | 0.25 | 0.875 |" in text
    settings = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert settings == {"algo": {"kl": {"init_coef": 0.25}}}


def test_it_names_no_place_on_this_machine(tmp_path: Path) -> None:
    base = tmp_path / "somewhere" / "base"
    base.mkdir(parents=True)
    write_model_card(base, config_of(str(base)), steps=1, before={}, after={})
    text = (base / "README.md").read_text()
    assert "step from base." in text
    assert str(tmp_path) not in text
    assert "prompts.jsonl" not in text
    assert "base_model" not in text


def test_the_card_of_a_run_that_continues_is_written_anew_and_no_other_readme_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    for steps in (1, 2):
        write_model_card(tmp_path, config_of("org/base"), steps=steps, before={}, after={})
        assert f"in {steps} {'step' if steps == 1 else 'steps'} from" in path.read_text()
    path.write_text("mine")
    write_model_card(tmp_path, config_of("org/base"), steps=3, before={}, after={})
    assert path.read_text() == "mine"
