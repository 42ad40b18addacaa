"""TRL's command lines as settings of `rollgrad train sft` and the others."""

import re
import subprocess
import sys
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from rollgrad.application.settings.dpo import DPORun
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.translated import problems
from rollgrad.entrypoints.config_io import setting_names
from rollgrad.entrypoints.names.names_of_trl_commands import COMMANDS, WITHOUT_DROPOUT
from rollgrad.entrypoints.translation.draft import TranslatedRun
from rollgrad.entrypoints.trl.command import RUNS, translate_command
from tests.dataclass_fields import fields

LEAST = ("--model_name_or_path", "m", "--dataset_name", "d.jsonl")
BESIDE = {
    **dict.fromkeys(("grpo", "rloo"), ("--reward_funcs", "accuracy_reward")),
    "distillation": ("--teacher_model_name_or_path", "t"),
}
"""Flags that a command needs besides."""


def translated(command: str, *flags: str) -> TranslatedRun:
    """Settings of a command that lacks nothing; it must be one that can be trained."""
    result = translate_command([command, *LEAST, *BESIDE.get(command, ()), *flags])
    assert problems(result) == []
    return result


def settings(command: str, *flags: str) -> dict[str, Any]:
    run = translated(command, *flags).run
    return {name: attrgetter(name)(run) for name in setting_names(type(run))}


