import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import evolve

from rollgrad.adapters.engines.vllm.arguments import argument_problems
from rollgrad.adapters.models.deepspeed.extra import config_problems
from rollgrad.application.settings.correction import correction_level
from rollgrad.application.settings.derived import ranks
from rollgrad.application.settings.rules import validate
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints import openrlhf as translation
from rollgrad.entrypoints.cli import commands as cli
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.parsing import parse as parse_arguments
from rollgrad.entrypoints.cli.serve_reward import ServeRewardArguments
from rollgrad.entrypoints.config_io import changed_settings, setting_names, structure_config
from rollgrad.entrypoints.names.names_of_openrlhf import FLAGS, FLAT, IMPLIED, REMOVED
from rollgrad.entrypoints.openrlhf.command import translate, translated_config
from rollgrad.entrypoints.translation.words import Given, parse

COMMANDS = Path(__file__).with_name("openrlhf_commands.txt").read_text().split("\n\n")
MODULE = ("python3", "-m", "openrlhf.cli.train_ppo_ray")
LEAST = ("--pretrain", "m", "--prompt_data", "d.jsonl", "--remote_rm_url", "reward.py")
GROUP = ("--n_samples_per_prompt", "8")


def config_of(*flags: str) -> RLConfig:
    """Settings of a command that lacks nothing; it must be one that can be trained."""
    config, _ = translated_config([*MODULE, *LEAST, *flags])
    validate(config)
    return config


def notes_of(*flags: str) -> list[str]:
    return translate([*MODULE, *LEAST, *flags]).notes


def at(config: RLConfig, name: str) -> Any:
    value: Any = config
    for key in name.split("."):
        value = getattr(value, key)
    return value


# The commands of OpenRLHF's documents.


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


# The tables.


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


def test_settings_of_deepspeed_and_vllm_by_their_own_names() -> None:
    zero = ("--zpg", "8", "--overlap_comm", "--grad_accum_dtype", "bf16")
    config = config_of(*EIGHT, "--zero_stage", "3", *zero, "--enforce_eager")
    assert config.ds.extra == {
        "zero_optimization": {"zero_hpz_partition_size": 8, "overlap_comm": True},
        "data_types": {"grad_accum_dtype": "bf16"},
    }
    assert config.vllm.extra == {"enforce_eager": True}
    assert list(config_problems(config.ds.extra)) == list(argument_problems(config.vllm.extra)) == []
    assert notes_of(*EIGHT, "--zero_stage", "3", *zero, "--enforce_eager") == []
    assert notes_of(*EIGHT, "--zero_stage", "2", "--zpg", "8") == [
        "not honoured: --zpg 8: ZeRO copies parameters within a machine at stage 3 alone, in OpenRLHF too"
    ]
    assert len(notes_of(*zero, "--enforce_eager")) == 4, "without a cluster"
    assert config_of(*zero, "--enforce_eager") == config_of()
    assert config_of(*EIGHT, "--zpg", "1", "--grad_accum_dtype", "fp32").ds.extra is None


# Reading a command line.


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


# The server of a reward model.

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


# What flags mean.


def test_without_flags_openrlhf_s_defaults_count() -> None:
    expected = {
        "algo.advantage.estimator": "gae",
        "algo.advantage.gamma": 1.0,
        "algo.advantage.lambd": 1.0,
        "algo.kl.init_coef": 0.01,
        "algo.kl.estimator": "k1",
        "algo.kl.use_loss": False,
        "actor.adam.lr": 1e-6,
        "actor.lr_scheduler": "cosine_with_min_lr",
        "actor.lr_warmup_ratio": 0.03,
        "actor.min_lr_ratio": 0.1,
        "actor.eps_clip": None,
        "actor.loss_aggregation": None,
        "critic.adam.lr": 9e-6,
        "critic.lr_scheduler": "cosine_with_min_lr",
        "critic.lr_warmup_ratio": 0.03,
        "critic.value_clip": 0.5,
        "critic.freezing_steps": 0,
        "rollout.batch_size": 1024,
        "rollout.n_samples_per_prompt": 1,
        "rollout.max_new_tokens": 1024,
        "train.batch_size": 128,
        "data.max_prompt_tokens": 1024,
        "data.apply_chat_template": False,
        "reward.clip_range": (-10.0, 10.0),
        "reward.function_path": "reward.py",
        "ckpt.output_dir": "./ckpt",
    }
    config = config_of()
    assert {name: at(config, name) for name in expected} == expected
    assert notes_of() == []


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"])
def test_estimators_with_flags_that_do_not_fit_all_of_them(estimator: str) -> None:
    flags = (
        *("--advantage_estimator", estimator, *GROUP, "--gamma", "0.9", "--lambd", "0.95"),
        *("--no_advantage_std_norm", "--critic_learning_rate", "1e-5", "--value_clip", "0.2", "--l2", "0.1"),
        *("--critic_pretrain", "c", "--freezing_actor_steps", "2", "--critic.min_lr_ratio", "0.2"),
    )
    config, notes = config_of(*flags), "\n".join(notes_of(*flags))
    assert config.algo.advantage.estimator == estimator
    assert config.actor.loss_aggregation is None  # token_mean, that of the ppo loss
    critic = estimator == "gae"
    assert config.critic.adam.lr == (1e-5 if critic else 9e-6)
    assert config.critic.model_name_or_path == ("c" if critic else None)
    for flag in ("--critic_learning_rate", "--value_clip", "--critic_pretrain", "--critic.min_lr_ratio"):
        assert (f"{flag} " in notes) is not critic
    assert "--l2" not in notes
    assert ("--gamma 0.9" in notes) is (estimator not in ("gae", "reinforce"))
    assert ("--lambd 0.95" in notes) is not critic
    assert ("--no_advantage_std_norm" in notes) is (estimator in ("rloo", "group_norm", "dr_grpo"))


