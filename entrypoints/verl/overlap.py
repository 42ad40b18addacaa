"""Translates how rollouts and updates of a verl command share time: in turns, or with each other."""

import math

from rollgrad.entrypoints.names.names_of_verl_seldom_set import ROLLOUT
from rollgrad.entrypoints.verl.draft import RLDraft
from rollgrad.entrypoints.verl.words import FULLY_ASYNC, ONE_STEP_OFF

STALENESS = "async_training.staleness_threshold"
MODE = "trainer.v1.trainer_mode"


def translate_overlap(draft: RLDraft) -> None:
    """Sets `train.async_enable` and what belongs to it, or over-sampling where engines share the models' GPUs.

    Raises:
        ConfigurationError: a value is not of its kind.
    """
    mode = draft.trainer_mode
    _idle(draft, mode)
    ahead = math.ceil(float(draft.value(f"trainer.v1.{mode}.num_warmup_batches", 1)))
    if mode == "colocate_async":
        if ahead:
            draft.set("rollout.generate_batch_size", draft.prompts * (1 + ahead))
        draft.change(MODE, "replies in flight are finished before an update, in verl they go on after it")
    elif not draft.overlaps:
        return
    partial = mode != ONE_STEP_OFF
    if mode == FULLY_ASYNC:
        ahead, partial = _fully_asynchronous(draft)
    if mode != "colocate_async":
        draft.set("train.async_enable", True)
        draft.set("train.max_staleness", ahead)
        if partial and ahead:
            draft.set("train.partial_rollout", "recompute")
    if ahead and not draft.value("algorithm.rollout_correction.bypass_mode", False) and not draft.corrects:
        draft.changed.append(
            "samples of older weights are corrected (algo.correction.level auto), in verl only if asked"
        )


def _fully_asynchronous(draft: RLDraft) -> tuple[int, bool]:
    """Returns the bound on staleness, and whether replies go on under new weights."""
    share = draft.value(STALENESS)
    ahead = math.ceil(share)
    if share != ahead:
        draft.change(STALENESS, f"{ahead}, for whole rollouts may be ahead")
    if draft.counts_prompts:
        draft.set("train.max_steps", max(1, draft.value("rollout.total_rollout_steps") // draft.prompts))
        for name in ("trainer.total_training_steps", "trainer.total_epochs"):
            draft.lose(name, "rollout.total_rollout_steps says how long the run is")
    memory = f"{ROLLOUT}.standalone_gpu_memory_utilization"
    if (share := draft.value(memory)) is not None:
        draft.set("vllm.gpu_memory_utilization", share)
    return ahead, draft.value("async_training.partial_rollout")


def _idle(draft: RLDraft, mode: str) -> None:
    """Notes what is read in another mode alone."""
    for other in ("colocate_async", "separate_async"):
        if other != mode:
            draft.lose(f"trainer.v1.{other}.num_warmup_batches", f"the trainer's mode is {mode}")
    for key in ("nnodes", "n_gpus_per_node"):
        name = f"{ROLLOUT}.{key}"
        if mode != "separate_async" and draft.asks(name):
            draft.lose(name, f"the trainer's mode is {mode}, in which verl does not read it")
