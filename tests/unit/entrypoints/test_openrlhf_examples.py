"""OpenRLHF's trainers over examples: their command lines as settings of `rollgrad train sft`, `train dpo`, ..."""

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollgrad.application.settings.rules.generation import generation_errors, scoring_errors
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints import offline
from rollgrad.entrypoints.cli.generation import GenerateArguments, ScoreArguments
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.merge_lora import MergeLoraArguments
from rollgrad.entrypoints.cli.offline import TRAINERS
from rollgrad.entrypoints.cli.parsing import parse, parse_run
from rollgrad.entrypoints.cli.translated import problems
from rollgrad.entrypoints.config_io import setting_names
from rollgrad.entrypoints.openrlhf import examples
from rollgrad.entrypoints.openrlhf.command import translate_command
from rollgrad.entrypoints.translation.draft import TranslatedRun
from tests.translated_settings import holds, settings_of

LEAST = ("--pretrain", "m", "--dataset", "d.jsonl")


def translated(module: str, *flags: str, launcher: tuple[str, ...] = ("deepspeed", "--module")) -> TranslatedRun:
    """Settings of a command that lacks nothing; it must be one that can be trained."""
    result = translate_command([*launcher, f"openrlhf.cli.{module}", *LEAST, *flags])
    assert isinstance(result, TranslatedRun)
    name = result.command.removeprefix("train ")
    assert isinstance(result.run, TRAINERS[name].run)
    assert TRAINERS[name].errors(result.run) == []
    return result


def settings(module: str, *flags: str, launcher: tuple[str, ...] = ("deepspeed", "--module")) -> dict[str, Any]:
    return settings_of(translated(module, *flags, launcher=launcher))


# The tables.


@pytest.mark.parametrize("module", examples.TRAINERS)
def test_every_setting_named_in_a_table_exists(module: str) -> None:
    trainer = examples.TRAINERS[module]
    assert {flag.to for flag in trainer.program.flags.values() if flag.to} <= set(setting_names(trainer.run))
    assert {name for names in trainer.program.names.values() for name in names} == set(trainer.program.flags)


@pytest.mark.parametrize("module", examples.TRAINERS)
def test_every_flag_is_honoured_or_the_reason_is_said(module: str) -> None:
    """A flag of its own, given with an unusual value, changes the settings or is on a line of the notes, unless every
    run does what it asks for."""
    program = examples.TRAINERS[module].program
    words = {"SWITCH": (), "INTEGER": ("7",), "NUMBER": ("0.25",), "TEXT": ("text {}",), "PAIR": ("0.5", "0.6")}
    words |= {"WORDS": ("q_proj",), "PROBABILITIES": ("0.5,0.5",)}
    unusual = {"ds.param_dtype": ("fp16",), "actor.optim": ("muon",), "loss_type": ("logexp",)}
    unusual |= {"reward_tokens": ("good", "bad")}
    beside = {
        "eval.": ("--eval_dataset", "e"),
        "data.dataset_probs": ("--dataset", "a,b"),
        "ds.l": ("--lora_rank", "3"),
        "actor.muon.": ("--optim", "muon"),
    }

    @cache
    def run(*flags: str) -> TranslatedRun:
        words = ("deepspeed", "--num_gpus", "2", "--module", f"openrlhf.cli.{module}", *LEAST, *flags)
        result = translate_command(words)
        assert isinstance(result, TranslatedRun)
        return result

    silent = []
    for spelled, (name, *_) in program.names.items():
        if program.flags[name].always:
            continue
        value = unusual.get(name, words[program.flags[name].kind.name])
        base = next((flags for prefix, flags in beside.items() if name.startswith(prefix)), ())
        given = run(*base, f"--{spelled}", *value)
        if given.run == run(*base).run and not any(f"--{spelled}" in note for note in given.notes):
            silent.append(spelled)
    assert silent == []


# Supervised fine-tuning.


def test_the_defaults_of_openrlhf_count() -> None:
    assert holds(
        settings("train_sft"),
        {
            "train.num_epochs": 2,
            "train.batch_size": 128,
            "actor.adam.lr": 5e-6,
            "actor.lr_scheduler": "cosine_with_min_lr",
            "actor.lr_warmup_ratio": 0.03,
            "data.max_tokens": 2048,
            "data.overlong": "cut",
            "data.input_key": "input",
            "data.input_template": "User: {}\nAssistant: ",
            "data.apply_chat_template": False,
            "data.train_on": "last",
        },
    )
    assert holds(
        settings("train_dpo"),
        {
            "train.num_epochs": 1,
            "actor.adam.lr": 1e-5,
            "data.max_tokens": 512,
            "dpo.loss": ("sigmoid",),
            "dpo.beta": 0.1,
        },
    )