def test_freezing_counts_from_zero() -> None:
    config = config_of("--freezing_actor_steps", "2")
    assert config.critic.freezing_steps == 3
    assert notes_of("--freezing_actor_steps", "2") == [
        "not identical: --freezing_actor_steps 2: 3 rollouts, since OpenRLHF counts from 0"
    ]


def test_the_critic_starts_from_the_reward_model() -> None:
    argv = [*MODULE, "--pretrain", "m", "--prompt_data", "d", "--reward_pretrain", "r"]
    assert translated_config(argv)[0].critic.model_name_or_path == "r"
    assert translated_config([*argv, "--critic_pretrain", "c"])[0].critic.model_name_or_path == "c"
    assert translated_config([*argv, "--remote_rm_url", "f.py"])[0].critic.model_name_or_path is None
    assert translated_config([*argv, "--advantage_estimator", "reinforce"])[0].critic.model_name_or_path is None


CORRECTION = ("--enable_vllm_is_correction",)


@pytest.mark.parametrize(
    ("flags", "level", "mode", "low", "high"),
    [
        ((), "auto", "truncate", 0.5, 2.0),
        (CORRECTION, "token", "clip", 0.5, 5.0),
        ((*CORRECTION, "--vllm_is_truncated_threshold", "0.1", "3"), "token", "clip", 0.1, 3.0),
        ((*CORRECTION, "--vllm_is_truncated_threshold", "3"), "token", "truncate", 0.5, 3.0),
        ((*CORRECTION, "--use_icepop"), "token", "mask", 0.5, 5.0),
        ((*CORRECTION, "--vllm_is_correction_type", "seq-mask-tis"), "geometric", "mask", 0.5, 5.0),
        (
            (
                "--algo.advantage.is_correction_enable",
                *("--algo.advantage.is_correction_type", "icepop"),
                *("--algo.advantage.is_correction_threshold", "0.8", "1.2"),
            ),
            *("token", "mask", 0.8, 1.2),
        ),
    ],
)
def test_flags_of_corrections_set_level_mode_and_bounds(
    flags: tuple[str, ...], level: str, mode: str, low: float, high: float
) -> None:
    correction = config_of(*flags).algo.correction
    assert (correction.level, correction.mode, correction.low, correction.high) == (level, mode, low, high)
    assert notes_of(*flags) == []


def test_icepop_without_a_correction_does_nothing() -> None:
    assert correction_level(config_of("--use_icepop")) == "off"
    assert notes_of("--use_icepop") == [
        "not honoured: --use_icepop: no correction is made without --enable_vllm_is_correction, or a "
        "--algo.advantage.is_correction_level"
    ]


IS = "--algo.advantage.is_correction"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("off", ("auto", "truncate", "ratio", 0.5, 2.0)),
        ("token", ("token", "mask", "ratio", 0.5, 5.0)),
        ("seq", ("geometric", "mask", "ratio", 0.5, 5.0)),
        (f"token {IS}_mode clip", ("token", "clip", "ratio", 0.5, 5.0)),
        (f"token {IS}_mode clip {IS}_threshold 3", ("token", "truncate", "ratio", 0.5, 3.0)),
    ],
)
def test_corrections_of_todays_release(flags: str, expected: tuple[str, str, str, float, float]) -> None:
    correction = config_of(f"{IS}_level", *flags.split()).algo.correction
    found = (correction.level, correction.mode, correction.gate, correction.low, correction.high)
    assert found == expected
    assert notes_of(f"{IS}_level", *flags.split()) == []


@pytest.mark.parametrize(("level", "ours"), [("token", "token"), ("seq", "geometric")])
def test_gates_of_a_correction(level: str, ours: str) -> None:
    flags = (f"{IS}_level", level, f"{IS}_gating", "binary_kl", f"{IS}_threshold", "0.01")
    correction = config_of(*flags).algo.correction
    assert (correction.level, correction.mode, correction.gate) == (ours, "mask", "binary_kl")
    assert correction.threshold == 0.01
    for more in ((f"{IS}_mode", "clip"), (f"{IS}_threshold", "0.5", "2")):
        with pytest.raises(ConfigurationError, match="gating binary_kl leaves out what is above one bound"):
            translate([*MODULE, *LEAST, *flags, *more])


def test_kl_as_a_loss_with_its_true_gradient() -> None:
    """w k1 grad log pi, which is the gradient of rho k3."""
    flags = ("--algo.kl.use_loss", "--algo.kl.estimator", "k2", "--algo.kl.unbiased_gradient")
    assert config_of(*flags).algo.kl.estimator == "k3_unbiased"
    assert notes_of(*flags) == []
    assert len(notes_of(*flags[1:])) == 1, "without a loss"


@pytest.mark.parametrize("term", ["--entropy_loss_coef 0.01", "--use_kl_loss --kl_estimator k3"])
def test_means_of_terms_beside_a_loss_over_sequences_are_told(term: str) -> None:
    told = "not identical: KL and entropy in the loss are means over replies, as the loss is, in OpenRLHF over tokens"
    for loss, tells in (("gspo", True), ("ppo --actor.loss_agg_mode seq-mean-token-mean", True), ("ppo", False)):
        loss_flags = f"--policy_loss_type {loss}".split()
        assert (told in notes_of(*loss_flags, *term.split())) is tells
        assert told not in notes_of(*loss_flags)


