"""Commands of OpenRLHF's documents are translated, in each spelling."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rollgrad.application.settings.derived import ranks
from rollgrad.application.settings.rules import validate
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints import openrlhf as translation
from rollgrad.entrypoints.cli import commands as cli
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.config_io import changed_settings, setting_names, structure_config
from rollgrad.entrypoints.names.names_of_openrlhf import FLAGS, FLAT, IMPLIED, REMOVED
from rollgrad.entrypoints.openrlhf.command import translate, translated_config
from rollgrad.entrypoints.translation.words import Given, parse
from tests.openrlhf_commands import GROUP, LEAST, MODULE, config_of, notes_of

COMMANDS = Path(__file__).with_name("openrlhf_commands.txt").read_text().split("\n\n")


def test_the_documents_have_seven_commands() -> None:
    assert len(COMMANDS) == 7
    assert all("openrlhf.cli.train_ppo_ray" in command for command in COMMANDS)


@pytest.mark.parametrize("index", range(len(COMMANDS)))
@pytest.mark.parametrize("words", ["split by a shell", "one text", "continuations kept"])
def test_documented_commands_translate_to_a_run(index: int, words: str) -> None:
    command = COMMANDS[index]
    elided = "..." in command
    argv = {
        "split by a shell": shlex.split(command.replace("\\\n", " "), comments=True),
        "one text": [command],
        "continuations kept": [word.strip("'\"") for word in command.replace("\\\n", " \\ ").split()],
    }[words]
    config, _ = translated_config(argv)
    if elided:  # they leave out what every run needs
        config.actor.model_name_or_path = config.actor.model_name_or_path or "m"
        config.data.prompt_dataset = config.data.prompt_dataset or "d.jsonl"
    else:
        assert config.data.prompt_dataset == "OpenRLHF/prompt-collection-v0.1"
        assert config.data.input_key == "context_messages"
        assert config.actor.adam.lr == 5e-7
        assert str(config.actor.dtype) == "bfloat16"
        assert config.data.apply_chat_template
        assert config.critic.model_name_or_path is not None
        assert config.critic.model_name_or_path.startswith("OpenRLHF/Llama-3-8b-rm")
        assert config.reward.model_name_or_path == config.critic.model_name_or_path
        assert ranks(config, "reward") == 8
    validate(config)
    assert config.algo.kl.init_coef == 0.01


def test_every_flag_of_the_documents_is_known() -> None:
    flags = {word for command in COMMANDS for word in command.split("train_ppo_ray")[1].split() if word[:2] == "--"}
    assert {flag[2:] for flag in flags} <= {*FLAT, *IMPLIED}


def test_flat_names_lead_to_dotted_ones() -> None:
    targets = {name for names in FLAT.values() for name in names} | {name for name, _ in IMPLIED.values()}
    assert targets <= set(FLAGS)


def test_every_setting_named_in_the_table_exists() -> None:
    assert {flag.to for flag in FLAGS.values() if flag.to} <= set(setting_names())


def test_every_flag_has_one_fate() -> None:
    assert all(flag.to is None or flag.reason is None for flag in FLAGS.values())
    modules = Path(translation.__file__).parent.glob("*.py")
    source = "".join(module.read_text() for module in modules)
    for name in (n for n, flag in FLAGS.items() if flag.to is None and flag.reason is None and not flag.always):
        key = name.rpartition(".")[2].removeprefix("is_correction_")
        assert key in source
    assert all(flag.to is None and flag.reason is None for flag in FLAGS.values() if flag.always)


def test_a_model_may_be_the_directory_of_the_run_that_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("sft/model", "rm/model", "plain", "plain/model"):
        Path(place).mkdir(parents=True)
        Path(place, "config.json").write_text("{}")
    command = "--pretrain sft --reward_pretrain rm --critic_pretrain plain --prompt_data d.jsonl"
    config, notes = translated_config([*MODULE, *command.split()])
    assert config.actor.model_name_or_path == str(Path("sft/model"))
    assert config.reward.model_name_or_path == str(Path("rm/model"))
    assert config.critic.model_name_or_path == "plain"
    assert [note for note in notes if "directory of a run" in note] == [
        f"not identical: {run}: the directory of a run, whose model is {Path(run, 'model')}" for run in ("sft", "rm")
    ]


def test_few_flags_of_today_are_not_honoured() -> None:
    """A lower number here is progress; a higher one is a flag that no longer does what it asks for."""
    today = {name: flag for name, flag in FLAGS.items() if flag.reason != REMOVED}
    assert len([flag for flag in today.values() if flag.reason is not None]) == 12
    assert len([flag for flag in today.values() if flag.always]) == 9
    assert len(today) == 172


@pytest.mark.parametrize(
    "flags",
    [
        ("--packing_samples",),
        ("--use_ds_universal_ckpt",),
        ("--local_rank", "0"),
        ("--enable_prefix_caching",),
        ("--value_head_prefix", "score"),
        ("--actor.muon.nesterov",),
    ],
)
def test_what_every_run_does_needs_no_note(flags: tuple[str, ...]) -> None:
    assert notes_of(*flags) == []
    assert config_of(*flags) == config_of()


def test_words_are_parsed_into_flags_and_their_values() -> None:
    argv = ["--a", "--b=1", "\\", "--c", "x", "-1", "\\\n", "...", "--d", "", "--e", "# ", "#", "a", "b", "--f=a=b"]
    assert parse(argv) == [
        Given("--a"),
        Given("--b", ("1",)),
        Given("--c", ("x", "-1")),
        Given("--d", ("",)),
        Given("--e", ("# ",)),
        Given("--f", ("a=b",)),
    ]


@pytest.mark.parametrize(
    "prefix",
    [
        MODULE,
        ("ray", "job", "submit", "--address=http://127.0.0.1:8265", "--runtime-env-json={}", "--", *MODULE),
        ("deepspeed", "--module", "openrlhf.cli.train_ppo_ray"),
        ("python", "/opt/openrlhf/cli/train_ppo_ray.py"),
        (),
    ],
)
def test_ways_to_start_it(prefix: tuple[str, ...]) -> None:
    assert translate([*prefix, "--seed", "7"]).settings["train"]["seed"] == 7


def test_quotes_are_kept_where_a_command_is_one_text() -> None:
    command = "python3 -m openrlhf.cli.train_ppo_ray --input_template 'Question: {}' # --seed 1"
    settings = translate([command]).settings
    assert settings["data"]["input_template"] == "Question: {}"
    assert "seed" not in settings["train"]


def test_the_last_of_two_counts_whatever_its_spelling() -> None:
    assert config_of("--seed", "1", "--train.seed", "2").train.seed == 2
    assert config_of("--train.seed", "2", "--seed", "1").train.seed == 1


def test_flat_and_dotted_flags_are_one_command() -> None:
    flat = "--eps_clip_low_high 0.2 0.28 --l2 0.1 --lr_warmup_ratio 0.1 --rollout_batch_size 64 --seed 3 --top_p 0.9"
    dotted = (
        "--actor.eps_clip_low_high 0.2 0.28 --actor.adam.weight_decay 0.1 --critic.adam.weight_decay 0.1 "
        "--actor.lr_warmup_ratio 0.1 --critic.lr_warmup_ratio 0.1 --rollout.batch_size 64 --train.seed 3 "
        "--rollout.top_p 0.9"
    )
    assert config_of(*flat.split()) == config_of(*dotted.split()) != config_of()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--init_kl_coeff", "0"], "--init_kl_coeff is not a flag of .*; did you mean --init_kl_coef?"),
        (["--algo.advantage.estimatr", "rloo"], "did you mean --algo.advantage.estimator?"),
        (["--qqqq"], "--qqqq is not a flag of openrlhf.cli.train_ppo_ray; remove it."),
        (["--seed", "much"], "--seed is much, but it takes one integer"),
        (["--seed", "1.5"], "--seed is 1.5, but it takes one integer"),
        (["--seed", "inf"], "--seed is inf, but it takes one integer"),
        (["--seed"], "--seed is without a value, but it takes one integer"),
        (["--bf16", "perhaps"], "--bf16 is perhaps, but it takes no value"),
        (["--async_train", "Optional:"], "--async_train is Optional:, but it takes no value"),
        (["--pretrain", "a", "b"], r"--pretrain is a b, but it takes one word"),
        (["--eps_clip_low_high", "0.2"], "--eps_clip_low_high is 0.2, but it takes two numbers"),
        (["word", "--seed", "1"], "The command names no module of OpenRLHF"),
        ([*MODULE, "word"], "'word' belongs to no flag"),
        (["python3 -m openrlhf.cli.train_ppo_ray --save_path 'a"], "cannot be split into words"),
        (["--enable_vllm_is_correction", "--vllm_is_correction_type", "x"], "x is none of tis, icepop, seq-mask-tis"),
    ],
)
def test_a_command_that_cannot_be_translated_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        translate(argv)


@pytest.mark.parametrize(
    ("module", "instead"),
    [
        ("train_opd", "write rollgrad train rl --algo.preset on_policy_distill."),
        ("interactive_chat", "write rollgrad chat."),
        ("train_decision_transformer", "run this step with OpenRLHF."),
    ],
)
def test_other_commands_are_one_sentence(module: str, instead: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["openrlhf", "deepspeed", "--module", f"openrlhf.cli.{module}", "--max_len", "4096"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: openrlhf.cli.{module} is not translated (")
    assert output.err.endswith(f": {instead}\n")
    assert output.err.count("\n") == 1


def test_settings_that_differ_are_printed_as_yaml_that_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*MODULE, *LEAST, *GROUP, "--advantage_estimator", "group_norm", "--actor_learning_rate", "5e-7", "--bf16"]
    assert main(["openrlhf", *argv, "--zpg", "2"]) == 0
    output = capsys.readouterr()
    assert output.err.splitlines() == [
        "not honoured: --zpg 2: one process trains each model, which DeepSpeed does not divide"
    ]
    printed = yaml.safe_load(output.out)
    assert printed["algo"] == {"advantage": {"estimator": "group_norm"}, "kl": {"init_coef": 0.01}}
    assert structure_config(printed) == translated_config(argv)[0]
    path = tmp_path / "run.yaml"
    path.write_text(output.out)
    assert main(["train", "rl", "--config", str(path), "--print_config"]) == 0
    assert structure_config(yaml.safe_load(capsys.readouterr().out)) == translated_config(argv)[0]


def test_settings_at_their_defaults_are_not_printed() -> None:
    assert changed_settings(RLConfig()) == {}
    config = RLConfig()
    config.reward.weights = {"a": 2.0}
    config.critic.value_clip = None
    assert changed_settings(config) == {"critic": {"value_clip": None}, "reward": {"weights": {"a": 2}}}


def test_what_a_run_would_refuse_is_said_beside_the_translation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["openrlhf", *MODULE, "--pretrain", "m", "--prompt_data", "d.jsonl"]) == 0
    assert "rollgrad train rl will refuse this: No reward is set" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["first", "last"])
def test_with_run_the_translated_command_trains(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[RLConfig] = []

    def record(config: RLConfig) -> int:
        trained.append(config)
        return 0

    monkeypatch.setattr(cli, "run_rl", record)
    argv = [*MODULE, *LEAST, "--zpg", "2"]
    assert main(["openrlhf", "--run", *argv] if place == "first" else ["openrlhf", *argv, "--run"]) == 0
    output = capsys.readouterr()
    assert trained == [translated_config(argv)[0]]
    assert output.out == ""
    assert "--zpg 2" in output.err


def test_with_run_a_command_is_refused_as_train_rl_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["openrlhf", "--run", *MODULE, "--pretrain", "m", "--prompt_data", "d.jsonl"]) == 2
    assert "error: No reward is set" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_is_shown_without_a_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["openrlhf", *arguments]) == 0
    assert capsys.readouterr().out.startswith("usage: rollgrad openrlhf")


def test_translating_does_not_import_torch() -> None:
    code = "import sys, rollgrad.entrypoints.openrlhf.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
