"""Commands of verl that lack nothing, translated."""

from typing import Any

from rollgrad.entrypoints.cli.translated import problems
from rollgrad.entrypoints.translation.draft import TranslatedRun
from rollgrad.entrypoints.verl.command import translate_command
from tests.translated_settings import settings_of

LEAST = ("data.train_files=d.parquet", "actor_rollout_ref.model.path=m", "trainer.logger=[console]")
SFT_LEAST = ("data.train_files=t.parquet", "trainer.logger=[console]")
GROUP = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
TEACHING = "distillation.distillation_loss"
TEACHER = "distillation.teacher_models.teacher_model.model_path=large"
TAUGHT = ("distillation.enabled=True", TEACHER)


def translated(*overrides: str) -> TranslatedRun:
    """Settings of a command that lacks nothing; it must be one that can be trained."""
    result = translate_command(["python3", "-m", "verl.trainer.main_ppo", *LEAST, *overrides])
    assert problems(result) == []
    return result


def settings(*overrides: str) -> dict[str, Any]:
    return settings_of(translated(*overrides))


def notes(*overrides: str) -> str:
    return "\n".join(translated(*overrides).notes)