def test_flags_of_loss_aggregation_translate() -> None:
    mean = ("--actor.loss_agg_mode", "seq-mean-token-mean")
    assert config_of(*mean).actor.loss_aggregation == "sequence_mean"
    assert config_of("--actor.loss_agg_mode", "token-mean").actor.loss_aggregation == "token_mean"
    assert len(notes_of(*mean, "--policy_loss_type", "gspo")) == 1


def test_gspo_takes_its_clip_range_and_no_other_correction() -> None:
    config = config_of("--policy_loss_type", "gspo")
    assert (config.actor.policy_loss_type, config.actor.eps_clip) == ("gspo", 0.2)  # OpenRLHF's one default
    assert config.actor.loss_aggregation is None  # sequence_mean, its own
    config = config_of("--policy_loss_type", "gspo", "--eps_clip_low_high", "3e-4", "4e-4", *CORRECTION)
    assert config.actor.eps_clip_low_high == (3e-4, 4e-4)
    assert config.actor.eps_clip is None
    # It takes its ratio against the rollout, and makes no other correction.
    assert (config.algo.old_logprobs, correction_level(config)) == ("rollout", "off")
    assert config_of("--policy_loss_type", "gspo", "--dual_clip", "3").actor.dual_clip is None
    assert len(notes_of("--policy_loss_type", "gspo", "--dual_clip", "3")) == 1


def test_flags_of_clip_ranges_translate() -> None:
    assert config_of("--eps_clip", "0.1", "--dual_clip", "3").actor.eps_clip == 0.1
    assert config_of("--dual_clip", "3").actor.dual_clip == 3
    both = ("--eps_clip", "0.1", "--eps_clip_low_high", "0.2", "0.3")
    assert config_of(*both).actor.eps_clip_low_high == (0.2, 0.3)
    assert notes_of(*both) == ["not honoured: --eps_clip 0.1: --eps_clip_low_high replaces it"]


def test_flags_of_the_kl_term_translate() -> None:
    kl = config_of("--init_kl_coef", "0.001", "--use_kl_loss", "--kl_estimator", "k3").algo.kl
    assert (kl.init_coef, kl.use_loss, kl.estimator) == (0.001, True, "k3")
    kl = config_of("--kl_target", "0.1", "--kl_horizon", "5000").algo.kl
    assert (kl.target, kl.horizon) == (0.1, 5000)
    short = ("--kl_target", "0.1", "--kl_horizon", "100", "--rollout_batch_size", "64", "--n_samples_per_prompt")
    assert not any("shorter" in note for note in notes_of(*short, "1"))
    assert any("by a fifth at most" in note for note in notes_of(*short, "8"))
    assert config_of("--use_kl_loss").algo.kl.estimator == "k2"
    assert "becomes k2" in notes_of("--use_kl_loss")[0]
    off = ("--init_kl_coef", "0", "--use_kl_loss", "--kl_estimator", "k3", "--kl_target", "1", "--kl_horizon", "9")
    assert config_of(*off).algo.kl == RLConfig().algo.kl
    assert len(notes_of(*off)) == 4
    assert len(notes_of("--kl_horizon", "9")) == 1


@pytest.mark.parametrize(
    ("flags", "together", "prompt", "reply", "noted"),
    [
        (("--prompt_max_len", "512", "--generate_max_len", "2048"), None, 512, 2048, 1),
        (("--generate_max_len", "8192"), None, 1024, 8192, 0),
        (("--rollout.max_new_tokens", "3000", "--data.max_len", "4096"), 4096, None, 3000, 1),
        (("--data.max_len", "4096"), 4096, None, 4096, 1),
        (("--max_len", "512"), 512, None, 512, 1),
        (("--max_len", "4096", "--prompt_max_len", "1000"), 4096, 1000, 4096, 2),
        (("--max_len", "4096", "--prompt_max_len", "1000", "--generate_max_len", "10"), 4096, 1000, 10, 2),
        (("--max_len", "512", "--prompt_max_len", "1000"), 512, None, 512, 2),
    ],
)
def test_flags_of_lengths_translate_and_note_what_is_dropped(
    flags: tuple[str, ...], together: int | None, prompt: int | None, reply: int, noted: int
) -> None:
    config = config_of(*flags)
    assert (config.data.max_len, config.data.max_prompt_tokens) == (together, prompt)
    assert config.rollout.max_new_tokens == reply
    assert len(notes_of(*flags)) == noted
    assert all("dropped before the first step" in note for note in notes_of(*flags))


def test_a_chat_template_is_kept_where_it_is_used() -> None:
    flags = ("--tokenizer_chat_template", "{{ messages[0].content }}")
    assert config_of(*flags, "--apply_chat_template").data.chat_template == "{{ messages[0].content }}"
    assert config_of(*flags).data.chat_template is None
    assert "--apply_chat_template" in notes_of(*flags)[0]


def test_flags_of_batch_sizes_translate() -> None:
    config = config_of("--rollout_batch_size", "128", *GROUP, "--train_batch_size", "1024", "--max_epochs", "2")
    assert (config.rollout.batch_size, config.rollout.n_samples_per_prompt) == (128, 8)
    assert (config.train.batch_size, config.train.max_epochs) == (1024, 2)
    assert config_of("--rollout_batch_size", "16").train.batch_size == 16
    assert "--train_batch_size 64: 16" in notes_of("--rollout_batch_size", "16", "--train_batch_size", "64")[0]
    assert config_of("--use_dynamic_batch").train.max_tokens_per_micro_batch == 16192
    tokens = ("--train_max_tokens_per_gpu", "8192")
    assert config_of("--use_dynamic_batch", *tokens).train.max_tokens_per_micro_batch == 8192
    assert config_of(*tokens).train.max_tokens_per_micro_batch == RLConfig().train.max_tokens_per_micro_batch
    assert len(notes_of(*tokens)) == 1


