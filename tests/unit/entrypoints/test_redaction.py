"""Secrets stay out of the output of every command."""

from pathlib import Path

import pytest

from rollgrad.application.settings.run import RLConfig
from rollgrad.entrypoints.cli.commands import COMMANDS
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.config_io import setting_names
from rollgrad.entrypoints.redaction import (
    SURE_LENGTH,
    is_secret_name,
    redact,
    secret_spans,
    secrets_of_arguments,
    secrets_of_settings,
)

SECRET = "sk-SENTINEL0123"
TRAINER = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d.jsonl --remote_rm_url reward.py"
URL = f"http://me:{SECRET}@host/score?api_key={SECRET}"


@pytest.mark.parametrize(
    "form", ["--use_wandb {}", "--use_wandb={}", "--wandb_api_key {}", "--wandb-api-key={}", "--hub_token {}"]
)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_prints_a_secret_flag(command: str, form: str, capfd: pytest.CaptureFixture[str]) -> None:
    status = main([*command.split(), *form.format(SECRET).split()])
    printed = capfd.readouterr()
    assert SECRET not in printed.out + printed.err
    assert printed.err
    assert status == (0 if command == "openrlhf" and "wandb" in form and "api" not in form else 2)


@pytest.mark.parametrize(
    "words",
    [
        ["openrlhf", *TRAINER.split(), "--use_wandb", SECRET],
        ["openrlhf", *TRAINER.split(), f"--use_wandb={SECRET}"],
        ["openrlhf", *TRAINER.split(), "--logger.wandb.key", SECRET],
        ["openrlhf", f"{TRAINER} --use_wandb {SECRET}"],
        ["openrlhf", *TRAINER.split(), "--api_key", SECRET],
        ["openrlhf", f"WANDB_API_KEY={SECRET}", *TRAINER.split(), "--num_episodes", SECRET],
        ["openrlhf", *TRAINER.split()[:-1], URL],
        [
            "openrlhf",
            "ray",
            "job",
            "submit",
            f'--runtime-env-json={{"env_vars": {{"HF_TOKEN": "{SECRET}"}}}}',
            "--",
            "x",
        ],
        ["train", "rl", "--wandb_key", SECRET, "--rollout.top_p", SECRET],
        ["train", "rl", "--wandb_key", SECRET, "--algo.kl.estimator", SECRET],
        ["train", "rl", "--wandb_key", SECRET, "--algo.advantage.estimator", SECRET],
        ["train", "rl", "--wandb_key", SECRET, SECRET],
        ["train", "rl", "--print_config", "--reward.remote_url", URL],
        ["train", "rl", "--print_config", "--rollout.server_urls", URL, URL],
        ["eval", "--print_config", "--reward.remote_url", URL],
        ["train", "rl", "--reward.remote_url", URL, "--actor.model_name_or_path", "./none"],
        ["train", "rl", "--agent.command", f"run --header 'Authorization: Bearer {SECRET}'", "--print_config"],
        ["doctor", f"--{SECRET}", "--api_key", SECRET],
        [SECRET, "--token", SECRET],
    ],
)
def test_no_message_and_no_dump_prints_a_secret(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    main(words)
    printed = capfd.readouterr()
    assert SECRET not in printed.out + printed.err
    assert printed.out + printed.err


@pytest.mark.parametrize(
    "line", ["api_key: {}", "wandb: {{key: {}}}", "train: {{seed: x{}, token: x{}}}", "- [{{password: {}}}]"]
)
def test_no_message_about_a_file_prints_its_secrets(
    line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(line.format(SECRET, SECRET))
    assert main(["train", "rl", "--config", str(tmp_path / "run.yaml")]) == 2
    assert SECRET not in capfd.readouterr().err


def test_a_variable_of_the_environment_is_hidden(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLGRAD_REWARD_TOKEN", SECRET)
    main(["train", "rl", "--rollout.top_p", SECRET])
    assert SECRET not in capfd.readouterr().err


@pytest.mark.slow
def test_a_plan_prints_no_secret(tiny_model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [
        "--actor.model_name_or_path",
        str(tiny_model_dir),
        "--data.prompt_dataset",
        "reasoning_gym:basic_arithmetic",
    ]
    words += [
        "--reward.remote_url",
        URL,
        "--algo.advantage.estimator",
        "reinforce",
        "--ckpt.output_dir",
        str(tmp_path / "run"),
        *("--rollout.max_new_tokens", "16"),
    ]
    assert main(["train", "rl", "--dry_run", *words]) == 0
    printed = capfd.readouterr()
    assert "http://***@host/score?api_key=***" in printed.out
    assert SECRET not in printed.out + printed.err


def test_a_hidden_secret_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    """Otherwise a printed configuration would be used as it is."""
    complete = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", "--print_config"]
    assert main(["train", "rl", *complete, "--reward.remote_url", URL]) == 0
    assert capfd.readouterr().err == "secrets are printed as ***: put them back where you use this\n"
    assert main(["train", "rl", *complete, "--reward.verifier", "math", "--data.label_key", "answer"]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert "label_key: answer" in printed.out


def test_no_setting_of_ours_is_a_secret() -> None:
    """They name columns, counts and files; what is one goes by the environment."""
    assert [name for name in setting_names(RLConfig) if is_secret_name(name)] == []


@pytest.mark.parametrize(
    "text",
    [
        "data.label_key is 'answer', but the rows have question: change --data.label_key.",
        "must be a section of `key: value` lines",
        "train/reward_per_token=0.25 tokens=128 entropy_per_token: 1.5",
        "http://127.0.0.1:8000/v1 and git@github.com:me/x",
        "Clients send the token as `Authorization: Bearer TOKEN`; a bearer token.",
        "KeyError: 'label'",
    ],
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert redact(text.replace("Authorization: Bearer TOKEN", ""), {"abcd"}) == text.replace(
        "Authorization: Bearer TOKEN", ""
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://u:p@ss@db/x", "postgres://***@db/x"),
        ("https://ghp_1234@github.com/x", "https://***@github.com/x"),
        ("{'Authorization': 'Bearer abc.def'}", "{'Authorization': 'Bearer ***'}"),
        ("curl -H 'Authorization: Basic dXNlcg=='", "curl -H 'Authorization: Basic ***'"),
        ("GET /?token=abc&x=1", "GET /?token=***&x=1"),
        ('{"api_key": "abc"}', '{"api_key": "***"}'),
        ("db_password = abc", "db_password = ***"),
    ],
)
def test_secrets_in_text_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown


LONG = 100_000


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "piece",
    ["a", "a:", "a.", "-a", "key", "token ", "api_key", "a+", "://", ":", "@", "?a", "Bearer ", "\n", "a=", "'"],
)
@pytest.mark.parametrize("before", ["", "http://", "api_key", "Authorization"])
def test_long_texts_take_time_as_their_length(piece: str, before: str) -> None:
    """A model may write what is printed, and without a space; at its square this takes a minute."""
    text = before + piece * (LONG // len(piece))
    redact(text)
    secrets_of_arguments([text])


def test_a_secret_that_begins_with_another_is_hidden_whole() -> None:
    assert redact("as hunter2-prod and hunter2", {"hunter2", "hunter2-prod"}) == "as *** and ***"


@pytest.mark.parametrize("secret", ["sk-proj-0123456789", "hunter22"])
def test_a_secret_is_hidden_where_letters_touch_it(secret: str) -> None:
    """A short one only behind the end of a line in quoted text: it may be part of an ordinary word."""
    texts = [
        repr(f"the key:\n{secret}"),
        f"\x1b[32m{secret}\x1b[0m",
        f"https://chat/bot{secret}/send",
        f"key_{secret}_a",
    ]
    hidden = [redact(text, {secret}) == text.replace(secret, "***") for text in texts]
    assert hidden == [True, *[len(secret) >= SURE_LENGTH] * 3]
    assert [bool(secret_spans(text, {secret})) for text in texts] == hidden


def test_secrets_in_the_query_of_a_url_are_known_wherever_it_stands() -> None:
    url = "http://me:hunter22@host:8000/get?api_key=sesame-1&page=all-of-it&token=sesame-2#here"
    found = {"hunter22", "sesame-1", "sesame-2"}
    assert secrets_of_arguments(["--reward.remote_url", url]) >= found
    assert secrets_of_settings({"reward": {"remote_url": [url, "plain"]}}) == found
    (span,) = secret_spans("it was sesame-1", found)
    assert span == (7, 15)