def holds(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return {name: found[name] for name in expected} == expected


# The tables.


def test_metrics_that_the_table_names_are_measured() -> None:
    text = (Path(__file__).parents[3] / "docs" / "migration.md").read_text()
    table = text.partition("Metrics of TRL are these")[2].partition("have no counterpart")[0]
    rows = re.findall(r"^\| (`[^|]*) of `(\w+)` \| ([^|]+) \|$", table, re.MULTILINE)
    assert {command for _, command, _ in rows} == {"dpo", "kto", "reward", "sft"}
    for theirs, command, ours in rows:
        names = re.findall(r"`(\w+)`", ours)
        run = RUNS[command][1]()
        assert not isinstance(run, RLConfig)
        assert len(names) == len(re.findall(r"`[\w/]+`", theirs)), (theirs, ours)
        assert set(names) <= set(run.evaluated()), command


CONFIGS = {command: command.upper() for command in COMMANDS} | {"reward": "Reward", "distillation": "Distillation"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_trl_is_translated_or_named_as_not_honoured(command: str) -> None:
    flags = {
        *fields("transformers", "transformers/training_args.py", "TrainingArguments"),
        *fields("trl", "trl/trainer/base_config.py", "_BaseConfig"),
        *fields("trl", f"trl/trainer/{command}_config.py", f"{CONFIGS[command]}Config"),
        *fields("trl", "trl/trainer/model_config.py", "ModelConfig"),
        *fields("trl", "trl/scripts/utils.py", "ScriptArguments"),
        *fields("trl", "trl/scripts/utils.py", "DatasetMixtureConfig"),
        *(
            fields("trl", f"trl/scripts/{command}.py", f"{command.upper()}ScriptArguments")
            if command in ("grpo", "rloo")
            else ()
        ),
    }
    assert len(flags) > 140
    assert sorted(flags - COMMANDS[command].names.keys()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_named_in_a_table_exists(command: str) -> None:
    targets = {flag.to for flag in COMMANDS[command].flags.values() if flag.to}
    assert targets <= set(setting_names(RUNS[command][1]))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_honoured_or_the_reason_is_said(command: str) -> None:
    """A flag of its own, given with an unusual value, changes the settings or is on a line of the notes."""
    words = {"SWITCH": (), "INTEGER": ("4",), "NUMBER": ("0.25",), "TEXT": ("text",), "WORDS": ("word",)}
    words |= {"PROBABILITIES": ("0.5",), "PAIR": ("-1", "1")}
    unusual = {
        "dtype": ("float16",),
        "gradient_checkpointing": ("False",),
        "use_bias_correction_kl": ("False",),
        "loss_type": {"dpo": ("ipo",), "kto": ("apo_zero_unpaired",), "sft": ("dft",)}.get(command, ("grpo",)),
        "importance_sampling_level": ("sequence",),
        "scale_rewards": ("none",),
        "vllm_importance_sampling_correction": ("False",),
        "vllm_importance_sampling_mode": ("token_truncate",),
        "f_divergence_type": ("js_divergence",),
        "vllm_mode": ("server",),
        "eval_strategy": ("steps",),
        "eval_steps": ("20",),
        "save_strategy": ("no",),
        "save_steps": ("20",),
        "disable_dropout": ("False",) if command in WITHOUT_DROPOUT else (),
        **dict.fromkeys(("lr_scheduler_kwargs", "chat_template_kwargs"), ("{a: 1}",)),
    }
    beside = {
        "lora_": ("--use_peft",),
        "disable_dropout": ("--use_peft",),
        "load_in_4bit": ("--use_peft",),
        "bnb": ("--use_peft",),
        "eval_steps": ("--eval_strategy", "steps"),
        "dataset_test": ("--eval_strategy", "steps"),
        "vllm_": ("--use_vllm",),
        "use_bias": ("--beta", "0.1"),
        "f_alpha": ("--f_divergence_type", "alpha_divergence"),
        "label_smoothing": ("--loss_type", "robust") if command == "dpo" else (),
    }
    unusual |= {"per_device_train_batch_size": ("16",), "dataset_text_field": ("document",)}
    unusual |= {"num_generations": ("4",), "steps_per_generation": ("3",), "generation_batch_size": ("16",)}
    unusual["reward_weights"] = ("2",)

    @cache
    def run(*flags: str) -> TranslatedRun:
        return translate_command([command, *LEAST, *BESIDE.get(command, ()), *flags])

    silent = []
    for name, flag in COMMANDS[command].flags.items():
        value = unusual.get(name, words[flag.kind.name])
        base = next((flags for prefix, flags in beside.items() if name.startswith(prefix)), ())
        given = run(*base, f"--{name}", *value)
        if given == run(*base):
            silent.append(name)
    assert silent == []


# What they mean.


@pytest.mark.parametrize(
    ("command", "lr"),
    (dict.fromkeys(COMMANDS, 1e-6) | {"sft": 2e-5, "reward": 1e-4}).items(),
)
def test_the_defaults_of_trl_count(command: str, lr: float) -> None:
    expected = {
        "actor.adam.lr": lr,
        "actor.adam.betas": (0.9, 0.999),
        "actor.lr_scheduler": "linear",
        "actor.min_lr_ratio": 0.0,
        "actor.lr_warmup_ratio": 0.0,
        "train.batch_size": 8,
        "ckpt.output_dir": "trainer_output",
        "ckpt.save_steps": 500,
        "actor.dtype": "auto",
        "actor.gradient_checkpointing": "full",
    }
    if RUNS[command][1] is not RLConfig:
        expected |= {"train.num_epochs": 3, "data.max_tokens": 1024}
    assert holds(settings(command), expected)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_model_is_uploaded_to_the_repository_that_trl_takes(command: str) -> None:
    named = translated(command, "--push_to_hub", "--hub_model_id", "me/name", "--hub_strategy", "end")
    assert named.run.ckpt.push_to_hub == "me/name"
    (note,) = (note for note in named.notes if "hub" in note)
    assert note.startswith("not identical: --push_to_hub: the model is uploaded once, when the run has ended")
    for flags, said in (
        (("--push_to_hub",), "not honoured: --push_to_hub: name the repository with its owner: --hub_model_id me/name"),
        (("--hub_model_id", "me/name"), "not honoured: --hub_model_id me/name: nothing is uploaded without"),
    ):
        without = translated(command, *flags)
        assert without.run.ckpt.push_to_hub is None
        assert any(note.startswith(said) for note in without.notes)


def test_the_batch_is_that_of_all_processes() -> None:
    flags = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "3", "--num_processes", "2")
    assert holds(
        settings("dpo", *flags), {"train.batch_size": 24, "cluster.enable": True, "actor.num_gpus_per_node": 2}
    )


@pytest.mark.parametrize(
    ("flags", "share", "noted"),
    [
        (("--warmup_steps", "0.1"), 0.1, 0),
        (("--warmup_ratio", "0.2"), 0.2, 0),
        (("--warmup_steps", "10", "--max_steps", "200"), 0.05, 0),
        (("--warmup_steps", "10"), 0.0, 1),
        (("--warmup_steps", "0.1", "--lr_scheduler_type", "constant"), 0.0, 1),
    ],
)
def test_flags_of_warm_up_translate(flags: tuple[str, ...], share: float, noted: int) -> None:
    result = translated("sft", *flags)
    assert result.run.actor.lr_warmup_ratio == share
    assert sum("--warmup" in note for note in result.notes) == noted


@pytest.mark.parametrize(
    ("kind", "given", "floor"),
    [
        ("cosine_with_min_lr", '{"min_lr_rate": 0.2}', 0.2),
        ("cosine_with_min_lr", "min_lr: 1e-6", 0.05),  # of 2e-5
        ("warmup_stable_decay", '{"min_lr_ratio": 0.3}', 0.3),
    ],
)
def test_the_floor_of_a_schedule_translates(kind: str, given: str, floor: float) -> None:
    result = translated("sft", "--lr_scheduler_type", kind, "--lr_scheduler_kwargs", given)
    assert result.run.actor.min_lr_ratio == pytest.approx(floor)
    assert not any("--lr_scheduler_kwargs" in note for note in result.notes)
    for other in ('{"min_lr_rate": "low"}', "0.1", "{"):
        with pytest.raises(ConfigurationError, match="--lr_scheduler_kwargs"):
            translated("sft", "--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs", other)


def test_flags_of_templates_translate() -> None:
    flags = ("--chat_template_kwargs", '{"enable_thinking": false}', "--chat_template", "{{ messages }}")
    expected = {"data.chat_template_kwargs": {"enable_thinking": False}, "data.chat_template": "{{ messages }}"}
    for command in ("grpo", "rloo", "distillation"):
        assert holds(settings(command, *flags), expected)
    assert settings("sft", "--chat_template", "{{ messages }}")["data.chat_template"] == "{{ messages }}"


def test_flags_of_adapters_translate() -> None:
    found = settings(
        "sft", "--use_peft", "--lora_r", "8", "--load_in_4bit", "--lora_target_modules", "q_proj", "v_proj"
    )
    assert holds(
        found,
        {
            "actor.lora.rank": 8,
            "actor.lora.alpha": 32,
            "actor.lora.target_modules": ("q_proj", "v_proj"),
            "actor.lora.load_in_4bit": True,
        },
    )
    assert settings("sft", "--lora_r", "8")["actor.lora.rank"] == 0
    assert settings("dpo", "--use_peft", "--use_rslora")["actor.lora.rslora"]
    assert not settings("dpo", "--use_peft")["actor.lora.rslora"]
    assert any("--use_rslora" in note for note in translated("sft", "--use_rslora").notes)
    made = settings("sft", "--use_peft", "--use_dora")
    assert (made["actor.lora.dora"], made["actor.lora.dropout"]) == (True, 0.0)
    assert any("--use_dora" in note for note in translated("sft", "--use_dora").notes)


@pytest.mark.parametrize(
    ("command", "flags", "instead"),
    [
        ("sft", ("--use_peft", "--lora_modules_to_save", "embed"), "leave --use_peft out"),
        ("sft", ("--use_peft", "--lora_target_parameters", "experts"), "--lora_target_modules"),
        ("sft", ("--optim", "adafactor"), "--actor.optim muon"),
        ("sft", ("--truncation_mode", "keep_end"), "--data.overlong drop"),
        ("kto", ("--ref_model_sync_steps", "64"), "never moves without --sync_ref_model"),
        ("sft", ("--lr_scheduler_kwargs", '{"num_cycles": 2}'), "--actor.lr_decay_ratio"),
        ("sft", ("--use_cpu",), "CUDA_VISIBLE_DEVICES"),
        ("dpo", ("--fsdp", "full_shard"), "--cluster.strategy fsdp2"),
        ("grpo", ("--vllm_max_model_length", "2048"), "vLLM does not sample without --use_vllm"),
    ],
)
def test_what_is_not_honoured_has_an_instead(command: str, flags: tuple[str, ...], instead: str) -> None:
    notes = translated(command, *flags).notes
    assert [note for note in notes if note.startswith("not honoured: --") and instead in note], notes


@pytest.mark.parametrize(
    ("command", "flags", "share"),
    [
        ("sft", (), 0.05),
        ("grpo", (), 0.05),
        ("sft", ("--lora_dropout", "0.2"), 0.2),
        ("sft", ("--lora_dropout", "0.2", "--disable_dropout"), 0.0),
        ("dpo", ("--lora_dropout", "0.2"), 0.0),
        ("dpo", ("--lora_dropout", "0.2", "--disable_dropout", "false"), 0.2),
        ("kto", ("--no_disable_dropout",), 0.05),
        ("reward", (), 0.0),
    ],
)
def test_adapters_leave_out_what_they_do_in_trl(command: str, flags: tuple[str, ...], share: float) -> None:
    result = translated(command, "--use_peft", *flags)
    assert result.run.actor.lora.dropout == share
    assert any("--lora_dropout" in note for note in result.notes) is (bool(flags) and "0.2" in flags and not share)


def test_flags_of_trackers_translate() -> None:
    flags = ("--report_to", "wandb", "tensorboard", "--project", "p", "--run_name", "n", "--output_dir", "runs/x")
    assert holds(
        settings("sft", *flags),
        {
            "logger.report_to": ("wandb",),
            "logger.project": "p",
            "logger.run_name": "n",
            "logger.tensorboard_dir": "runs/x/tensorboard",
        },
    )
    assert settings("sft", "--report_to", "none") == settings("sft")
    notes = translated("sft", "--report_to", "comet_ml", "--run_name", "n").notes
    assert [note.partition(":")[0] for note in notes if "report" in note] == ["not honoured", "not honoured"]


def test_switches_are_turned_off() -> None:
    assert settings("sft", "--no_gradient_checkpointing")["actor.gradient_checkpointing"] == "off"
    assert settings("sft", "--no_bf16")["actor.dtype"] == settings("sft", "--bf16", "False")["actor.dtype"] == "float32"
    assert not any("unused" in note for note in translated("sft", "--no_remove_unused_columns").notes)


def test_rows_of_a_packed_step_are_told() -> None:
    assert any("--per_device_train_batch_size" in note for note in translated("sft", "--packing").notes)


def test_flags_of_data_and_evaluation_translate() -> None:
    flags = ("--dataset_config", "main", "--dataset_train_split", "a", "--eval_strategy", "steps", "--eval_steps", "50")
    expected = {"data.dataset": "d.jsonl:main", "data.split": "a", "eval.dataset": "d.jsonl:main", "eval.steps": 50}
    assert holds(settings("kto", *flags), expected)
    assert settings("kto", *flags)["eval.split"] == "test"
    assert settings("kto")["eval.dataset"] is None
    assert settings("sft", "--assistant_only_loss")["data.train_on"] == "assistant"
    assert settings("sft", "--completion_only_loss", "False")["data.train_on"] == "all"
    streamed = settings("sft", "--dataset_streaming", "--max_steps", "9", "--neftune_noise_alpha", "5")
    assert holds(streamed, {"data.stream": True, "train.max_steps": 9, "train.neftune_alpha": 5.0})
    for command in ("dpo", "kto", "reward"):
        assert settings(command, "--streaming", "--max_steps", "9")["data.stream"]
    assert (settings("sft")["data.overlong"], settings("reward")["data.overlong"]) == ("cut", "drop")


@pytest.mark.parametrize("command", ["sft", "dpo", "kto", "reward"])
def test_the_chat_template_is_for_messages(command: str) -> None:
    assert not settings(command)["data.apply_chat_template"]
    if command in ("sft", "reward"):
        result = translated(command, "--chat_template_path", "{{ messages }}")
        assert result.run.data.apply_chat_template
        assert any("--chat_template_path" in note for note in result.notes)


def test_flags_of_preference_losses_translate() -> None:
    mixed = settings("dpo", "--loss_type", "sigmoid", "bco_pair", "sft", "--loss_weights", "0.8", "0.2", "1.0")
    assert holds(mixed, {"dpo.loss": ("sigmoid", "bco_pair", "sft"), "dpo.loss_weights": (0.8, 0.2, 1.0)})
    robust = settings("dpo", "--loss_type", "robust", "--label_smoothing", "0.1", "--beta", "0.3")
    assert holds(robust, {"dpo.loss": ("robust",), "dpo.label_smoothing": 0.1, "dpo.beta": 0.3})
    alpha = settings("dpo", "--f_divergence_type", "alpha_divergence", "--f_alpha_divergence_coef", "0.7")
    assert alpha["dpo.f_divergence"] == "alpha_divergence"
    assert alpha["dpo.f_alpha"] == pytest.approx(0.3)
    without = translated("kto", "--loss_type", "apo_zero_unpaired")
    assert without.run.kto.loss == "apo_zero_unpaired"
    told = [
        any("the distance from the reference" in note for note in found.notes) for found in (translated("kto"), without)
    ]
    assert told == [True, False]
    assert settings("reward", "--center_rewards_coefficient", "0.01")["rm.centring"] == 0.01
    smoothed = settings("dpo", "--loss_type", "aot_unpaired", "aot_pair", "--label_smoothing", "0.1")
    assert holds(smoothed, {"dpo.loss": ("aot_unpaired", "aot"), "dpo.label_smoothing": 0.1, "dpo.wpo": False})
    weighed = translated("dpo", "--use_weighting", "--loss_type", "sigmoid", "sft")
    assert weighed.run.dpo.wpo
    assert any("--use_weighting" in note for note in weighed.notes)
    assert not any("--use_weighting" in note for note in translated("dpo", "--use_weighting").notes)
    idle = ("--beta", "0.3", "--ld_alpha", "0.5", "--use_weighting", "--sync_ref_model", "--discopop_tau", "0.2")
    imitation = translated("dpo", "--loss_type", "sft", *idle)
    assert imitation.run.dpo == attrs.evolve(DPORun().dpo, loss=("sft",))
    assert {flag for flag in idle if flag.startswith("--")} == {
        note.split()[2].rstrip(":") for note in imitation.notes if note.startswith("not honoured: --")
    }
    assert settings("dpo", "--loss_type", "discopop", "--discopop_tau", "0.2")["dpo.discopop_tau"] == 0.2
    moving = settings("dpo", "--sync_ref_model", "--ref_model_mixup_alpha", "0.5")
    assert holds(moving, {"dpo.ref_sync_steps": 512, "dpo.ref_mixup": 0.5})
    unpaired = settings("kto", "--sync_ref_model", "--ref_model_sync_steps", "32")
    assert holds(unpaired, {"kto.ref_sync_steps": 32, "kto.ref_mixup": 0.6})
    still = translated("dpo", "--ref_model_sync_steps", "64")
    assert still.run.dpo.ref_sync_steps is None
    assert any("--ref_model_sync_steps" in note for note in still.notes)
    flags = ("--sync_ref_model", "--ref_model_sync_steps", "64")
    nearer = settings("grpo", "--beta", "0.04", *flags)
    assert holds(nearer, {"algo.kl.ref_sync_steps": 64, "algo.kl.ref_mixup": 0.6})
    assert any("--sync_ref_model" in note for note in translated("grpo", *flags).notes), "without --beta no KL"
    with pytest.raises(ConfigurationError, match="--loss_type"):
        translated("kto", "--loss_type", "other")


@pytest.mark.parametrize(
    ("loss", "ours", "aggregation"),
    [
        ("grpo", "ppo", "sequence_mean"),
        ("dapo", "ppo", "token_mean"),
        ("dr_grpo", "ppo", "constant_length"),
        ("luspo", "ppo", "sequence_sum"),
        ("cispo", "cispo", None),
        ("vespo", "vespo", None),
    ],
)
def test_flags_of_groups_and_their_loss_translate(loss: str, ours: str, aggregation: str | None) -> None:
    flags = ("--num_generations", "4", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2")
    found = settings("grpo", *flags, "--loss_type", loss, "--beta", "0.04", "--epsilon_high", "0.3")
    assert holds(
        found,
        {
            "rollout.batch_size": 4,
            "rollout.n_samples_per_prompt": 4,
            "train.batch_size": 16,
            "actor.policy_loss_type": ours,
            "actor.loss_aggregation": aggregation,
            "algo.kl.init_coef": 0.04,
            "algo.kl.estimator": "k3_unbiased",
            "data.prompt_dataset": "d.jsonl",
            "reward.verifier": "math",
        },
    )
    assert settings("grpo", "--scale_rewards", "none")["algo.advantage.estimator"] == "dr_grpo"
    assert settings("grpo", "--scale_rewards", "batch")["algo.advantage.estimator"] == "lite_ppo"
    with pytest.raises(ConfigurationError, match="no whole groups of 3"):
        translated("grpo", "--num_generations", "3")


def test_the_others_of_a_group_are_the_baseline() -> None:
    """Replies weigh by the ratio of the whole, and KL is part of the reward (`test_rloo` of the parity tests)."""
    found = settings("rloo", "--per_device_train_batch_size", "8", "--epsilon_high", "0.3", "--num_generations", "4")
    assert holds(
        found,
        {
            "rollout.batch_size": 2,
            "rollout.n_samples_per_prompt": 4,
            "train.batch_size": 8,
            "algo.advantage.estimator": "rloo_sequence",
            "actor.policy_loss_type": "sequence_ppo",
            "actor.loss_aggregation": "sequence_mean",
            "actor.eps_clip_low_high": (0.2, 0.3),
            "algo.kl.init_coef": 0.05,
            "algo.kl.use_loss": False,
            "algo.kl.estimator": "k1",
            "reward.verifier": "math",
        },
    )
    assert settings("rloo")["rollout.n_samples_per_prompt"] == 2
    assert settings("rloo", "--reward_clip_range", "-1", "2")["reward.clip_range"] == (-1.0, 2.0)
    assert settings("rloo", "--sync_ref_model")["algo.kl.ref_sync_steps"] == 512
    whitened = translated("rloo", "--normalize_advantages")
    assert whitened.run.algo.advantage.whiten == "batch"
    assert any("in TRL over replies" in note for note in whitened.notes)
    masked = translated("rloo", "--mask_truncated_completions")
    assert any("over the others alone, in TRL over all" in note for note in masked.notes)
    still = translated("rloo", "--beta", "0", "--sync_ref_model")
    assert still.run.algo.kl.init_coef == 0
    assert any("--sync_ref_model: there is no KL" in note for note in still.notes)


def test_a_teacher_corrects_one_reply_to_each_prompt() -> None:
    flags = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--max_steps", "9")
    found = settings("distillation", *flags, "--beta", "0.5", "--temperature", "0.7")
    assert holds(
        found,
        {
            "ref.model_name_or_path": "t",
            "rollout.batch_size": 8,
            "rollout.n_samples_per_prompt": 1,
            "train.batch_size": 8,
            "train.max_steps": 9,
            "rollout.temperature": 0.7,
            "algo.advantage.estimator": "on_policy_distill",
            "algo.kl.init_coef": 1.0,
            "algo.kl.use_loss": True,
            "algo.kl.estimator": "full",
            "algo.kl.beta": 0.5,
            "actor.loss_aggregation": "token_mean",
        },
    )
    assert settings("distillation")["algo.kl.beta"] == 1
    without = translate_command(["distillation", *LEAST])
    assert any("--ref.model_name_or_path" in str(problem) for problem in problems(without))
    evaluated = translated("distillation", "--eval_strategy", "steps")
    assert evaluated.run.eval.dataset is None
    assert any("--eval_strategy steps: held-out replies are judged by a reward" in note for note in evaluated.notes)


def test_losses_with_numbers_for_either_sign() -> None:
    assert holds(settings("grpo", "--loss_type", "sapo"), {"actor.sapo_tau": (1.0, 1.05)})
    found = settings("grpo", "--loss_type", "vespo", "--vespo_k_neg", "4", "--vespo_lambda_pos", "1.5")
    assert holds(
        found, {"actor.vespo_k": (2.0, 4.0), "actor.vespo_lambda": (1.5, 2.0), "algo.old_logprobs": "recompute"}
    )
    sampled = translated("grpo", "--loss_type", "vespo", "--use_vllm")
    assert sampled.run.algo.old_logprobs == "rollout"
    assert any("token by token" in note for note in sampled.notes)
    idle = translated("grpo", "--sapo_temperature_pos", "2")
    assert idle.run.actor.sapo_tau == (1.0, 1.05)
    assert any("--sapo_temperature_pos" in note for note in idle.notes)


@pytest.mark.parametrize(
    ("flags", "clips", "noted"),
    [(("--epsilon_high", "5"), (1.0, 4.0), 0), (("--epsilon_high", "0.5"), (1.0, 0.0), 1), ((), (1.0, 0.0), 1)],
)
def test_cispo_bounds_the_ratio_itself(flags: tuple[str, ...], clips: tuple[float, float], noted: int) -> None:
    """TRL clamps the ratio to epsilon_high, where ours is 1 more than the upper range."""
    result = translated("grpo", "--loss_type", "cispo", *flags)
    assert result.run.actor.eps_clip_low_high == clips
    assert sum("--epsilon_high" in note for note in result.notes) == noted


@pytest.mark.parametrize(
    ("flags", "bound", "told"),
    [
        (("--delta", "4"), 4.0, ""),
        (("--delta", "1.1"), 1.1, "in TRL of positive ones too"),
        (("--delta", "4", "--loss_type", "sapo"), None, "in TRL neither"),
        (("--delta", "4", "--importance_sampling_level", "sequence"), None, "a ratio of sequences has no bound"),
    ],
)
def test_the_second_bound_of_a_ratio_is_that_of_negative_advantages(
    flags: tuple[str, ...], bound: float | None, told: str
) -> None:
    result = translated("grpo", *flags)
    assert result.run.actor.dual_clip == bound
    assert [told in note for note in result.notes if "--delta" in note] == ([True] if told else [])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--loss_type", "bnpo", "--gradient_accumulation_steps", "2"), "in TRL of each micro-batch"),
        (("--loss_type", "bnpo"), None),
        (("--steps_per_generation", "2"), "in TRL by their mean over the steps of a generation"),
        (("--steps_per_generation", "2", "--loss_type", "grpo"), None),
        (("--mask_truncated_completions", "--loss_type", "grpo"), "over the others alone, in TRL over all"),
        (("--mask_truncated_completions",), None),
        (("--top_entropy_quantile", "0.2"), "in TRL of a micro-batch's"),
        (("--entropy_coef", "0.1"), "in TRL over the tokens of a micro-batch"),
    ],
)
def test_means_that_trl_takes_of_others_are_told(flags: tuple[str, ...], told: str | None) -> None:
    notes = "\n".join(translated("grpo", *flags).notes)
    every = ("of each micro-batch", "steps of a generation", "others alone", "micro-batch's", "tokens of a micro-batch")
    assert [text for text in every if text in notes] == (
        [] if told is None else [text for text in every if text in told]
    )


@pytest.mark.parametrize(("loss", "aggregation"), [("grpo", "sequence_mean"), ("dapo", "token_mean")])
def test_ratios_of_sequences_are_added_up_as_the_loss_says(loss: str, aggregation: str) -> None:
    found = settings("grpo", "--importance_sampling_level", "sequence", "--loss_type", loss)
    assert holds(found, {"actor.policy_loss_type": "gspo", "actor.loss_aggregation": aggregation})
    with pytest.raises(ConfigurationError, match="--importance_sampling_level"):
        translated("grpo", "--importance_sampling_level", "sequence", "--loss_type", "cispo")
    with pytest.raises(ConfigurationError, match="is sentence, but there are token and sequence"):
        translated("grpo", "--importance_sampling_level", "sentence")


def test_the_divergence_is_the_one_that_trl_weights_with_the_ratio() -> None:
    assert settings("grpo", "--beta", "0.1")["algo.kl.estimator"] == "k3_unbiased"
    assert settings("grpo", "--beta", "0.1", "--no_use_bias_correction_kl")["algo.kl.estimator"] == "k3"
    sequences = ("--importance_sampling_level", "sequence", "--loss_type", "grpo")
    of_replies = translated("grpo", "--beta", "0.1", *sequences)
    assert of_replies.run.algo.kl.estimator == "k3_unbiased"
    assert any("--beta 0.1: the KL of a token" in note for note in of_replies.notes)
    assert not any("--beta" in note for note in translated("grpo", "--beta", "0.1").notes)


def test_steps_are_counted_in_rollouts() -> None:
    evaluated = ("--eval_strategy", "steps", "--eval_steps", "40", "--temperature", "0.7", "--top_p", "0.9")
    flags = ("--num_iterations", "2", "--steps_per_generation", "4", "--max_steps", "100", "--save_steps", "20")
    found = settings("grpo", *flags, *evaluated)
    assert holds(
        found,
        {
            "train.max_steps": 13,
            "ckpt.save_steps": 3,
            "ckpt.state_steps": 3,
            "eval.steps": 5,
            "rollout.batch_size": 4,
            "train.batch_size": 8,
            "train.max_epochs": 2,
            "eval.temperature": 0.7,
            "eval.top_p": 0.9,
            "eval.n_samples_per_prompt": 8,
        },
    )
    assert any("divided by 8" in note for note in translated("grpo", *flags).notes)
    assert settings("grpo", "--max_steps", "100")["train.max_steps"] == 100


def test_rollouts_of_one_optimizer_step_are_one() -> None:
    found = settings("grpo", "--gradient_accumulation_steps", "4", "--steps_per_generation", "1", "--max_steps", "9")
    assert holds(found, {"rollout.batch_size": 4, "train.batch_size": 32, "train.max_steps": 9})


def test_what_else_trl_does_is_named() -> None:
    assert any("data.apply_chat_template False" in note for note in translated("grpo").notes)


@pytest.mark.parametrize(
    ("flags", "correction"),
    [
        ((), {"level": "sequence", "mode": "mask", "low": 0.0, "high": 3.0}),
        (("--vllm_importance_sampling_mode", "token_truncate"), {"level": "token", "mode": "truncate", "high": 3.0}),
        (
            ("--vllm_importance_sampling_mode", "token_mask", "--vllm_importance_sampling_clip_min", "0.5"),
            {"level": "token", "mode": "mask", "low": 0.5, "high": 3.0},
        ),
        (
            (
                *("--vllm_importance_sampling_mode", "sequence_truncate"),
                *("--vllm_importance_sampling_clip_min", "0.5", "--vllm_importance_sampling_cap", "4"),
            ),
            {"level": "sequence", "mode": "clip", "low": 0.5, "high": 4.0},
        ),
        (("--no_vllm_importance_sampling_correction",), {"level": "auto"}),
        (("--loss_type", "vespo"), {"level": "auto"}),
        (("--top_p", "0.9"), {"level": "auto"}),
        (("--top_p", "0.9", "--loss_type", "vespo"), {"level": "auto"}),
        (("--off_policy_mask_threshold", "0.2"), {"level": "sequence", "mode": "mask", "gate": "opsm"}),
    ],
)
def test_flags_of_corrections_for_vllm_translate(flags: tuple[str, ...], correction: dict[str, Any]) -> None:
    found = translated("grpo", "--use_vllm", *flags)
    chosen = attrs.asdict(found.run.algo.correction)
    assert {key: chosen[key] for key in correction} == correction
    assert any("own ratio" in note for note in found.notes) is (flags == ())
    assert any("less than the full distribution" in note for note in found.notes) is ("--top_p" in flags)
    if "--off_policy_mask_threshold" in flags:
        assert (chosen["threshold"], found.run.algo.old_logprobs) == (0.2, "rollout")


def test_nothing_is_corrected_without_vllm_unless_it_is_masked() -> None:
    found = translated("grpo", "--vllm_importance_sampling_cap", "2")
    assert found.run.algo.correction.level == "auto"
    assert any("--vllm_importance_sampling_cap" in note for note in found.notes)
    assert settings("grpo", "--off_policy_mask_threshold", "0.2")["algo.correction.gate"] == "opsm"
    with pytest.raises(ConfigurationError, match="--vllm_importance_sampling_mode is other"):
        translated("grpo", "--use_vllm", "--vllm_importance_sampling_mode", "other")


def test_engines_share_the_gpus_of_the_processes_that_train() -> None:
    one = settings("grpo", "--use_vllm")
    assert holds(one, {"vllm.gpu_memory_utilization": 0.3, "train.colocate_all": False})
    several = translated("grpo", "--use_vllm", "--num_processes", "4", "--vllm_tensor_parallel_size", "2")
    assert several.run.train.colocate_all
    assert (several.run.vllm.num_engines, several.run.vllm.tensor_parallel_size) == (2, 2)
    assert not any("--vllm_tensor_parallel_size" in note for note in several.notes)
    for size in ("3", "0"):
        with pytest.raises(ConfigurationError, match=rf"--vllm_tensor_parallel_size {size}: so many"):
            translated("grpo", "--use_vllm", "--num_processes", "4", "--vllm_tensor_parallel_size", size)
    assert settings("grpo", "--use_vllm", "--vllm_tensor_parallel_size", "2")["vllm.tensor_parallel_size"] == 2
    assert settings("grpo", "--use_vllm", "--vllm_max_model_length", "4096")["vllm.max_model_len"] == 4096


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize(
    "flag", ["num_generations", "gradient_accumulation_steps", "steps_per_generation", "num_iterations"]
)
def test_what_nothing_divides_by_is_refused(flag: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--{flag} {value}: it must be at least 1"):
        translated("grpo", f"--{flag}", value)


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-2"])
def test_epochs_are_a_number_above_0(value: str) -> None:
    with pytest.raises(ConfigurationError, match="--num_train_epochs"):
        translated("sft", "--num_train_epochs", value)


def test_an_older_name_of_the_loss_is_known() -> None:
    assert settings("sft", "--loss_type", "chunked_nll")["train.loss"] == "nll"


# The command.


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


def test_what_a_script_does_beside_its_flags_is_said() -> None:
    notes = translate_command(["python", "examples/scripts/gspo.py", *LEAST, *BESIDE["grpo"]]).notes
    assert any(note.startswith("not honoured: examples/scripts/gspo.py: its flags alone are read") for note in notes)
    file = ["accelerate", "launch", "--config_file", "zero3.yaml", "trl/scripts/sft.py", *LEAST]
    assert any(
        "--accelerate_config zero3.yaml: write --num_processes" in note for note in translate_command(file).notes
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_names_of_earlier_releases_mean_the_same(command: str) -> None:
    older = ("--torch_dtype", "float16", "--evaluation_strategy", "epoch", "--group_by_length", "True")
    newer = ("--dtype", "float16", "--eval_strategy", "epoch", "--train_sampling_strategy", "True")
    assert settings(command, *older) == settings(command, *newer)


def test_flags_of_lengths_of_earlier_releases_translate() -> None:
    assert settings("grpo", "--max_prompt_length", "64")["data.max_prompt_tokens"] == 64
    assert any(
        "--max_prompt_length 64: longer" in note for note in translated("grpo", "--max_prompt_length", "64").notes
    )
    assert any("--max_length bounds" in note for note in translated("dpo", "--max_prompt_length", "64").notes)


def test_commas_between_quoted_words_are_no_part_of_them() -> None:
    found = settings("sft", "--use_peft", "--lora_target_modules", "q_proj,", "v_proj")
    assert tuple(found["actor.lora.target_modules"]) == ("q_proj", "v_proj")


def test_pairs_that_teach_nothing_are_told() -> None:
    for command in ("dpo", "reward"):
        assert any("pairs of equal replies" in note for note in translated(command).notes)
    assert not any("pairs of equal replies" in note for note in translated("sft").notes)
    assert any("empty replies, and pairs of which one is empty" in note for note in translated("kto").notes)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("sft",), True),
        (("dpo",), True),
        (("kto",), True),
        (("reward",), True),
        (("sft", "--assistant_only_loss"), False),
        (("sft", "--completion_only_loss", "False"), False),
        (("grpo",), False),
    ],
)
def test_what_follows_the_end_of_a_turn_is_told(words: tuple[str, ...], told: bool) -> None:
    found = any("after the token that ends a turn" in note for note in translated(*words).notes)
    assert found == told