def test_over_sampling_needs_a_correction() -> None:
    more = ("--vllm_generate_batch_size", "2048")
    assert config_of(*more).rollout.generate_batch_size is None
    assert len(notes_of(*more)) == 1
    assert config_of(*more, *CORRECTION).rollout.generate_batch_size == 2048
    assert notes_of("--vllm_generate_batch_size", "1024") == []


def test_flags_of_dynamic_filtering_translate() -> None:
    algo = config_of("--dynamic_filtering", "--dynamic_filtering_reward_range", "0.1", "0.9", *GROUP).algo
    assert (algo.dynamic_filtering_enable, algo.dynamic_filtering_range) == (True, (0.1, 0.9))
    assert not config_of("--dynamic_filtering_reward_range", "0.1", "0.9").algo.dynamic_filtering_enable
    assert len(notes_of("--dynamic_filtering_reward_range", "0.1", "0.9")) == 1


def test_flags_of_rewards_and_penalties_translate() -> None:
    http = config_of("--remote_rm_url", "http://a:5000/get_reward,http://b:5000/get_reward").reward
    assert (http.function_path, http.timeout) == (None, 180)
    assert http.remote_url == "http://a:5000/get_reward,http://b:5000/get_reward"
    assert "not identical" in notes_of("--remote_rm_url", "http://a")[0]
    reward = config_of(
        *("--reward_clip_range", "-1", "1", "--overlong_buffer_len", "128", "--overlong_penalty_factor", "0.5"),
        *("--stop_properly_penalty_coef", "0.5"),
    ).reward
    assert reward.clip_range == (-1, 1)
    assert (reward.overlong_buffer_len, reward.overlong_penalty_factor) == (128, 0.5)
    assert reward.stop_properly_penalty_coef == 0.5
    agent = ("--agent_func_path", "agent.py", "--overlong_buffer_len", "128")
    assert config_of(*agent).rollout.max_episode_tokens == 2048
    assert config_of(*agent, "--max_len", "4096").data.max_len == 4096
    assert any("against the 2048 of an episode" in note for note in notes_of(*agent))
    assert config_of("--overlong_penalty_factor", "2").reward.overlong_penalty_factor == 1
    assert len(notes_of("--overlong_penalty_factor", "2")) == 1
    assert notes_of("--reward_pretrain", "r") == [
        "not honoured: --reward_pretrain r: --remote_rm_url or --agent_func_path replaces it"
    ]
    clip = ("--reward_clip_range", "-1", "1")
    assert notes_of(*clip) == []
    assert "before the group" in notes_of(*clip, *GROUP, "--advantage_estimator", "rloo")[0]
    assert "--normalize_reward" in notes_of("--normalize_reward")[0]


@pytest.mark.parametrize(
    ("scheduler", "ours", "warmup", "floor"),
    [
        ("constant", "constant", 0.0, 0.1),
        ("constant_with_warmup", "constant", 0.03, 0.1),
        ("linear", "linear", 0.03, 0.0),
        ("cosine", "cosine_with_min_lr", 0.03, 0.0),
        ("cosine_with_min_lr", "cosine_with_min_lr", 0.03, 0.1),
        ("warmup_stable_decay", "warmup_stable_decay", 0.03, 0.0),
        ("polynomial", "cosine_with_min_lr", 0.03, 0.1),
    ],
)
def test_learning_rate_schedules_translate(scheduler: str, ours: str, warmup: float, floor: float) -> None:
    config = config_of("--lr_scheduler", scheduler)
    for model in (config.actor, config.critic):
        assert (model.lr_scheduler, model.lr_warmup_ratio, model.min_lr_ratio) == (ours, warmup, floor)
    assert len(notes_of("--lr_scheduler", scheduler)) == (scheduler == "polynomial")


def test_flags_of_the_optimizer_translate() -> None:
    flags = ("--adam_betas", "0.8", "0.9", "--l2", "0.1", "--max_norm", "0.5", "--actor_learning_rate", "2e-6")
    config = config_of(*flags, "--critic_learning_rate", "3e-6", "--actor.optim", "adam")
    for model, lr in ((config.actor, 2e-6), (config.critic, 3e-6)):
        assert (model.adam.betas, model.adam.weight_decay, model.max_norm) == ((0.8, 0.9), 0.1, 0.5)
        assert model.adam.lr == lr
    assert notes_of("--actor.optim", "adam") == []


def test_experts_are_balanced() -> None:
    assert config_of("--aux_loss_coef", "0.1").actor.aux_loss_coef == 0.1
    assert notes_of("--aux_loss_coef", "0.1") == []


def test_flags_of_moving_averages_translate() -> None:
    train = config_of("--enable_ema", "--ema_beta", "0.9").train
    assert (train.enable_ema, train.ema_beta) == (True, 0.9)
    (note,) = notes_of("--enable_ema")
    assert note.startswith("not identical: --enable_ema: the averages are saved in ema")


def test_flags_of_muon_translate() -> None:
    config = config_of("--actor.optim", "muon", "--actor.max_norm", "0", "--critic.optim", "muon")
    assert (config.actor.optim, config.critic.optim) == ("muon", "muon")
    assert (config.actor.muon.lr, config.actor.muon.momentum) == (0.02, 0.95)
    given = ("--actor.optim", "muon", "--actor.muon.lr", "0.01", "--actor.muon.momentum", "0.9")
    assert (config_of(*given).actor.muon.lr, config_of(*given).actor.muon.momentum) == (0.01, 0.9)
    assert notes_of(*given, "--actor.max_norm", "0", "--actor.muon.ns_steps", "5") == []
    (clipped,) = notes_of(*given)
    assert clipped.startswith("not identical: --actor.optim muon: gradients are clipped before")
    (ignored,) = notes_of("--actor.muon.lr", "0.01")
    assert ignored.startswith("not honoured: --actor.muon.lr 0.01: ")
    assert config_of("--actor.muon.lr", "0.01") == config_of()


