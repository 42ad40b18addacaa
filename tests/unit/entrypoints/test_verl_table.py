"""Every setting of verl is translated, or named with the reason why it is not."""

from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.config_io import setting_names
from rollgrad.entrypoints.names.names_of_verl_commands import PPO
from rollgrad.entrypoints.names.names_of_verl_sft import SFT
from rollgrad.entrypoints.translation.draft import TranslatedRun
from rollgrad.entrypoints.verl.command import translate_command
from rollgrad.entrypoints.verl.words import Override, known
from tests.unit.entrypoints.test_suggestions import VERL_NAMES
from tests.verl_overrides import ACTOR, GROUP, LEAST, ROLLOUT, SFT_LEAST, TAUGHT, TEACHER, TEACHING

SECTIONS = (
    line.split(":") for line in Path(__file__).with_name("verl_names.txt").read_text().replace("\n ", " ").split("\n")
)
GENERATED = [f"{section}.{name}" for section, *names in SECTIONS for name in " ".join(names).split()]
"""Names of verl's `_generated_ppo_trainer.yaml`, and of earlier releases."""


def test_every_setting_named_in_the_table_exists() -> None:
    assert {flag.to for flag in PPO.flags.values() if flag.to} <= set(setting_names())
    assert {name for names in PPO.names.values() for name in names} <= set(PPO.flags)


def test_every_name_of_verl_is_known() -> None:
    assert len(GENERATED) > 330
    overrides = [Override(name, ("1",), written=f"{name}=1") for name in (*VERL_NAMES, *GENERATED)]
    _, options = known(PPO, overrides, [])
    assert set(options.values()) <= set(overrides)


UNUSUAL = {
    "algorithm.adv_estimator": "reinforce_plus_plus",
    "algorithm.norm_adv_by_std_in_grpo": "False",
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.filter_groups.metric": "seq_reward",
    "algorithm.kl_penalty": "mse",
    f"{ACTOR}.kl_loss_type": "mse",
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    f"{ACTOR}.policy_loss.loss_mode": "gspo",
    f"{ACTOR}.router_replay.mode": "R2",
    f"{ROLLOUT}.tensor_model_parallel_size": "4",
    f"{ROLLOUT}.top_k": "7",
    "trainer.resume_mode": "resume_path",
    "trainer.logger": "wandb",
    "trainer.device": "npu",
    "trainer.v1.trainer_mode": "separate_async",
    "engine": "megatron",
    "optim": None,
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_rs": "token",
    "model_engine": "megatron",
    "data.truncation": "left",
    f"{TEACHING}.loss_mode": "mse",
}
"""Values that ask for something; of the others a switch is turned on, and off."""
BESIDE = {
    f"{ACTOR}.kl_loss": (f"{ACTOR}.use_kl_loss=True",),
    "algorithm.kl_": ("algorithm.use_kl_in_reward=True",),
    "trainer.val_before_train": ("data.val_files=v",),
    "critic": ("algorithm.adv_estimator=gae",),
    "trainer.critic_warmup": ("algorithm.adv_estimator=gae",),
    "reward_model.model": ("reward_model.enable=True",),
    "custom_reward_function.name": ("custom_reward_function.path=r.py",),
    f"{ACTOR}.use_dynamic_bsz": (f"{ACTOR}.ppo_max_token_len_per_gpu=999",),
    f"{ACTOR}.megatron": ("model_engine=megatron",),
    f"{ROLLOUT}.val_kwargs.d": ("data.val_files=v", f"{ROLLOUT}.val_kwargs.temperature=0.5"),
    f"{ROLLOUT}.val_kwargs": ("data.val_files=v",),
    "reward_model.overlong_buffer.enable": ("reward_model.overlong_buffer.len=7",),
    "trainer.v1.trainer_mode": (f"{ROLLOUT}.nnodes=1",),
    "trainer.project_name": (),
    "data.use_dynamic_bsz": ("data.max_token_len_per_gpu=999",),
    "distillation.enabled": (TEACHER,),
    "distillation.teacher_models": ("distillation.enabled=True",),
    "distillation.distillation_loss.topk": (*TAUGHT, f"{TEACHING}.loss_mode=forward_kl_topk"),
    "distillation.distillation_loss.clip": (
        *(*TAUGHT, f"{TEACHING}.use_policy_gradient=True", f"{TEACHING}.use_task_rewards=False"),
    ),
    "distillation.": TAUGHT,
}
"""Words that a setting depends on, by the beginning of its name."""


@pytest.mark.parametrize("module", ["main_ppo", *SFT])
def test_every_setting_is_honoured_or_the_reason_is_said(module: str) -> None:
    """One that is given with an unusual value changes the settings, or is on a line of the notes."""
    words = {"SWITCH": ("True", "False"), "INTEGER": ("3",), "NUMBER": ("0.25",), "PAIR": ("[0.1,0.2]",)}
    program, least = (SFT[module], SFT_LEAST) if module in SFT else (PPO, (*LEAST, *GROUP))

    @cache
    def run(*overrides: str) -> TranslatedRun | str:
        try:
            return translate_command(["python3", "-m", f"verl.trainer.{module}", *least, *overrides])
        except ConfigurationError as error:  # which names it
            return str(error)

    silent = []
    for name, flag in program.flags.items():
        base = next((given for beginning, given in BESIDE.items() if name.startswith(beginning)), ())
        values = (UNUSUAL[name],) if name in UNUSUAL else words.get(flag.kind.name, ("['unusual']",))
        if (
            all(run(*base, f"{name}={value}") == run(*base) for value in values if value is not None)
            and name != "optim"
        ):
            silent.append(name)
    assert silent == []


def test_a_setting_that_is_taken_away_is_no_defect() -> None:
    on = ("data.val_files=v", "reward_model.overlong_buffer.enable=True", "algorithm.use_kl_in_reward=True")
    for name in PPO.flags:
        with suppress(ConfigurationError):
            translate_command(["python3", "-m", "verl.trainer.main_ppo", *LEAST, *on, f"~{name}"])
