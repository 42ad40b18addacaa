"""A run of other sections than reinforcement learning's has flags, help, YAML, ranges and rules like it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import define

from rollgrad.application.settings.sections.actor import ActorConfig
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.application.settings.sections.eval import EvalConfig
from rollgrad.application.settings.sections.logger import LoggerConfig
from rollgrad.application.settings.validation import broken_rules
from rollgrad.domain.errors import ConfigurationError, problem_lines
from rollgrad.domain.settings import section
from rollgrad.entrypoints.cli import help as cli_help
from rollgrad.entrypoints.cli.parsing import TrainFlags, parse_run
from rollgrad.entrypoints.config_io import dump_config, read_config, setting_names


@define(kw_only=True)
class ImitationRun:
    """A run that imitates replies."""

    actor: ActorConfig = section(ActorConfig, "The model that is trained.")
    eval: EvalConfig = section(EvalConfig, "Evaluation.")
    ckpt: CheckpointConfig = section(CheckpointConfig, "What is written where.")
    logger: LoggerConfig = section(LoggerConfig, "Where metrics go.")


@define(kw_only=True)
class ImitationArguments(TrainFlags, ImitationRun):
    """Trains a model to imitate replies."""


def parse(*words: str) -> tuple[ImitationArguments, ImitationRun, list[ConfigurationError]]:
    return parse_run(ImitationArguments, ImitationRun, "train imitation", words)


def rules(run: ImitationRun) -> Iterator[Iterator[str]]:
    def named() -> Iterator[str]:
        if not run.actor.model_name_or_path:
            yield "No model is set: name one with --actor.model_name_or_path."

    yield named()


def test_flags_become_settings_of_the_run() -> None:
    flags, run, unread = parse("--actor.model-name-or-path", "m", "--actor.dtype=BF16", "--dry_run", "--ckpt.resume")
    assert (flags.dry_run, flags.print_config, unread) == (True, False, [])
    assert type(run) is ImitationRun
    assert (run.actor.model_name_or_path, run.actor.dtype, run.ckpt.resume) == ("m", "bfloat16", "always")


def test_yaml_reads_back_and_flags_override_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    written = ImitationRun(actor=ActorConfig(model_name_or_path="m", max_norm=2.0))
    path.write_text(dump_config(written), encoding="utf-8")
    assert read_config(path, run=ImitationRun) == (written, [])
    _, run, _ = parse("--config", str(path), "--actor.max_norm", "3")
    assert (run.actor.model_name_or_path, run.actor.max_norm) == ("m", 3.0)


def test_settings_of_other_runs_are_unknown(tmp_path: Path) -> None:
    _, _, (error,) = parse("--algo.kl.init_coef", "1")
    assert str(error).startswith("--algo.kl.init_coef is not a flag")
    path = tmp_path / "run.yaml"
    path.write_text("rollout:\n  batch_size: 3\n", encoding="utf-8")
    _, problems = read_config(path, run=ImitationRun)
    assert [str(problem).partition(" is not")[0] for problem in problems] == ["rollout.batch_size"]


def test_help_shows_the_settings_of_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    essentials = {"The model": ("actor.model_name_or_path",)}
    monkeypatch.setitem(cli_help.ESSENTIALS, "train imitation", ("  rollgrad train imitation", essentials))
    for topic, shown in (("", "The model that is trained"), ("all", "--logger.log_samples"), ("ckpt", "--ckpt.resume")):
        assert cli_help.show_help("train imitation", ImitationArguments, ["--help", topic]) == 0
        text = capsys.readouterr().out
        assert shown in text
        assert "--algo" not in text
    assert "algo.preset" not in list(setting_names(ImitationRun))


def test_ranges_conditions_and_rules_are_named_together() -> None:
    words = ("--actor.adam.lr", "-1", "--eval.n_samples_per_prompt", "0", "--ckpt.keep_states", "0")
    _, run, _ = parse(*words, "--actor.muon.lr", "1")
    sentences = [line for error in broken_rules(run, rules) for line in problem_lines(error)]
    assert [sentence.split(" is ")[0] for sentence in sentences] == [
        "actor.adam.lr",
        "eval.n_samples_per_prompt",
        "ckpt.keep_states",
        "actor.muon.lr",
        "No model",
    ]
