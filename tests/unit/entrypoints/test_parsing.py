"""Booleans and spellings on every command's line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import structlog
import yaml
from hypothesis import given
from hypothesis import strategies as st

import rollgrad
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.cli.evaluation import EvalArguments
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.parsing import OptionalValue, TrainArguments, flag_kinds, parse, parse_run, spell_out
from rollgrad.entrypoints.config_io import load_config, structure_config
from tests.flags import EVERY, KINDS, example, negative

BOOLEANS = sorted(name for name, kind in EVERY.items() if kind is bool)


def hyphens(word: str) -> str:
    return f"--{word.removeprefix('--').replace('_', '-')}"


def forms(name: str, *, value: bool) -> list[list[str]]:
    """Every way to write a boolean."""
    words = [f"{value}", f"{value}".lower(), f"{value}".upper()]
    written = [[f"--{name}", word] for word in words] + [[f"--{name}={word}"] for word in words]
    written += [[f"--{name}"]] if value else [[f"--{negative(name)}"]]
    return written + [[hyphens(form[0]), *form[1:]] for form in written]


def test_every_command_has_booleans() -> None:
    assert {"dry_run", "json", "data.apply_chat_template", "train.async_enable", "deep"} <= set(BOOLEANS)


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", BOOLEANS)
def test_every_form_of_a_boolean_says_the_same(name: str, value: bool) -> None:
    for form in forms(name, value=value):
        assert spell_out(form, EVERY) == [f"--{name}", str(value)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("value", [True, False])
def test_every_command_takes_every_form(kind: type[Any], value: bool) -> None:
    names = [name for name, its in flag_kinds(kind).items() if its is bool]
    words: list[str] = []
    for index, name in enumerate(names):
        written = forms(name, value=value)
        words += written[index % len(written)]
    if kind in (TrainArguments, EvalArguments):
        parsed, _, wrong = parse_run(kind, RLConfig, "train rl", words)
        assert wrong == []
    else:
        parsed = parse(kind(), "command", words)
    for name in names:
        assert attrs.has(type(parsed))
        at: Any = parsed
        for part in name.split("."):
            at = getattr(at, part)
        assert at is value, name


@given(st.lists(st.sampled_from(["--data.apply_chat_template", "--dry_run", "--train.seed", "7", "-1", "--x"])))
def test_a_boolean_swallows_no_flag(words: list[str]) -> None:
    try:
        spelled = spell_out(words, EVERY)
    except ConfigurationError:  # a number right after a boolean
        return
    flags = [word for word in words if word.startswith("--")]
    assert [word for word in spelled if word.startswith("--")] == flags
    assert [word for word in spelled if word in ("7", "-1")] == [word for word in words if word in ("7", "-1")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.apply_chat_template", "maybe"], "--data.apply_chat_template is 'maybe', but it takes True, False"),
        (["--data.apply_chat_template="], "--data.apply_chat_template is '', but it takes True, False"),
        (["--data.no_apply_chat_template", "True"], "takes no value: write --data.apply_chat_template"),
    ],
)
def test_what_is_neither_true_nor_false_is_one_line(
    words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["--actor.model_name_or_path", "org/m", "--data.prompt_dataset", "org/d", "--reward.verifier", "math"]
    assert main(["train", "rl", *needed, *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert printed.out == ""


def test_the_last_of_two_counts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data.apply_chat_template", "False", "--dry_run", "--no_dry_run", "--data.apply_chat_template"]
    main(["train", "rl", "--print_config", *words])  # no model is set: 2
    assert structure_config(yaml.safe_load(capsys.readouterr().out)) == RLConfig()


def test_a_flag_may_have_an_optional_value_of_other_words() -> None:
    resume = OptionalValue({"true": "always", "false": "never", "auto": "auto"}, alone="always", negated="never")
    for words, value in (
        (["--ckpt.resume"], "always"),
        (["--ckpt.resume", "True"], "always"),
        (["--ckpt.resume=auto"], "auto"),
        (["--ckpt.no_resume"], "never"),
    ):
        assert spell_out([*words, "--dry_run"], EVERY, {"ckpt.resume": resume}) == [
            "--ckpt.resume",
            value,
            "--dry_run",
            "True",
        ]


@pytest.mark.parametrize("kind", KINDS[2:], ids=lambda kind: kind.__name__)
def test_the_table_of_flags_is_the_parsers_own(kind: type[Any]) -> None:
    words = [
        word
        for name, its in flag_kinds(kind).items()
        if its in (bool, int, str)
        for word in (f"--{name}", *example(its))
    ]
    parse(kind(), "command", words)


def test_the_table_of_flags_is_the_parsers_own_in_training() -> None:
    skipped = ("config", "algo.preset", "algo.extension_path")
    flags = {name: its for name, its in flag_kinds(TrainArguments).items() if name not in skipped}
    words = [word for name, its in flags.items() for word in (f"--{name}", *example(its))]
    assert parse_run(TrainArguments, RLConfig, "train rl", words)[2] == []


# Values in the spellings of others.

SPELLINGS = [
    ("algo.advantage.estimator", "grpo", "group_norm"),
    ("algo.advantage.estimator", "GRPO", "group_norm"),
    ("algo.advantage.estimator", "ppo", "gae"),
    ("algo.advantage.estimator", "reinforce++", "reinforce"),
    ("algo.advantage.estimator", "REINFORCE++-baseline", "reinforce_baseline"),
    ("algo.advantage.estimator", "drgrpo", "dr_grpo"),
    ("algo.advantage.estimator", "Dr.GRPO", "dr_grpo"),
    ("algo.advantage.estimator", "RLOO", "rloo"),
    ("actor.policy_loss_type", "vanilla", "ppo"),
    ("actor.policy_loss_type", "GSPO", "gspo"),
    ("actor.policy_loss_type", "clip-cov", "clip_cov"),
    ("actor.dtype", "bf16", "bfloat16"),
    ("actor.dtype", "fp16", "float16"),
    ("actor.dtype", "FP32", "float32"),
    ("rollout.engine", "vLLM", "vllm"),
    ("rollout.engine", "VLLM", "vllm"),
    ("actor.loss_aggregation", "token-mean", "token_mean"),
    ("algo.kl.estimator", "low_var_kl", "k3"),
    ("reward.verifier", "MATH", "math"),
]


def nested(name: str, value: Any) -> Any:
    for key in reversed(name.split(".")):
        value = {key: value}
    return value


def at(config: Any, name: str) -> Any:
    for key in name.split("."):
        config = config[key]
    return config


@pytest.mark.parametrize(("name", "given", "canonical"), SPELLINGS)
def test_other_spellings_are_understood_by_flags_and_files(
    name: str, given: str, canonical: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(nested(name, given)))
    for words in ([f"--{name}", given], [f"--{name}={given}"], ["--config", str(tmp_path / "run.yaml")]):
        main(["train", "rl", "--print_config", *words])  # no model is set: 2
        assert at(yaml.safe_load(capsys.readouterr().out), name) == canonical


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if "dtype" in flag_kinds(kind)], ids=lambda kind: kind.__name__
)
def test_every_command_understands_formats(kind: type[Any]) -> None:
    for written in ("bf16", "BF16", "bfloat16"):
        assert parse(kind(), "command", ["--dtype", written]).dtype is DType.BFLOAT16


def test_the_library_understands_them_too(tmp_path: Path) -> None:
    config = RLConfig()
    config.algo.advantage.estimator = "GRPO"
    config.actor.dtype = "bf16"  # type: ignore[assignment]
    config.rollout.engine = "vLLM"  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=r"actor\.model_name_or_path"):
        rollgrad.train(config)
    assert config.algo.advantage.estimator == "group_norm"
    assert (config.actor.dtype, config.rollout.engine) == (DType.BFLOAT16, Engine.VLLM)
    config.actor.dtype = "bf8"  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=r"actor\.dtype is 'bf8', which is none of auto, bfloat16"):
        rollgrad.train(config)


def test_a_users_own_estimator_comes_before_another_name(tmp_path: Path, algorithms_as_before: None) -> None:
    (tmp_path / "own.py").write_text(
        "from rollgrad import estimator\n\n@estimator('grpo')\ndef own(inputs, params):\n    return None\n"
    )
    config = RLConfig()
    config.algo.extension_path = str(tmp_path / "own.py")
    config.algo.advantage.estimator = "grpo"
    with pytest.raises(ConfigurationError, match=r"actor\.model_name_or_path"):
        rollgrad.train(config)
    assert config.algo.advantage.estimator == "grpo"


@pytest.mark.parametrize("given", ["GRPO", "Dr.GRPO", "reinforce++", "DAPO,TIS"])
def test_presets_in_other_spellings(given: str, tmp_path: Path) -> None:
    canonical = {"Dr.GRPO": "dr_grpo", "reinforce++": "reinforce_pp"}.get(given, given.lower())
    assert load_config(preset=given) == load_config(preset=canonical)


@pytest.mark.parametrize(
    ("flags", "differ"),
    [([], "algo.advantage.estimator group_norm, not rloo"), (["--algo.advantage.estimator", "rloo"], None)],
)
def test_a_preset_whose_settings_a_file_overrides_is_told(flags: list[str], differ: str | None, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("algo:\n  advantage:\n    estimator: group_norm\n")
    with structlog.testing.capture_logs() as lines:
        parse_run(TrainArguments, RLConfig, "train rl", ["--config", str(path), "--algo.preset", "rloo", *flags])
        if not flags:
            load_config(path, preset="rloo")
    assert [line["settings"] for line in lines] == ([differ] * 2 if differ else [])


@pytest.mark.parametrize(
    ("flag", "given", "message"),
    [
        ("algo.advantage.estimator", "dapo", "which is a preset of several settings: set --algo.preset dapo."),
        ("algo.advantage.estimator", "group_nrm", "did you mean group_norm?"),
        ("actor.policy_loss_type", "dapo", "set --algo.preset dapo."),
        ("rollout.engine", "sglang", "invalid choice 'sglang'"),
        ("actor.dtype", "fp8", "invalid choice 'fp8'"),
    ],
)
def test_what_is_not_understood_is_answered(
    flag: str, given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "rl", f"--{flag}", given]) == 2
    told = capsys.readouterr().err.splitlines()
    assert any(message in line and line.startswith("error: ") for line in told)
    assert len([line for line in told if given in line]) == 1


def test_each_unknown_flag_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "rl", "--num_generations", "4", "--learning_rate", "1e-6"]) == 2
    first, second, *missing = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error: No ") for line in missing), "a model, prompts and a reward are missing as well"
    assert first == "error: --num_generations is not a flag; did you mean --rollout.n_samples_per_prompt?"
    assert second == "error: --learning_rate is not a flag; did you mean --actor.adam.lr?"
