"""Every flag of TRL is translated, or named with the reason why it is not."""

import re
from functools import cache
from pathlib import Path

import pytest

from rollgrad.application.settings.run import RLConfig
from rollgrad.entrypoints.config_io import setting_names
from rollgrad.entrypoints.names.names_of_trl_commands import COMMANDS, WITHOUT_DROPOUT
from rollgrad.entrypoints.translation.draft import TranslatedRun
from rollgrad.entrypoints.trl.command import RUNS, translate_command
from tests.dataclass_fields import fields
from tests.trl_commands import BESIDE, LEAST


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
