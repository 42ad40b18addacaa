"""OpenRLHF's command of a reward model's server is translated."""

import shlex

import pytest

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.parsing import parse as parse_arguments
from rollgrad.entrypoints.cli.serve_reward import ServeRewardArguments
from rollgrad.entrypoints.openrlhf.command import translate

SERVE = ("python3", "-m", "openrlhf.cli.serve_rm")


def served(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[ServeRewardArguments, str]:
    """Returns the settings that `rollgrad serve reward` reads from the printed command, and the notes about it."""
    assert main(["openrlhf", *SERVE, *flags]) == 0
    output = capsys.readouterr()
    words = shlex.split(output.out)
    assert words[:3] == ["rollgrad", "serve", "reward"]
    return parse_arguments(ServeRewardArguments(), "serve reward", words[3:]), output.err


def test_a_reward_server_translates(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--reward_pretrain OpenRLHF/Llama-3-8b-rm --port 5001 --bf16 --flash_attn --max_len 8192 --batch_size 16"
    arguments, notes = served(capsys, *flags.split(), "--normalize_reward")
    expected = {"model": "OpenRLHF/Llama-3-8b-rm", "port": 5001, "dtype": "bfloat16", "max_length": 8192}
    assert {name: getattr(arguments, name) for name in expected} == expected
    assert arguments.host == "127.0.0.1"
    assert arguments.normalize_reward
    for lost in ("--flash_attn:", "--batch_size 16:"):
        assert f"not honoured: {lost}" in notes
    assert "listens on 127.0.0.1 without --host" in notes


def test_dotted_flags_and_defaults_of_a_reward_server_translate(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--reward.model_name_or_path rm --ds.param_dtype fp16 --host 0.0.0.0"
    arguments, notes = served(capsys, *flags.split())
    assert (arguments.model, arguments.dtype, arguments.max_length) == ("rm", "float16", 2048)
    assert arguments.host == "0.0.0.0"
    assert "clients need a token" in notes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--reward_pretran rm",
            "--reward_pretran is not a flag of openrlhf.cli.serve_rm; did you mean --reward_pretrain?",
        ),
        ("--prompt_data d", "--prompt_data is not a flag of openrlhf.cli.serve_rm"),
        ("--port many", "--port is many, but it takes one integer"),
        ("--ds.param_dtype fp8", "fp8 is none of bf16, fp16, fp32"),
    ],
)
def test_errors_of_a_reward_server_are_one_sentence(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["openrlhf", *SERVE, *flags.split()]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1


def test_a_reward_server_is_no_run() -> None:
    with pytest.raises(ConfigurationError, match=r"openrlhf\.cli\.serve_rm does not train by reinforcement learning"):
        translate([*SERVE, "--reward_pretrain", "rm"])
