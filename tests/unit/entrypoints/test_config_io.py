import functools
import operator
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import attrs
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.algorithms.settings import KLEstimator
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.cli.loop import LOOPS
from rollgrad.entrypoints.cli.offline import TRAINERS
from rollgrad.entrypoints.config_io import (
    dump_config,
    load_config,
    read_config,
    setting_names,
    settings_tree,
    structure_config,
    structure_run,
)

LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(10**9), 10**9),
    float: st.floats(allow_nan=False),
    str: st.text(st.characters(codec="utf-8")),
    NoneType: st.none(),
    Any: st.recursive(st.booleans() | st.integers() | st.text("abc"), lambda deeper: st.lists(deeper, max_size=2)),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    if isinstance(kind, UnionType):
        return st.one_of(*map(values, get_args(kind)))
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if parts[-1] is Ellipsis:
            return st.lists(values(parts[0]), max_size=3).map(tuple)
        return st.tuples(*map(values, parts))
    if get_origin(kind) is dict:
        return st.dictionaries(*map(values, get_args(kind)), max_size=3)
    if attrs.has(kind):
        return st.builds(kind, **{field.name: values(field.type) for field in attrs.fields(kind)})
    if issubclass(kind, StrEnum):
        return st.sampled_from(list(kind))
    return LEAVES[kind]


@settings(max_examples=25, deadline=None)
@given(values(RLConfig))
def test_what_is_dumped_reads_back_equal(config: RLConfig) -> None:
    config.algo.extension_path = None  # the file would have to be there
    config.algo.preset = None  # expanded when read
    assert yaml.safe_load(dump_config(config)) == settings_tree(config)
    assert structure_config(settings_tree(config)) == config


def test_an_enumerated_value_where_names_of_ones_own_may_stand_is_dumped() -> None:
    config = RLConfig()
    config.algo.kl.init_coef, config.algo.kl.estimator = 0.1, KLEstimator.K3
    assert structure_config(yaml.safe_load(dump_config(config))) == config


def test_a_path_whose_bytes_are_no_utf8_is_dumped() -> None:
    config = RLConfig()
    config.ckpt.output_dir = "runs/\udce9t\udce9"  # as Python has such bytes of a command line
    assert structure_config(yaml.safe_load(dump_config(config))) == config


def test_a_file_sets_what_it_names_only(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("algo:\n  advantage:\n    estimator: rloo\nactor:\n  adam:\n    lr: 2e-5\ncritic:\n")
    expected = RLConfig()
    expected.algo.advantage.estimator = "rloo"
    expected.actor.adam.lr = 2e-5
    assert load_config(path) == expected


@pytest.mark.parametrize("run", [RLConfig, *(kind.run for kind in (*TRAINERS.values(), *LOOPS.values()))])
def test_a_setting_leaves_the_defaults_beside_it(run: type[attrs.AttrsInstance]) -> None:
    default = run()  # where the learning rate of a critic is not that of an actor, though both are Adam's
    for name in setting_names(run):
        *sections, key = name.split(".")
        data: Any = {key: functools.reduce(operator.getitem, name.split("."), settings_tree(default))}
        for section in reversed(sections):
            data = {section: data}
        assert structure_run(run, data) == default, name


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("# nothing\n")
    assert load_config(path) == RLConfig()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"algo": {"advantage": {"estimatr": "rloo"}}},
            "algo.advantage.estimatr is not a setting; did you mean algo.advantage.estimator?",
        ),
        ({"n_samples_per_prompt": 2}, "did you mean rollout.n_samples_per_prompt?"),
        ({"zzz": 1}, "zzz is not a setting; see"),
        ({5: 1}, "5 is not a setting; see"),
        (
            {"actor": {"lr_scheduler": "cosine"}},
            "actor.lr_scheduler is 'cosine', but it must be one of constant, linear, cosine_with_min_lr, "
            "warmup_stable_decay.",
        ),
        ({"train": {"max_steps": "x"}}, "train.max_steps is 'x', but it must be an integer or null."),
        ({"train": {"seed": None}}, "train.seed is None, but it must be an integer."),
        ({"train": {"max_epochs": 1.5}}, "train.max_epochs is 1.5, but it must be an integer."),
        ({"train": {"max_epochs": True}}, "must be an integer"),
        ({"actor": {"eps_clip": True}}, "must be a number"),
        ({"actor": {"model_name_or_path": 5}}, "must be text"),
        ({"actor": {"deterministic": "yes please"}}, "must be true or false"),
        ({"actor": {"eps_clip_low_high": [0.2]}}, "must be a list of 2 numbers or null"),
        ({"rollout": {"stop_strings": "ab"}}, "must be a list of texts"),
        ({"reward": {"verifier": "maths"}}, "must be one of last_number, exact_match, math, format or null"),
        ({"train": 3}, "train is 3, but it must be a section"),
        (["train"], "The configuration is ['train'], but it must be a section"),
    ],
)
def test_refuses_with_the_key_and_the_rule(data: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        structure_config(data)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("written", "kind"),
    [("true", "full"), ("false", "off"), ("off", "off"), ("on", "full"), ("selective", "selective")],
)
def test_gradient_checkpointing_is_what_yaml_makes_of_it(written: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"actor: {{gradient_checkpointing: {written}}}")
    assert load_config(path).actor.gradient_checkpointing == kind


def test_all_that_cannot_be_read_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "algo: {preset: dapoo, kl: {init_cof: 1}}\ntrain: {max_steps: x, seed: 1.5}\nrollout: 3\nzzz: 1\n"
        "actor: {adam: {lr: fast}, eps_clip: 0.1}\n"
    )
    with pytest.raises(ConfigurationError) as error:
        load_config(path)
    lines = str(error.value).splitlines()
    names = ["dapoo", "algo.kl.init_cof", "train.max_steps", "train.seed", "rollout is 3", "zzz", "actor.adam.lr"]
    assert all(sum(name in line for line in lines) == 1 for name in names)
    assert len(lines) == len(names)
    config, problems = read_config(path, run=RLConfig)
    assert [str(problem) for problem in problems] == lines
    assert config.actor.eps_clip == 0.1
    assert config.actor.adam.lr == RLConfig().actor.adam.lr


def test_variables_of_a_template_keep_their_types() -> None:
    given = {"enable_thinking": False, "budget": 8, "share": 0.5, "style": "short"}
    read = structure_config({"data": {"chat_template_kwargs": given}}).data.chat_template_kwargs
    assert read == given
    assert [type(value) for value in read.values()] == [bool, int, float, str]
    with pytest.raises(ConfigurationError, match="must be a section of `name: value` lines or null"):
        structure_config({"data": {"chat_template_kwargs": {"x": [1]}}})


def test_a_file_that_is_not_yaml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("actor: 1\nb: [\n")
    with pytest.raises(ConfigurationError, match=r"run\.yaml is not YAML at line"):
        load_config(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_config(path)


def test_every_setting_has_a_name() -> None:
    names = list(setting_names())
    assert "algo.advantage.estimator" in names
    assert "actor.adam.betas" in names
    assert len(names) == len(set(names))


def test_an_unquoted_off_is_the_choice_off(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("algo: {correction: {level: off}}")
    assert load_config(path).algo.correction.level == "off"
    path.write_text("algo: {old_logprobs: off}")
    with pytest.raises(ConfigurationError, match=r"algo.old_logprobs is False, but it must be one of recompute"):
        load_config(path)