@pytest.mark.parametrize("module", ["train_sft", "train_dpo"])
def test_flat_and_dotted_flags_are_one_command(module: str) -> None:
    flat = [
        *(
            "--save_path",
            "out",
            "--train_batch_size",
            "64",
            "--max_epochs",
            "3",
            "--learning_rate",
            "1e-6",
            "--l2",
            "0.1",
        ),
        *("--bf16", "--max_len", "4096", "--max_samples", "9", "--apply_chat_template", "--gradient_checkpointing"),
        *("--lora_rank", "8", "--target_modules", "q_proj", "v_proj", "--eval_dataset", "e.jsonl", "--eval_steps", "5"),
        *("--load_checkpoint", "--dataset_split", "other", "--lr_warmup_ratio", "0.1", "--seed", "3"),
    ]
    dotted = [
        *("--ckpt.output_dir", "out", "--train.batch_size", "64", "--train.max_epochs", "3", "--adam.lr", "1e-6"),
        *(
            "--adam.weight_decay",
            "0.1",
            "--ds.param_dtype",
            "bf16",
            "--data.max_len",
            "4096",
            "--data.max_samples",
            "9",
        ),
        *("--data.apply_chat_template", "--model.gradient_checkpointing_enable", "--ds.lora.rank", "8"),
        *("--ds.lora.target_modules", "q_proj", "v_proj", "--eval.dataset", "e.jsonl", "--eval.steps", "5"),
        *("--ckpt.load_enable", "--data.dataset_split", "other", "--lr_warmup_ratio", "0.1", "--train.seed", "3"),
    ]
    found = settings(module, *flat)
    assert found == settings(module, *dotted)
    assert holds(
        found,
        {
            "ckpt.output_dir": "out",
            "ckpt.resume": "auto",
            "actor.adam.weight_decay": 0.1,
            "actor.dtype": "bfloat16",
            "actor.lora.alpha": 16,
            "actor.lora.target_modules": ("q_proj", "v_proj"),
            "data.split": "other",
            "data.max_samples": 9,
            "eval.dataset": "e.jsonl",
            "eval.steps": 5,
            "train.seed": 3,
        },
    )


def test_conversations_are_trained_whole_or_at_their_end() -> None:
    chat = ("--input_key", "messages", "--apply_chat_template")
    assert settings("train_sft", *chat)["data.train_on"] == "last"
    assert settings("train_sft", *chat, "--multiturn")["data.train_on"] == "assistant"
    answered = settings("train_sft", *chat, "--output_key", "reply")
    assert holds(answered, {"data.output_key": "reply", "data.input_template": None, "data.train_on": "assistant"})


def test_continued_pre_training_learns_all_of_a_column() -> None:
    result = settings("train_sft", "--pretrain_mode", "--input_key", "document")
    assert holds(result, {"data.format": "text", "data.input_key": "document", "data.input_template": None})


# Preference pairs.


def test_the_losses_of_pairs() -> None:
    loss = lambda *flags: settings("train_dpo", *flags)  # noqa: E731
    assert holds(loss("--label_smoothing", "0.1"), {"dpo.loss": ("sigmoid",), "dpo.label_smoothing": 0.1})
    assert holds(loss("--ipo", "--label_smoothing", "0.1"), {"dpo.loss": ("ipo_sum",), "dpo.label_smoothing": 0.0})
    mixed = loss("--nll_loss_coef", "0.2", "--ref_pretrain", "ref", "--beta", "0.3")
    assert holds(mixed, {"dpo.loss": ("sigmoid", "sft"), "dpo.loss_weights": (1.0, 0.2), "dpo.beta": 0.3})
    assert mixed["ref.model_name_or_path"] == "ref"
    keys = loss("--prompt_key", "question", "--chosen_key", "better", "--rejected_key", "worse")
    assert holds(keys, {"data.prompt_key": "question", "data.chosen_key": "better", "data.rejected_key": "worse"})


# Reward models and labelled replies.


def test_reward_models_learn_from_pairs() -> None:
    found = settings("train_rm", "--margin_loss", "--loss", "logexp", "--max_len", "1024", "--compute_fp32_loss")
    assert holds(
        found,
        {
            "rm.margin": True,
            "actor.adam.lr": 9e-6,
            "data.max_tokens": 1024,
            "data.overlong": "drop",
            "data.chosen_key": "chosen",
        },
    )
    assert settings("train_rm", "--eval_dataset", "e.jsonl")["eval.split"] == "train"
    without = settings("train_rm")
    assert without["eval.dataset"] == without["data.dataset"]
    assert without["eval.max_samples"] == 512
    assert any("for --normalize_reward, are of 512 pairs" in note for note in translated("train_rm").notes)
    with pytest.raises(ConfigurationError, match="hinge is none of sigmoid, logexp"):
        translated("train_rm", "--model.loss_type", "hinge")


