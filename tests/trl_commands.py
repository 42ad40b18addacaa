"""Commands of TRL that lack nothing, translated."""

from typing import Any

from rollgrad.entrypoints.cli.translated import problems
from rollgrad.entrypoints.translation.draft import TranslatedRun
from rollgrad.entrypoints.trl.command import translate_command
from tests.translated_settings import settings_of

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
    return settings_of(translated(command, *flags))
