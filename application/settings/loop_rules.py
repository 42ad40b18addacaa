"""Rules of `rollgrad loop`: those of sampling, scoring, evaluation and training together, and its own. See
`validation`."""

from collections.abc import Iterator
from enum import StrEnum
from operator import attrgetter
from typing import Any

import attrs

from rollgrad.application.settings.dpo import dpo_errors
from rollgrad.application.settings.loop import (
    CSFTRun,
    IterDPORun,
    LoopRun,
    Reference,
    sampling_run,
    training_run,
)
from rollgrad.application.settings.rules.examples import sft_errors
from rollgrad.application.settings.rules.generation import generation_errors, scoring_errors
from rollgrad.application.settings.rules.inputs import eval_problems
from rollgrad.application.settings.rules.resume import may_differ
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.validation import condition_problems, range_problems, with_defaults
from rollgrad.domain.algorithms.shaping_settings import ShapingSettings
from rollgrad.domain.errors import ConfigurationError

READ_SHAPING = frozenset({"pass_threshold", "normalize"})
"""Settings of shaping that judging and evaluation read: when a reply passes, and the mean and deviation that a reward
model brings."""

UNREAD = frozenset(
    {
        *("rollout.generate_batch_size", "rollout.max_turns", "rollout.max_episode_tokens"),
        *("rollout.max_episode_seconds", "rollout.server_urls"),
        *("rollout.server_sync", "rollout.server_sync_delta"),
        *("data.curriculum_range", "data.prompt_suffix", "eval.steps", "actor.lora.sync", "logger.log_samples"),
        "logger.trajectories_max_gib",
        *("ckpt.resume", "ckpt.overwrite", "ckpt.state_dir", "ckpt.best_metric", "ckpt.push_to_hub"),
        "ckpt.early_stopping_patience",
        *("vllm.sync_backend", "vllm.sync_delta"),
        *(f"reward.{field.name}" for field in attrs.fields(ShapingSettings) if field.name not in READ_SHAPING),
    }
)
"""Settings of the sections that a loop shares with other runs, which it does not read and refuses."""

SECTIONS = ("vllm.", "rollout.", "reward.", "data.", "eval.")
"""Sections of sampling, whose conditions are checked."""


def loop_errors(run: LoopRun, *, has_reward: bool = False) -> list[ConfigurationError]:
    """Returns every rule that the settings of a loop break. `has_reward`: the caller passes a reward object."""
    singles = range_problems(run)
    rest = with_defaults(run, singles)
    sampling, training = sampling_run(rest), training_run(rest, examples="examples.jsonl")
    unmet = condition_problems(sampling)
    errors = [
        *singles.values(),
        *_own_problems(rest),
        *(problem for name, problem in unmet.items() if name.startswith(SECTIONS)),
        *map(str, generation_errors(sampling)),
        *map(str, scoring_errors(sampling, has_reward=has_reward)),
        *eval_problems(sampling),
        *map(str, dpo_errors(training) if isinstance(rest, IterDPORun) else sft_errors(training)),  # type: ignore[arg-type]
    ]
    return [ConfigurationError(problem) for problem in dict.fromkeys(errors)]


def may_change(name: str) -> bool:
    """Returns whether a setting may change between the beginning of a loop and its continuation: how long it goes on,
    where and in what portions it is computed, and addresses and time limits of rewards."""
    fixed = ("train.num_epochs", "train.max_steps", "reward.function_path")
    return name == "loop.iterations" or (may_differ(name) and name not in fixed)


def _own_problems(run: LoopRun) -> Iterator[str]:
    default: Any = type(run)()
    for name in sorted(UNREAD):
        value = attrgetter(name)(run)
        if value != attrgetter(name)(default):
            shown = value if isinstance(value, StrEnum) else repr(value)
            yield f"{name} is {shown}, but a loop does not read it: leave --{name} out."
    if run.rollout.engine is Engine.SERVER:
        yield (
            "rollout.engine is server, which goes on with its own model while the loop's is trained: set "
            "--rollout.engine to embedded or vllm."
        )
    if isinstance(run, IterDPORun) and run.rollout.n_samples_per_prompt < 2:
        yield (
            f"rollout.n_samples_per_prompt is {run.rollout.n_samples_per_prompt}, but a pair has two replies: set "
            "--rollout.n_samples_per_prompt to 2 or more."
        )
    if isinstance(run, IterDPORun) and run.dpo.ref_sync_steps and run.loop.reference is Reference.INITIAL:
        yield (
            f"dpo.ref_sync_steps is {run.dpo.ref_sync_steps} and loop.reference is initial, but a reference that moves "
            "begins as the model of its iteration: set --loop.reference previous, or leave --dpo.ref_sync_steps out."
        )
    if isinstance(run, CSFTRun) and run.data.input_template is not None:
        yield (
            f"data.input_template is {run.data.input_template!r}, but the reward stands behind the prompt's own text: "
            "leave --data.input_template out."
        )
    if run.ckpt.state_minutes is None:
        yield (
            "ckpt.state_minutes is None, but a loop goes on from the training states of its runs: leave "
            "--ckpt.state_minutes out."
        )
