"""A run's description may change in part when it continues: each setting is either listed or refused by name."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rollgrad.application.settings.rules.resume import (
    CODE,
    DATA,
    MAY_DIFFER,
    MODELS,
    TEXTS,
    changed_code,
    changes,
    may_differ,
    refusals,
)
from rollgrad.application.settings.run import RLConfig
from rollgrad.entrypoints.config_io import setting_names
from rollgrad.entrypoints.description import describe_run, flat_settings
from rollgrad.entrypoints.redaction import is_secret_name

DEFAULTS = flat_settings(RLConfig())
NAMES = list(setting_names())
CONTENT = {"config": "c", "weights": "w"}


def description(**settings: Any) -> dict[str, Any]:
    return {
        "trainer": "rl",
        "settings": DEFAULTS | {"actor.model_name_or_path": "m", DATA: "d"} | settings,
        "versions": {"rollgrad": "1", "torch": "2"},
        "models": {"actor.model_name_or_path": CONTENT},
        "data": "rows",
    }


def refused(begun: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return list(refusals(begun, now, now["settings"] | DEFAULTS))


def test_every_setting_is_listed_or_refused_by_name_with_both_values() -> None:
    """A setting that is added later is refused until it is listed."""
    for name in NAMES:
        begun, now = description(**{name: "one"}), description(**{name: "other"})
        if name == DATA:
            now["data"] = "other rows"
        if name in MODELS:
            now["models"] = {}
        found = refused(begun, now)
        if may_differ(name):
            assert found == [], name
            assert name.startswith("ckpt.") or changes(begun, now, DEFAULTS) == {name: "one -> other"}
        else:
            assert len(found) == 1, name
            assert f"{name} is 'other', but was 'one' when the run began" in found[0]
            assert f"--{name}" in found[0]
        assert refused(begun, begun) == [], name


def test_every_listed_setting_exists_and_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    said = page[page.index("A run continues with the settings it began with") :]
    said = said[: said.index("is refused with both values")]
    patterns = set(re.findall(r"`([\w.*]+)`", said))
    for entry in MAY_DIFFER:
        assert any(name == entry or f"{name.partition('.')[0]}.*" == entry for name in NAMES), entry
        wanted = {entry, entry.removesuffix(".*"), f"*.{entry.rpartition('.')[2]}"}
        assert wanted & patterns or any(p.endswith("_*") and entry.startswith(p[:-1]) for p in patterns), entry


def test_no_name_of_a_setting_hides_its_value() -> None:
    assert [name for name in NAMES if is_secret_name(name)] == []


@pytest.mark.parametrize("name", MODELS)
def test_a_model_may_move_but_not_change(name: str) -> None:
    begun, now = description(**{name: "here"}), description(**{name: "there"})
    begun["models"] = {name: CONTENT}
    for found, count in (
        (CONTENT, 0),
        ({"config": "c", "weights": None}, 0),
        ({"config": "c", "weights": "other"}, 1),
        ({"config": "other", "weights": "w"}, 1),
        ({"config": None, "weights": None}, 1),
        (None, 1),
    ):
        now["models"] = {} if found is None else {name: found}
        assert len(refused(begun, now)) == count, found
    same = description(**{name: "here"})
    same["models"] = {name: {"config": "c", "weights": "other"}}
    (said,) = refused(begun, same)
    assert f"{name} is 'here' as when the run began, but holds something else than then" in said


def test_a_dataset_may_move_but_not_change() -> None:
    begun, moved = description(), description(**{DATA: "elsewhere"})
    assert refused(begun, moved) == []
    for now in (description(), moved):
        now["data"] = "other rows"
        assert len(refused(begun, now)) == 1
    moved["data"] = None
    assert len(refused(begun, moved)) == 1, "what cannot be looked at goes by its name"


@pytest.mark.parametrize("name", [*CODE, *TEXTS])
def test_a_file_may_move_and_goes_by_what_it_holds(name: str) -> None:
    assert name in NAMES
    begun, moved, mended = description(**{name: "a"}), description(**{name: "b"}), description(**{name: "a"})
    begun["files"], moved["files"], mended["files"] = {name: "1"}, {name: "1"}, {name: "2"}
    assert refused(begun, moved) == []
    assert changes(begun, moved, DEFAULTS) == {name: "a -> b"}
    assert changed_code(begun, moved) == []
    if name in CODE:
        assert refused(begun, mended) == []
        assert changed_code(begun, mended) == [name]
    else:
        (said,) = refused(begun, mended)
        assert f"{name} is 'a' as when the run began, but holds something else than then" in said
    moved["files"] = {name: "2"}
    assert len(refused(begun, moved)) == (not may_differ(name))
    del begun["files"]  # a state of an earlier version
    assert refused(begun, mended) == changed_code(begun, mended) == []
    assert len(refused(begun, moved)) == (not may_differ(name))


def test_what_files_hold_is_read_wherever_they_are(tmp_path: Path) -> None:
    for folder, factor in (("one", 1), ("moved", 1), ("other", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "code.py").write_text(f"FACTOR = {factor}")

    def held(**settings: str) -> dict[str, str]:
        config = RLConfig()
        for name, value in settings.items():
            section, field = name.split("__")
            setattr(getattr(config, section), field, value)
        found: dict[str, str] = describe_run(config, None)["files"]
        return found

    one, moved, other = (f"{tmp_path}/{folder}/code.py" for folder in ("one", "moved", "other"))
    for setting in ("actor__optim_path", "reward__function_path"):
        known = held(**{setting: f"{one}:f"})
        assert len(known) == 1
        assert held(**{setting: f"{moved}:f"}) == known
        assert held(**{setting: f"{other}:f"}) != known
        assert held(**{setting: f"{one}:g"}) != known, "another function of the same file"
    assert held(agent__tools=f"python,{one}") == held(agent__tools=f"python,{moved}") != held(agent__tools=one)
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    inline, file = "{{ messages }}", f"{tmp_path}/template.jinja"
    assert held(data__chat_template=inline) == held(data__chat_template=file) != held(data__chat_template="{{ m }}")
    assert held(data__chat_template="{{ messages }}" * 999).keys() == {"data.chat_template"}
    assert held() == {}


def test_a_module_goes_by_what_it_holds_and_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_lib_of_rewards").mkdir()
    (tmp_path / "my_lib_of_rewards" / "__init__.py").write_text("raise AssertionError('the package is run')")
    code = tmp_path / "my_lib_of_rewards" / "brief.py"

    def held(place: str, text: str) -> str:
        code.write_text(f"raise AssertionError('the module is run')  # {text}")
        config = RLConfig()
        config.reward.function_path = place
        fingerprint: str = describe_run(config, None)["files"]["reward.function_path"]
        assert not any(name.startswith("my_lib_of_rewards") for name in sys.modules)
        return fingerprint

    for place in ("my_lib_of_rewards.brief", "my_lib_of_rewards.brief:f"):
        known = held(place, "one")
        assert held(place, "one") == known != held(place, "other")
    assert held("my_lib_of_rewards.brief", "one") == held("my_lib_of_rewards/brief.py", "one")
    for absent in ("my_lib_of_rewards.absent", "my_lib_of_rewards.brief.inner", "absent_library.rewards"):
        assert held(absent, "one") == held(absent, "other"), "what is not there goes by its name"


def test_settings_that_were_not_there_yet_had_their_defaults() -> None:
    begun, now = description(), description()
    del begun["settings"]["train.seed"]
    assert refused(begun, now) == []
    now["settings"]["train.seed"] = 3
    assert len(refused(begun, now)) == 1
    begun["settings"]["train.gone"] = 1
    assert len(refused(begun, now)) == 1


def test_another_trainer_is_named_alone() -> None:
    begun, now = description(), description(**{"train.seed": 3})
    now["trainer"] = "sft"
    (said,) = refused(begun, now)
    assert said.startswith("The run to continue is one of rollgrad train rl, not of train sft: ")
    del begun["trainer"]  # a state of an earlier version
    assert len(refused(begun, now)) == 1


@pytest.mark.parametrize("names", [("actor.adam.lr", "critic.adam.lr", "actor.muon.lr", "critic.muon.lr")])
def test_every_learning_rate_may_change(names: tuple[str, ...]) -> None:
    """One that was too large ends a run, whichever optimizer it is of."""
    assert {name for name in NAMES if name.endswith(".lr")} == {*names}
    assert all(may_differ(name) for name in names)


def test_other_versions_are_told() -> None:
    begun, now = description(), description()
    now["versions"] = {"rollgrad": "2", "torch": "2", "vllm": "3"}
    assert refused(begun, now) == []
    assert changes(begun, now, DEFAULTS) == {"rollgrad": "1 -> 2", "vllm": "None -> 3"}