def test_labelled_replies() -> None:
    keys = ("--input_key", "instruction", "--output_key", "response", "--label_key", "score")
    found = settings("train_kto", *keys, "--desirable_loss_weight", "1.5")
    assert holds(
        found,
        {
            "data.prompt_key": "instruction",
            "data.completion_key": "response",
            "data.label_key": "score",
            "kto.beta": 0.01,
            "kto.desirable_weight": 1.5,
            "kto.undesirable_weight": 1.0,
        },
    )


def test_labelled_steps() -> None:
    flags = ("--input_key", "problem", "--placeholder_token", "ки", "--reward_tokens", "good", "bad")
    expected = {
        "data.steps_key": "problem",
        "data.labels_key": "label",
        "data.placeholder": "ки",
        "prm.reward_tokens": ("good", "bad"),
        "actor.adam.lr": 1e-6,
    }
    assert holds(settings("train_prm", *flags), expected)
    with pytest.raises(ConfigurationError, match="--reward_tokens has 3 tokens"):
        translated("train_prm", *flags, "neutral")


def test_distillation() -> None:
    flags = ("--teacher_model", "big", "--input_key", "question", "--output_key", "response", "--teacher_offload")
    expected = {"teacher.model_name_or_path": "big", "kd.weight": 0.4, "kd.beta": 0.0, "actor.adam.lr": 5e-6}
    assert holds(settings("train_kd", *flags), expected)
    assert settings("train_kd", *flags, "--kd_coef", "0.7")["kd.weight"] == 0.7


# Processes.


@pytest.mark.parametrize(
    ("launcher", "machines", "processes"),
    [
        (("deepspeed", "--num_gpus", "4", "--module"), 1, 4),
        (("deepspeed", "--num_nodes=2", "--num_gpus=8", "--module"), 2, 8),
        (("torchrun", "--standalone", "--nproc-per-node", "2", "-m"), 1, 2),
    ],
)
def test_the_launcher_says_how_many_processes(launcher: tuple[str, ...], machines: int, processes: int) -> None:
    found = settings("train_sft", "--zero_stage", "3", "--adam_offload", launcher=launcher)
    assert holds(
        found,
        {
            "cluster.enable": True,
            "actor.num_nodes": machines,
            "actor.num_gpus_per_node": processes,
            "ds.zero_stage": 3,
            "ds.adam_offload": True,
        },
    )


def test_without_a_number_there_is_one_process_and_a_note() -> None:
    result = translated("train_sft", "--zero_stage", "3")
    assert not result.run.cluster.enable
    assert [note for note in result.notes if "--num_gpus" in note or "--zero_stage 3" in note] == [
        "not honoured: --zero_stage 3: a single process divides nothing",
        "not identical: one process trains, in OpenRLHF one on every GPU of the machine: write deepspeed --num_gpus N "
        "for N",
    ]
    assert settings("train_sft", "--ring_attn_size", "2")["actor.num_gpus_per_node"] == 2


# Whole commands, with the flags of OpenRLHF's example scripts that start a trainer, and of some of older releases.

SCRIPTS = dict(
    script.removeprefix("# ").strip().split("\n", 1)
    for script in Path(__file__).with_name("openrlhf_scripts.txt").read_text().split("\n\n")
)


def test_there_are_twelve_scripts_of_today() -> None:
    assert len([name for name in SCRIPTS if not name.endswith(", flat")]) == 12


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_translates_to_a_run_that_may_begin(name: str) -> None:
    words = SCRIPTS[name].split()
    result = translate_command(words)
    assert isinstance(result, TranslatedRun)
    assert problems(result) == []
    assert [note for note in result.notes if not note.startswith(("not honoured: --", "not identical: "))] == []
    assert (
        result.run.ckpt.output_dir
        == words[words.index("--ckpt.output_dir" if "--ckpt.output_dir" in words else "--save_path") + 1]
    )


def test_the_script_with_images_keeps_what_it_says_of_them() -> None:
    result = translate_command(SCRIPTS["Images"].split())
    assert isinstance(result.run, RLConfig)
    assert (result.run.data.image_key, result.run.data.max_images_per_prompt) == ("images", 1)
    assert result.run.actor.freeze_visual_encoder
    assert not [note for note in result.notes if "image" in note or "visual" in note]


# Sampling and judging files.


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[str], str]:
    """The command that a program becomes, and the notes."""
    assert main(["openrlhf", "python", "-m", *words]) == 0
    output = capsys.readouterr()
    return shlex.split(output.out), output.err


