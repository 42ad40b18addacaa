"""Settings of verl's supervised fine-tuning are translated."""

from typing import Any

import pytest
import yaml

from rollgrad.application.settings.sft import SFTRun
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.translated import problems
from rollgrad.entrypoints.config_io import setting_names
from rollgrad.entrypoints.names.flags import Program
from rollgrad.entrypoints.names.names_of_verl_sft import SFT
from rollgrad.entrypoints.verl.command import translate_command
from tests.translated_settings import holds, settings_of
from tests.verl_overrides import SFT_LEAST


def fine_tuned(module: str, *overrides: str, launcher: tuple[str, ...] = ("torchrun", "-m")) -> dict[str, Any]:
    result = translate_command([*launcher, f"verl.trainer.{module}", *SFT_LEAST, *overrides])
    assert result.command == "train sft"
    assert problems(result) == []
    return settings_of(result)


def test_the_older_trainer_has_columns_of_prompts_and_replies() -> None:
    found = fine_tuned(
        "fsdp_sft_trainer",
        *("data.prompt_key=extra_info", "data.response_key=extra_info", "data.prompt_dict_keys=['question']"),
        *("+data.response_dict_keys=['answer']", "model.partial_pretrain=m", "model.lora_rank=32", "optim.lr=1e-4"),
        *("data.val_files=v.parquet", "data.micro_batch_size_per_gpu=4", "trainer.default_hdfs_dir=null"),
        launcher=("torchrun", "--standalone", "--nnodes=2", "--nproc_per_node=4", "-m"),
    )
    expected = {
        "actor.model_name_or_path": "m",
        "actor.num_nodes": 2,
        "actor.num_gpus_per_node": 4,
        "actor.lora.rank": 32,
        "actor.lora.alpha": 16,
        "actor.adam.lr": 1e-4,
        "actor.adam.betas": (0.9, 0.95),
        "actor.lr_scheduler": "cosine_with_min_lr",
        "actor.min_lr_ratio": 0.0,
        "actor.lr_warmup_ratio": 0.1,
        "actor.gradient_checkpointing": "off",
        "cluster.strategy": "fsdp2",
        "data.format": "prompt_completion",
        "data.input_key": "extra_info.question",
        "data.output_key": "extra_info.answer",
        "data.max_tokens": 1024,
        "data.overlong": "error",
        "eval.dataset": "v.parquet",
        "train.batch_size": 256,
        "train.num_epochs": 4,
        "ckpt.output_dir": "checkpoints/gsm8k-sft/test",
        "ckpt.resume": "never",
    }
    assert holds(found, expected)


def test_the_newer_trainer_has_conversations() -> None:
    found = fine_tuned(
        "sft_trainer",
        *("model.path=m", "engine=fsdp", "optim=fsdp", "engine.strategy=fsdp2", "engine.fsdp_size=-1"),
        *("engine.ulysses_sequence_parallel_size=2", "data.max_token_len_per_gpu=65536", "data.truncation=right"),
        *("trainer.save_freq=10", "trainer.max_ckpt_to_keep=3", "optim.warmup_style=cosine", "optim.min_lr_ratio=0.2"),
        launcher=("torchrun", "--nproc-per-node", "8", "-m"),
    )
    expected = {
        "actor.adam.lr": 1e-3,
        "actor.adam.betas": (0.9, 0.999),
        "actor.min_lr_ratio": 0.2,
        "actor.gradient_checkpointing": "full",
        "actor.num_gpus_per_node": 8,
        "ds.sequence_parallel_size": 2,
        "data.format": "messages",
        "data.input_key": "messages",
        "data.overlong": "cut",
        "train.max_tokens_per_micro_batch": 65536,
        "train.seed": 1,
        "ckpt.keep_states": 3,
        "ckpt.resume": "auto",
    }
    assert holds(found, expected)


def test_one_process_fine_tunes_without_a_launcher_that_says_more() -> None:
    words = ["python3", "-m", "verl.trainer.sft_trainer", *SFT_LEAST, "model.path=m", "engine.strategy=fsdp2"]
    result = translate_command([*words, "trainer.save_freq=after_each_epoch"])
    assert settings_of(result)["cluster.enable"] is False
    assert any("engine.strategy=fsdp2: one process trains" in note for note in result.notes)
    assert any("after_each_epoch: a number of steps is needed" in note for note in result.notes)


@pytest.mark.parametrize("program", SFT.values(), ids=lambda program: program.name)
def test_the_settings_of_fine_tuning_exist(program: Program) -> None:
    assert {flag.to for flag in program.flags.values() if flag.to} <= set(setting_names(SFTRun))
    assert {name for names in program.names.values() for name in names} == set(program.flags)


def test_columns_are_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("data.prompt_key=problem", "data.response_key=solution", "model.partial_pretrain=m")
    assert main(["verl", "python3", "-m", "verl.trainer.fsdp_sft_trainer", *SFT_LEAST, *words]) == 0
    data = yaml.safe_load(capsys.readouterr().out)["data"]
    assert (data["input_key"], data["output_key"]) == ("problem", "solution")