def test_flags_of_data_translate() -> None:
    data = config_of(
        *("--prompt_data", "a.jsonl,b.jsonl", "--prompt_data_probs", "0.25,0.75", "--prompt_split", "x"),
        *("--input_key", "q", "--label_key", "a", "--input_template", "Q: {}", "--max_samples", "100"),
    ).data
    assert (data.prompt_dataset, data.prompt_probs, data.prompt_split) == ("a.jsonl,b.jsonl", (0.25, 0.75), "x")
    assert (data.input_key, data.label_key, data.input_template, data.max_samples) == ("q", "a", "Q: {}", 100)
    for extra in (("--apply_chat_template", "--input_template", "Q: {}"), ("--input_template", "Q:")):
        assert config_of(*extra).data.input_template is None
        assert len(notes_of(*extra)) == 1


@pytest.mark.parametrize(
    ("flags", "dtype", "noted"),
    [
        ((), "auto", 0),
        (("--bf16",), "bfloat16", 0),
        (("--param_dtype", "bf16"), "bfloat16", 0),
        (("--param_dtype", "fp16"), "float16", 0),
        (("--param_dtype", "fp32"), "float32", 0),
        (("--param_dtype", "fp8"), "auto", 1),
    ],
)
def test_number_formats_translate(flags: tuple[str, ...], dtype: str, noted: int) -> None:
    assert config_of(*flags).actor.dtype == dtype
    assert len(notes_of(*flags)) == noted


def test_passes_are_as_large_as_micro_batches() -> None:
    lengths = ("--prompt_max_len", "100", "--generate_max_len", "28")
    train = config_of(*lengths, "--micro_train_batch_size", "4", "--micro_rollout_batch_size", "8").train
    assert (train.max_tokens_per_micro_batch, train.max_tokens_per_scoring_pass) == (4 * 128, 8 * 128)
    dynamic = ("--use_dynamic_batch", "--train_max_tokens_per_gpu", "500", "--rollout_max_tokens_per_gpu", "900")
    train = config_of(*lengths, *dynamic, "--micro_train_batch_size", "4").train
    assert (train.max_tokens_per_micro_batch, train.max_tokens_per_scoring_pass) == (500, 900)
    engines = ("--vllm_num_engines", "2", "--vllm_tensor_parallel_size", "2")
    assert config_of(*engines, "--rollout_tasks_per_gpu", "16").rollout.max_concurrent == 64


def test_images_are_read_in_one_process_and_in_several() -> None:
    images = ("--data.image_key", "pictures", "--data.max_images_per_prompt", "2", "--actor.freeze_visual_encoder")
    for more in ((), ("--colocate_all_models", "--vllm_num_engines", "2")):
        config = config_of("--apply_chat_template", *more, *images)
        assert (config.data.image_key, config.data.max_images_per_prompt) == ("pictures", 2)
        assert config.actor.freeze_visual_encoder
    assert len([note for note in notes_of(*images) if "--apply_chat_template" in note]) == 3


@pytest.mark.parametrize(
    ("key", "ours"),
    [("eval_math_pass1", "eval/pass@1"), ("pass4", "eval/pass@4"), ("pass3", None), ("none", None), ("reward", None)],
)
def test_the_metric_of_the_best_model(key: str, ours: str | None) -> None:
    flags = ("--eval_dataset", "e.jsonl", "--best_metric_key", key)
    assert config_of(*flags).ckpt.best_metric == ours
    told = [note for note in notes_of(*flags) if "--best_metric_key" in note]
    assert len(told) == (key != "none")


def test_flags_of_evaluation_translate() -> None:
    evaluation = config_of("--eval_dataset", "e.jsonl", "--eval_steps", "5", "--max_samples", "10").eval
    assert (evaluation.dataset, evaluation.split, evaluation.steps) == ("e.jsonl", "train", 5)
    assert (evaluation.temperature, evaluation.n_samples_per_prompt, evaluation.max_samples) == (0.6, 4, 10)
    assert config_of("--eval_dataset", "e.jsonl", "--eval_temperature", "0").eval.n_samples_per_prompt == 1
    assert config_of("--eval_dataset", "e.jsonl", "--top_p", "0.9").eval.top_p == 0.9
    assert config_of("--eval_split", "test", "--eval_steps", "5").eval == RLConfig().eval
    assert len(notes_of("--eval_split", "test", "--eval_steps", "5")) == 2
    assert notes_of("--eval_steps", "-1") == []


@pytest.mark.parametrize(
    "flags",
    [
        ("--async_queue_size", "4"),
        ("--partial_rollout",),
        ("--vllm_enable_sleep",),
        ("--vllm_sync_backend", "nccl"),
        ("--deepspeed_enable_sleep",),
        ("--reward_num_nodes", "2"),
        ("--lora_alpha", "8"),
        ("--lora_dropout", "0.1"),  # all weights are trained
        ("--load_in_4bit",),  # all weights are trained
        ("--wandb_group", "prm"),  # no key
        ("--ema_beta", "0.9"),
        ("--data.max_images_per_prompt", "2"),
        ("--ref_reward_offload",),
        ("--flash_attn",),
    ],
)
def test_what_has_no_counterpart_is_one_line_that_says_why(flags: tuple[str, ...]) -> None:
    (note,) = notes_of(*flags)
    assert note.startswith(f"not honoured: {' '.join(flags)}: ")
    assert config_of(*flags) == config_of()


