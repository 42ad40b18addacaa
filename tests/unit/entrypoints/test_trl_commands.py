"""Commands of TRL are read as TRL reads them, and the translation reads back."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.trl.command import translate_command
from tests.translated_settings import holds
from tests.trl_commands import LEAST, settings, translated


def test_a_file_without_a_length_is_refused(tmp_path: Path) -> None:
    """TRL then cuts nothing; silence would cut at its default."""
    path = tmp_path / "run.yaml"
    path.write_text("max_length: null\n")
    with pytest.raises(ConfigurationError, match="max_length has no value"):
        translated("sft", "--config", str(path))


def test_a_file_of_settings_is_read_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 1.0e-3\nmax_length: 2048\nloss_type: [ipo, sft]\nbf16: true\neval_steps:\n")
    found = settings("dpo", "--config", str(path), "--max_length", "99")
    assert holds(
        found,
        {"actor.adam.lr": 1e-3, "data.max_tokens": 99, "dpo.loss": ("ipo", "sft"), "actor.dtype": "bfloat16"},
    )
    for text in ("- a list", "a: ["):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match="change --config"):
            translated("dpo", "--config", str(path))


def test_printed_settings_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trl", "reward", *LEAST, "--report_to", "comet_ml"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("# rollgrad train rm --config FILE\n")
    assert "not honoured: --report_to comet_ml" in output.err
    path = tmp_path / "run.yaml"
    path.write_text(output.out)
    assert main(["train", "rm", "--config", str(path), "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["dataset"] == "d.jsonl"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vllm-serve"], "vllm-serve is no command of TRL that is translated: start an engine with `vllm serve`"),
        (["gkd"], "gkd is no command of TRL that is translated: write rollgrad train kd, or rollgrad train rl --algo."),
        (["sdft"], "sdft is no command of TRL that is translated: write rollgrad train rl --algo.preset sdft."),
        (["bco"], "bco is no command of TRL that is translated: write rollgrad trl with one of sft, dpo, kto, reward"),
        (["sft", "--learning_rat", "1"], "did you mean --learning_rate?"),
        (["sft", "--first", "1", "--second"], "--second is not a flag of trl sft"),  # beside the first
        (["python", "train_grpo.py"], "train_grpo.py is no script of TRL's"),
        (["sft", "--learning_rate", "fast"], "it takes one number"),
        (["sft", "--run"], "No model is set"),
    ],
)
def test_each_error_is_a_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trl", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_help_does_not_import_torch(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["sft", "--help"]):
        assert main(["trl", *words]) == 0
        assert capsys.readouterr().out.startswith("usage: rollgrad trl")
    code = "import sys, rollgrad.entrypoints.trl.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("launcher", "processes"),
    [
        (("python", "trl/scripts/dpo.py"), 1),
        (("accelerate", "launch", "--num_processes", "4", "trl/scripts/dpo.py"), 4),
        (("torchrun", "--nproc-per-node=4", "--nnodes=2", "-m", "trl.scripts.dpo"), 8),
        (("examples/scripts/dpo.py",), 1),
    ],
)
def test_a_line_that_starts_a_script_is_the_command(launcher: tuple[str, ...], processes: int) -> None:
    given = translate_command([*launcher, *LEAST, "--beta", "0.2"])
    assert given == translate_command(["dpo", *LEAST, "--num_processes", str(processes), "--beta", "0.2"])


def test_commas_between_quoted_words_are_no_part_of_them() -> None:
    found = settings("sft", "--use_peft", "--lora_target_modules", "q_proj,", "v_proj")
    assert tuple(found["actor.lora.target_modules"]) == ("q_proj", "v_proj")


def test_environment_variables_of_a_file_are_named_without_their_values(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text("env:\n  HF_TOKEN: secret\n  WANDB_PROJECT: mine\nlearning_rate: 1e-4\n")
    result = translated("sft", "--config", str(file))
    assert result.run.actor.adam.lr == 1e-4
    assert f"not honoured: env in {file}: set before the command what it names: HF_TOKEN, WANDB_PROJECT" in result.notes
    assert not any("secret" in note for note in result.notes)
    file.write_text("lr_scheduler_kwargs:\n  num_cycles: 0.5\n  last_epoch: -1\n")
    assert not any("\n" in note for note in translated("sft", "--config", str(file)).notes)
    file.write_text("env: HF_TOKEN\n")
    with pytest.raises(ConfigurationError, match=r"env in .* is no mapping"):
        translated("sft", "--config", str(file))
