"""Commands of OpenRLHF that lack nothing, translated."""

from typing import Any

from rollgrad.application.settings.rules import validate
from rollgrad.application.settings.run import RLConfig
from rollgrad.entrypoints.openrlhf.command import translate, translated_config

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