def test_kernels_are_deterministic_when_asked() -> None:
    for flag in ("--full_determinism", "--train.full_determinism_enable"):
        assert config_of(flag).actor.deterministic
        assert notes_of(flag) == []


def test_trackers_are_told_of_some_steps() -> None:
    for reported in (("--use_tensorboard", "logs"), ("--logger.tensorboard_dir", "logs"), ("--use_wandb", "True")):
        assert config_of(*reported, "--logging_steps", "5").logger.logging_steps == 5
        assert not any("logging_steps" in note for note in notes_of(*reported, "--logging_steps", "5"))
    (note,) = notes_of("--logging_steps", "5")
    assert note.startswith("not honoured: --logging_steps 5: nothing is reported")


def test_what_wandb_is_told() -> None:
    flags = ("--use_wandb", "a-key", "--wandb_org", "us", "--wandb_project", "p", "--wandb_run_name", "n")
    logger = config_of(*flags).logger
    assert (logger.report_to, logger.organization) == (("wandb",), "us")
    assert (logger.project, logger.run_name, logger.group) == ("p", "n", None)
    (note,) = notes_of(*flags)
    assert note.startswith("not identical: --use_wandb: the key is read from WANDB_API_KEY"), "without the key"
    assert config_of("--use_wandb", "True").logger == evolve(RLConfig().logger, report_to=("wandb",))


@pytest.mark.parametrize(
    "flags",
    [
        *(("--lora_rank", "0"), ("--zpg", "1"), ("--ring_attn_size", "1"), ("--logging_steps", "1")),
        ("--ckpt.best_metric_key", "none"),
        ("--enable_prefix_caching",),
    ],
)
def test_flags_that_ask_for_nothing_are_passed_over(flags: tuple[str, ...]) -> None:
    assert notes_of(*flags) == []


@pytest.mark.parametrize(
    ("flags", "staleness", "partial"),
    [
        ((), 1, "none"),
        (("--train.async_queue_size", "3", "--enable_vllm_is_correction"), 3, "none"),
        (("--partial_rollout",), 1, "keep"),
        (("--train.partial_rollout_enable", "--async_queue_size", "2", "--enable_vllm_is_correction"), 2, "keep"),
    ],
)
def test_flags_of_asynchronous_training_translate(flags: tuple[str, ...], staleness: int, partial: str) -> None:
    train = config_of("--async_train", *flags).train
    assert (train.async_enable, train.max_staleness, train.partial_rollout) == (True, staleness, partial)
    (note,) = notes_of("--async_train", *flags)
    assert note.startswith(
        "not identical: --async_train: an update waits for its own groups only, not for a whole batch"
    )
    asked = "--enable_vllm_is_correction" in flags
    assert ("stale samples are corrected (algo.correction.level auto), there only if asked" in note) is not asked
    assert correction_level(config_of("--async_train", *flags)) == "token"


@pytest.mark.parametrize(("given", "groups", "notes"), [("2048", None, 1), ("1536", 1536, 1), ("4096", 2048, 2)])
def test_groups_in_flight_of_an_asynchronous_run(given: str, groups: int | None, notes: int) -> None:
    flags = ("--async_train", "--vllm_generate_batch_size", given)
    assert config_of(*flags).rollout.generate_batch_size == (groups or 2048)
    assert len(notes_of(*flags)) == notes


# Where it runs.

EIGHT = ("--actor_num_gpus_per_node", "8")


@pytest.mark.parametrize(
    "flags",
    [
        *((f"--{model}_num_nodes", "1") for model in ("actor", "critic", "ref")),
        *((f"--{model}_num_gpus_per_node", "8") for model in ("actor", "critic", "ref")),
        *(("--colocate_all_models", "--vllm_enable_sleep"), ("--colocate_actor_ref",)),
        *(("--vllm_num_engines", "1"), ("--vllm_tensor_parallel_size", "1"), ("--vllm_gpu_memory_utilization", "0.95")),
        *(("--zero_stage", "2"), ("--adam_offload",)),
    ],
)
def test_what_names_a_cluster_turns_it_on_as_openrlhf_would(flags: tuple[str, ...]) -> None:
    config = config_of(*flags)
    assert (config.cluster.enable, config.rollout.engine) == (True, "vllm")
    assert (config.actor.num_nodes, config.actor.num_gpus_per_node) == (1, 8)
    assert [ranks(config, model) for model in ("actor", "critic", "ref")] == [8, 8, 8]
    assert (config.vllm.num_engines, config.vllm.tensor_parallel_size) == (1, 1)
    assert config.vllm.gpu_memory_utilization == 0.95
    assert config.ds.zero_stage == 2
    assert config.ds.adam_offload is (flags == ("--adam_offload",))
    assert config.train.colocate_all is ("--colocate_all_models" in flags)
    assert config.train.colocate_actor_ref is ("--colocate_actor_ref" in flags)
    assert notes_of(*flags) == []


def test_a_reference_rests_in_the_memory_of_the_cpu() -> None:
    config = config_of(*EIGHT, "--ref_reward_offload")
    assert (config.ref.offload, config.reward.offload) == (True, False)
    assert notes_of(*EIGHT, "--ref_reward_offload") == []
    both, notes = translated_config([*WITH_MODEL, "--actor_num_gpus_per_node", "8", "--ref_reward_offload"])
    validate(both)
    assert (both.ref.offload, both.reward.offload, notes) == (True, True, [])
    config = config_of(*EIGHT, "--ref.offload")
    assert (config.cluster.enable, config.ref.offload) == (True, True)
    assert notes_of(*EIGHT, "--ref.offload") == []
    assert not config_of(*EIGHT, "--ref.offload", "--init_kl_coef", "0").ref.offload