def test_sampling_into_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--eval_task", "generate_vllm", "--pretrain", "m", "--dataset", "a,b", "--dataset_probs", "0.5,0.5"]
    flags += ["--input_key", "context_messages", "--apply_chat_template", "--best_of_n", "8", "--tp_size", "4"]
    flags += ["--output_path", "out.jsonl", "--iter", "2", "--bf16", "--greedy_sampling"]
    words, notes = printed(capsys, "openrlhf.cli.batch_inference", *flags)
    assert words[:2] == ["rollgrad", "generate"]
    parsed, config, problems = parse_run(GenerateArguments, RLConfig, "generate", words[2:])
    assert problems == generation_errors(config) == []
    assert parsed.output == Path("out.jsonl")
    assert (config.rollout.n_samples_per_prompt, config.rollout.top_k, config.rollout.engine) == (8, 1, "vllm")
    assert (config.data.prompt_probs, config.data.input_key, config.train.seed) == (
        (0.5, 0.5),
        "context_messages",
        1234,
    )
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.actor.dtype) == (
        1024,
        1024,
        "bfloat16",
    )
    assert config.vllm.tensor_parallel_size == 4
    assert "not honoured: --iter 2: a loop samples, judges, selects and learns in one command: rollgrad loop" in notes


def test_judging_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--eval_task", "rm", "--pretrain", "rm", "--dataset", "in.jsonl", "--output_path", "out.jsonl"]
    words, notes = printed(capsys, "openrlhf.cli.batch_inference", *flags, "--post_processor", "rs", "--top_p", "0.9")
    assert words[:2] == ["rollgrad", "score"]
    parsed, config, problems = parse_run(ScoreArguments, RLConfig, "score", words[2:])
    assert problems == scoring_errors(config) == []
    assert (parsed.input, parsed.output) == (Path("in.jsonl"), Path("out.jsonl"))
    assert (config.reward.model_name_or_path, config.reward.normalize) == ("rm", "model")
    assert "rollgrad loop rs" in notes
    assert "not honoured: --top_p 0.9: --eval_task rm samples nothing" in notes
    assert main(["openrlhf", "openrlhf.cli.batch_inference", "--eval_task", "other"]) == 2


# Merging adapters.


@pytest.mark.parametrize("dtype", [("--bf16",), ("--param_dtype", "bf16"), ("--ds.param_dtype", "bf16")])
def test_merging_adapters(dtype: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model_path", "base", "--lora_path", "my adapters", "--output_path", "out", "--is_rm", *dtype]
    assert main(["openrlhf", "python", "-m", "openrlhf.cli.lora_combiner", *flags]) == 0
    output = capsys.readouterr()
    words = shlex.split(output.out)
    assert words[:2] == ["rollgrad", "merge-lora"]
    found = parse(MergeLoraArguments(), "merge-lora", words[2:])
    assert found == MergeLoraArguments(
        model="base", adapter="my adapters", output=Path("out"), reward_model=True, dtype=DType.BFLOAT16
    )
    assert main(["openrlhf", "openrlhf.cli.lora_combiner", "--run", "--lora_path", "./nowhere"]) == 2
    assert "error: --output is not set" in capsys.readouterr().err


# The command.


def test_it_prints_settings_that_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["openrlhf", "deepspeed", "--module", "openrlhf.cli.train_dpo", *LEAST, "--ipo", "--flash_attn"]
    assert main(argv) == 0
    output = capsys.readouterr()
    assert output.out.startswith("# rollgrad train dpo --config FILE\n")
    assert "not honoured: --flash_attn" in output.err
    path = tmp_path / "run.yaml"
    path.write_text(output.out)
    assert main(["train", "dpo", "--config", str(path), "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["dpo"]["loss"], printed["data"]["dataset"]) == (["ipo_sum"], "d.jsonl")


def test_it_says_all_that_a_run_would_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["openrlhf", "deepspeed", "--module", "openrlhf.cli.train_sft", "--max_len", "9"]) == 0
    refusals = [line for line in capsys.readouterr().err.splitlines() if "train sft will refuse this: " in line]
    assert len(refusals) == 2


def test_run_trains(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = []

    def begin(run: Any) -> Any:
        begun.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(offline, "train_sft", begin)
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    argv = ["openrlhf.cli.train_sft", "--pretrain", str(tiny_model_dir), "--dataset", str(data)]
    assert main(["openrlhf", "--run", *argv]) == 130
    assert [run.data.dataset for run in begun] == [str(data)]
    assert main(["openrlhf", *argv[:3], "--run"]) == 2
    assert "error: No examples are set" in capsys.readouterr().err
