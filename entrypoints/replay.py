"""`rollgrad replay`: one update of a run again, from its kept rollouts and the weights before it; writes nothing."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from rollgrad.adapters.checkpoints.names import METRICS_FILE, MODEL_OF_STEP, numbered
from rollgrad.adapters.data.datasets.teacher_template import TeacherTemplate
from rollgrad.adapters.tracking.metrics_file import read_logged
from rollgrad.adapters.tracking.trajectory_files import HIDDEN_TOKEN, read_trajectories, trajectory_path
from rollgrad.application.settings.derived import moves_reference, optimizer_steps_per_rollout
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.algorithms.settings import KLEstimator, OldLogprobs
from rollgrad.domain.batches.packed import RolloutBatch, pack
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.trajectory import Trajectory, TrajectoryBuilder
from rollgrad.domain.errors import ConfigurationError, DataError
from rollgrad.entrypoints.composition.injection import providers
from rollgrad.entrypoints.composition.lifetimes import shut_down
from rollgrad.entrypoints.composition.rl.algorithm import (
    always_scores,
    make_entropy_controller,
    make_kl_controller,
    make_objective,
    teacher_kind,
)
from rollgrad.entrypoints.composition.rl.container import rl_container
from rollgrad.entrypoints.composition.rl.teacher import make_compared_reference

SAMPLED = 1
"""Kind of a sampled token (docs/trajectories.md)."""


@frozen(kw_only=True)
class Replayed:
    """A replayed update: the weights that it began with, and each metric as it was logged and as it is now."""

    weights: str
    metrics: Mapping[str, tuple[float, float]]


def replay(run: Path, config: RLConfig, step: int) -> Replayed:
    """Takes update `step` of a run again, on its kept rollouts with their kept advantages, and returns the update's
    metrics beside those that were logged. Rewards, advantages and reference are not computed anew.

    Args:
        run: directory of the run.
        config: the run's settings.
        step: number of the update, from 1.

    Raises:
        ConfigurationError: the run has settings that an update alone does not have.
        DataError: rollouts or weights of that update are not there.
    """
    _check(config, step)
    batch = kept_batch(trajectory_path(run, step), config)
    weights = weights_before(run, config, step)
    logged = logged_metrics(run / METRICS_FILE, step)
    actor, ref = config.actor, config.ref
    if step > 1:
        # Without a model of its own the reference is what the run started with, not what this update does.
        ref = evolve(ref, model_name_or_path=ref.model_name_or_path or actor.model_name_or_path)
        actor = evolve(actor, model_name_or_path=weights, lora=LoraConfig())
    config = evolve(config, actor=actor, ref=ref)
    container = rl_container(config)
    if teacher_kind(config) != "none":  # what it has predicted is not kept
        container.teacher.override(providers.Singleton(make_compared_reference, config, container.tokenizer))
    container.critic.override(providers.Object(None))
    kl, entropy = logged.get("policy/kl_coef"), logged.get("policy/entropy_coef")
    try:
        objective = make_objective(
            config,
            kl_coef=make_kl_controller(config).coef if kl is None else kl,
            entropy_coef=make_entropy_controller(config).weight if entropy is None else entropy,
            version=step,
        )
        found = container.update().run(batch, objective).metrics
    finally:
        shut_down(container)
    # The schedule sets it.
    both = {name: (logged.get(name), value) for name, value in found.items() if name != "policy/lr"}
    return Replayed(
        weights=weights,
        metrics={
            name: (old, float(new)) for name, (old, new) in both.items() if old is not None and math.isfinite(new)
        },
    )


def logged_metrics(path: Path, step: int) -> dict[str, float]:
    """Returns the metrics that a run logged of a step.

    Raises:
        DataError: they cannot be read.
    """
    try:
        series = read_logged(path).series
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): it has what the run logged.") from error
    found = {name: values.get(step) for name, values in series.items()}
    return {name: value for name, value in found.items() if value is not None}


def kept_batch(path: Path, config: RLConfig) -> RolloutBatch:
    """Returns the batch of an update as its file has it.

    Raises:
        DataError: the file is missing or broken, or a secret is hidden in a rollout.
    """
    if not path.is_file():
        raise DataError(f"{path} is not there: the run kept no rollouts of this update, or has removed them.")
    rows = [row for row in read_trajectories(path).to_pylist() if row["failure"] is None]
    if any(HIDDEN_TOKEN in row["token"] for row in rows):
        raise DataError(f"{path} has rollouts in which a secret is hidden: they cannot be trained on again.")
    if not rows or any(row["token_advantage"] is None for row in rows):
        raise DataError(f"{path} has no advantages: name the number of an update of train rl.")
    batch = pack([_trajectory(row) for row in rows])
    old_N = None
    scored = optimizer_steps_per_rollout(config) > 1 or always_scores(config)
    if config.algo.old_logprobs is OldLogprobs.ROLLOUT:
        old_N = batch.rollout_logprobs_N
    elif scored and config.algo.old_logprobs is not OldLogprobs.INTERPOLATE:
        old_N = _column(rows, "token_trainer_logprob")
    return evolve(
        batch,
        advantages_N=_column(rows, "token_advantage"),
        ref_logprobs_N=_column(rows, "token_ref_logprob"),
        old_logprobs_N=old_N,
        entropies_N=_column(rows, "token_entropy") if config.algo.top_entropy_quantile < 1 else None,
    )


def weights_before(run: Path, config: RLConfig, step: int) -> str:
    """Returns the directory or name of the model with which an update began.

    Raises:
        DataError: the run did not keep it.
    """
    if step == 1:
        return config.actor.model_name_or_path
    kept = dict(numbered(run, MODEL_OF_STEP))
    if step - 1 not in kept:
        possible = ", ".join(str(number) for number in sorted({1, *(number + 1 for number in kept)}))
        raise DataError(
            f"--step is {step}, but the weights after update {step - 1} were not kept: replay one of {possible}, or "
            "train with --ckpt.save_steps."
        )
    return str(kept[step - 1])


def _check(config: RLConfig, step: int) -> None:
    if step < 1:
        raise ConfigurationError(f"--step is {step}, but updates are numbered from 1.")
    if config.cluster.enable:
        raise ConfigurationError("cluster.enable is set, but an update is replayed in one process: set it to False.")
    if config.data.image_key is not None:
        raise ConfigurationError(
            f"data.image_key is {config.data.image_key!r}, but rollouts are kept without their images, on which the "
            "update depends: replay an update of a run on texts."
        )
    template, estimator = config.algo.kl.teacher_template, config.algo.kl.estimator
    if estimator == KLEstimator.FULL and (moves_reference(config) or config.ref.served):
        raise ConfigurationError(
            "algo.kl.estimator is full, but of a reference that moves or is on a server (algo.kl.ref_sync_steps, "
            "ref.url, ref.urls) nothing is kept: replay an update of a run with another estimator."
        )
    tells_replies = template is not None and bool(TeacherTemplate.read(template).judged)
    if template is not None and config.algo.kl.use_loss and (tells_replies or estimator == KLEstimator.FULL):
        raise ConfigurationError(
            f"algo.kl.estimator is {estimator} with algo.kl.teacher_template, but rollouts are kept without what the "
            "reference read in the place of their prompts: replay an update of a run with another estimator, whose "
            "template tells no reply."
        )
    if step > 1 and optimizer_steps_per_rollout(config) > 1:
        raise ConfigurationError(
            f"The run takes {optimizer_steps_per_rollout(config)} optimizer steps a rollout, and those after the first "
            "depend on the optimizer's state, which models have not: replay --step 1."
        )
    if step > 1 and config.actor.lora.rank:
        raise ConfigurationError("The run trains adapters (actor.lora.rank), which are kept apart: replay --step 1.")


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    kinds: list[tuple[int, int]] = list(zip(row["token_kind"], row["token_turn"], strict=True))
    place = row["prompt_tokens"]
    grammars = json.loads(row.get("grammars") or "{}")  # files of earlier versions have none
    builder = TrajectoryBuilder(row["token"][:place], group_id=row["group_id"], sample_id=row["sample_id"])
    for (kind, turn), part in groupby(kinds[place:]):
        grammar = grammars.get(str(place))
        tokens = slice(place, place := place + len(list(part)))
        if kind != SAMPLED:
            builder.add_observation(row["token"][tokens])
            continue
        generation = Generation(
            token_ids=row["token"][tokens],
            logprobs=row["token_logprob"][tokens],
            versions=row["token_version"][tokens],
            stop_reason=StopReason.STOP,
            grammar=grammar,
        )
        builder.add_action(generation, turn=turn)
        builder.set_reward(math.fsum(row["token_reward"][tokens]))
    return builder.build(stop_reason=StopReason(row["stop_reason"]), score=row["score"], role=row.get("role") or "")


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> torch.Tensor | None:
    if any(row[name] is None for row in rows):
        return None
    return torch.tensor([value for row in rows for value in row[name]], dtype=torch.float32)