WITH_MODEL = (*MODULE, "--pretrain", "m", "--prompt_data", "d.jsonl", "--reward_pretrain", "r")


def test_a_reward_model_is_loaded() -> None:
    translation = translate([*WITH_MODEL, "--reward_clip_range", "-5", "5"])
    config = structure_config(translation.settings)
    validate(config)
    assert (config.reward.model_name_or_path, config.reward.timeout) == ("r", 180)
    assert (config.cluster.enable, translation.notes) == (False, [])
    first = translate([*WITH_MODEL[:-1], "r1,r2", "--normalize_reward"])
    assert first.settings["reward"]["model_name_or_path"] == "r1"
    alone, normalised = first.notes
    assert first.settings["reward"]["normalize"] == "model"
    assert normalised.endswith("--normalize_reward: rewards alone are scaled, in OpenRLHF the critic's values too")
    without_critic = translate([*WITH_MODEL, "--normalize_reward", *GROUP, "--advantage_estimator", "rloo"])
    assert without_critic.settings["reward"]["normalize"] == "model"
    assert not any("normalize_reward" in note for note in without_critic.notes)
    assert alone == "not identical: --reward_pretrain r1,r2: r1 alone, for a run has one reward model"


@pytest.mark.parametrize("flag", ["--reward_num_nodes 1", "--reward_num_gpus_per_node 4", "--colocate_critic_reward"])
def test_the_processes_of_a_reward_model(flag: str) -> None:
    config, notes = translated_config([*WITH_MODEL, *flag.split()])
    validate(config)
    assert config.cluster.enable
    assert ranks(config, "reward") == (4 if "4" in flag else 8)
    assert config.train.colocate_critic_reward is (flag == "--colocate_critic_reward")
    assert notes == []
    without = translate([*MODULE, *LEAST, *flag.split()])
    assert without.notes == [f"not honoured: {flag}: no reward model is loaded, in OpenRLHF neither"]


def test_without_a_critic_the_reward_model_shares_with_none() -> None:
    config, notes = translated_config([*WITH_MODEL, "--colocate_critic_reward", "--advantage_estimator", "reinforce"])
    validate(config)
    assert (config.cluster.enable, config.train.colocate_critic_reward) == (True, False)
    assert notes == ["not honoured: --colocate_critic_reward: reinforce has no critic, in OpenRLHF neither"]


def test_without_such_a_flag_everything_is_in_one_process() -> None:
    for flags in ((), ("--reward_num_nodes", "2"), ("--colocate_all_models", "false"), ("--packing_samples",)):
        config = config_of(*flags)
        assert (config.cluster.enable, config.rollout.engine) == (False, "embedded")


def test_processes_of_each_model() -> None:
    flags = ("--actor_num_nodes", "2", "--ref_num_gpus_per_node", "2", "--critic_num_gpus_per_node", "4")
    config = config_of(*flags, "--vllm_num_engines", "2", "--vllm_tensor_parallel_size", "4", "--zero_stage", "3")
    assert [ranks(config, model) for model in ("actor", "critic", "ref")] == [16, 4, 2]
    assert (config.vllm.num_engines, config.vllm.tensor_parallel_size, config.ds.zero_stage) == (2, 4, 3)
    assert notes_of(*flags) == []
    config = config_of(*flags, "--init_kl_coef", "0", "--advantage_estimator", "reinforce")
    assert (config.critic, config.ref) == (config_of("--advantage_estimator", "reinforce").critic, RLConfig().ref)
    notes = notes_of(*flags, "--init_kl_coef", "0", "--advantage_estimator", "reinforce")
    assert [note.split(": ")[1] for note in notes] == ["--critic_num_gpus_per_node 4", "--ref_num_gpus_per_node 2"]


def test_models_and_engines_on_the_same_gpus() -> None:
    flags = (*EIGHT, "--colocate_all_models", "--vllm_num_engines", "4", "--vllm_tensor_parallel_size", "2")
    config = config_of(*flags)
    assert config.train.colocate_all
    assert (config.vllm.num_engines, config.vllm.tensor_parallel_size) == (4, 2)
    validate(config)
    (sleeping,) = notes_of(*flags)
    assert sleeping.startswith("not identical: --colocate_all_models: engines sleep")
    assert notes_of(*flags, "--vllm_enable_sleep") == []
    assert notes_of(*flags, "--vllm_gpu_memory_utilization", "0.5") == [sleeping]  # of the whole GPU, as there
    assert config_of(*flags, "--vllm_gpu_memory_utilization", "0.5").vllm.gpu_memory_utilization == 0.5


def test_optimizers_sleep_where_models_and_engines_share_gpus() -> None:
    together = (*EIGHT, "--colocate_all_models", "--vllm_enable_sleep")
    assert not config_of(*together).train.optimizer_sleeps
    assert config_of(*together, "--deepspeed_enable_sleep").train.optimizer_sleeps
    assert notes_of(*together, "--deepspeed_enable_sleep") == []
    validate(config_of(*together, "--deepspeed_enable_sleep"))
    for flags in ((*EIGHT, "--ds.enable_sleep"), (*together, "--ds.enable_sleep", "--adam_offload")):
        assert not config_of(*flags).train.optimizer_sleeps
        (note,) = notes_of(*flags)
        assert note.startswith("not honoured: --ds.enable_sleep: ")