@pytest.mark.parametrize(("losses", "told"), [(("sigmoid", "sft"), True), (("sigmoid",), False)])
def test_a_likelihood_that_trl_averages_in_micro_batches_is_told(losses: tuple[str, ...], told: bool) -> None:
    notes = translated("dpo", "--loss_type", *losses).notes
    assert any("the loss sft is the mean over the tokens" in note for note in notes) == told


def test_rows_without_a_margin_are_compared_as_in_trl() -> None:
    assert settings("reward")["rm.margin"] is False  # with it rows without margins would be refused
    assert any("a column margin" in note for note in translated("reward").notes)


def test_a_reward_function_of_a_module_is_found_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_lib").mkdir()
    (tmp_path / "my_lib" / "rewards.py").touch()
    words = ["grpo", *LEAST, "--reward_funcs", "my_lib.rewards.length"]
    run = translate_command(words).run
    assert isinstance(run, RLConfig)
    assert run.reward.function_path == "my_lib/rewards.py:length"
    assert any("FILE.py:NAME" in note for note in translate_command([*words[:-1], "elsewhere.length"]).notes)


def test_several_rewards_keep_their_order_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    beside = ("accuracy_reward", "mine.brief", "think_format_reward")
    words = ["grpo", *LEAST, "--reward_model_name_or_path", "rm", "--reward_funcs", *beside, "--reward_weights"]
    result = translate_command([*words, "4", "3", "2", "1"])
    assert isinstance(result.run, RLConfig)
    assert result.run.reward.weights == {"model": 4.0, "math": 3.0, "brief": 2.0, "think_format_reward": 1.0}
    assert result.run.reward.function_path == "mine.py:brief,trl.rewards:think_format_reward"
    assert result.run.reward.verifier == "math"
    assert problems(result) == []
    with pytest.raises(ConfigurationError, match="rewards are model, math, brief, think_format_reward: give one num"):
        translate_command([*words, "1", "2"])
    with pytest.raises(ConfigurationError, match="--reward_weights is 1 2 3 a, "):
        translate_command([*words, "1", "2", "3", "a"])
    alone = translate_command(["grpo", *LEAST, "--reward_funcs", "mine.brief", "--reward_weights", "2"])
    assert any("a reward alone has no weight" in note for note in alone.notes)


def test_no_part_of_the_rewards_is_left_out_in_silence() -> None:
    lost = translate_command(["grpo", *LEAST, "--reward_funcs", "accuracy_reward", "get_soft_overlong_punishment"])
    assert any("get_soft_overlong_punishment: reward.overlong_buffer_len 256 does it" in n for n in lost.notes)
    assert any("No reward is set" in str(problem) for problem in problems(lost))