@pytest.mark.parametrize(("flags", "backend"), [((), "auto"), (("nccl",), "auto"), (("gloo",), "shared_memory")])
def test_the_way_of_weights(flags: tuple[str, ...], backend: str) -> None:
    given = ("--vllm_sync_backend", *flags) if flags else ()
    assert config_of(*EIGHT, *given).vllm.sync_backend == backend
    assert len(notes_of(*EIGHT, *given)) == (flags == ("gloo",))
    (note,) = notes_of(*EIGHT, "--vllm_sync_with_ray")
    assert note.startswith("not honoured: --vllm_sync_with_ray: ")
    (note,) = notes_of(*EIGHT, "--vllm_sync_backend", "ucc")
    assert note.startswith("not honoured: --vllm_sync_backend ucc: ")


def test_engines_of_an_asynchronous_run_share_no_gpu() -> None:
    flags = (*EIGHT, "--colocate_all_models", "--async_train")
    train = config_of(*flags).train
    assert (train.colocate_all, train.colocate_actor_ref) == (False, True)
    assert any("with --async_train actor and reference share GPUs" in note for note in notes_of(*flags))


def test_flags_of_lora_translate() -> None:
    reinforce = ("--advantage_estimator", "reinforce")
    config = config_of("--lora_rank", "8", *reinforce)
    assert config.cluster.enable
    assert (config.actor.lora.rank, config.actor.lora.alpha) == (8, 16)  # OpenRLHF's default
    assert config.actor.lora.target_modules == RLConfig().actor.lora.target_modules
    chosen = ("--lora_rank", "8", "--lora_alpha", "32", "--target_modules", "q_proj", "v_proj")
    lora = config_of(*chosen).actor.lora
    assert (lora.rank, lora.alpha, lora.target_modules, lora.dropout) == (8, 32, ("q_proj", "v_proj"), 0.0)
    assert config_of("--lora_rank", "8", "--lora_dropout", "0.1").actor.lora.dropout == 0.1
    assert notes_of("--lora_rank", "8", "--lora_dropout", "0.1", *reinforce) == []
    assert notes_of(*chosen, *reinforce) == []
    assert not config_of(*chosen, *reinforce).critic.lora.rank
    critic = config_of(*chosen, "--lora_dropout", "0.1").critic.lora
    assert (critic.rank, critic.alpha, critic.target_modules, critic.dropout) == (8, 32, ("q_proj", "v_proj"), 0.1)
    assert notes_of(*chosen) == []


@pytest.mark.parametrize(
    ("models", "others"),
    [
        ((*MODULE, *LEAST, "--advantage_estimator", "reinforce"), ""),
        ((*MODULE, *LEAST), "critic"),
        (WITH_MODEL, "critic and reward model"),
    ],
)
def test_weights_in_four_bits(models: tuple[str, ...], others: str) -> None:
    command = [*models, "--lora_rank", "8"]
    assert not translated_config(command)[0].actor.lora.load_in_4bit
    command.append("--load_in_4bit")
    assert translated_config(command)[0].actor.lora.load_in_4bit
    notes = [note for note in translate(command).notes if "4bit" in note]
    assert notes == ([f"not identical: --load_in_4bit: of the actor, not of the {others}"] if others else [])


def test_sequences_over_several_processes() -> None:
    config = config_of("--ring_attn_size", "2")
    assert (config.cluster.enable, config.ds.sequence_parallel_size) == (True, 2)
    assert notes_of("--ring_attn_size", "2") == []
    assert notes_of("--ring_attn_size", "2", "--ring_head_stride", "2") == [
        "not honoured: --ring_head_stride 2: attention is divided by heads, without a ring"
    ]
    assert not config_of("--ring_attn_size", "1", "--lora_rank", "0").cluster.enable


def test_layers_over_several_processes() -> None:
    config = config_of("--ds_tensor_parallel_size", "2")
    assert (config.cluster.enable, config.ds.tensor_parallel_size) == (True, 2)
    assert notes_of("--ds_tensor_parallel_size", "2") == []
    assert not config_of("--ds_tensor_parallel_size", "1").cluster.enable


def test_a_submitted_job_joins_the_cluster_that_runs() -> None:
    submit = ("ray", "job", "submit", "--address=http://127.0.0.1:8265", "--", *MODULE)
    assert translated_config([*submit, *LEAST, *EIGHT])[0].cluster.address == "auto"
    assert translated_config([*submit, *LEAST])[0].cluster == RLConfig().cluster
    assert config_of(*EIGHT).cluster.address is None


# The command.


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


# Checkpoints.


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), {"save_steps": -1, "state_steps": -1, "state_minutes": 30.0, "state_dir": None, "resume": "never"}),
        (("--save_steps", "20"), {"save_steps": -1, "state_steps": 20}),
        (("--save_steps", "20", "--save_hf_ckpt"), {"save_steps": 20, "state_steps": 20}),
        (
            ("--save_steps", "20", "--save_hf_ckpt", "--disable_ds_ckpt"),
            {"save_steps": 20, "state_steps": -1, "state_minutes": None},
        ),
        (("--load_checkpoint",), {"resume": "auto"}),
        (("--save_path", "out", "--ckpt_path", "scratch"), {"output_dir": "out", "state_dir": "scratch"}),
    ],
)
def test_checkpoints_go_where_they_went_and_runs_continue(flags: tuple[str, ...], expected: dict[str, Any]) -> None:
    ckpt = config_of(*flags).ckpt
    assert {name: getattr(ckpt, name) for name in expected} == expected
    assert not [note for note in notes_of(*flags) if note.startswith("not honoured")]


def test_the_critic_is_saved_as_asked() -> None:
    (note,) = notes_of("--advantage_estimator", "gae", "--save_value_network")
    assert note.startswith("not identical: --save_value_network: the critic is saved below the model")
