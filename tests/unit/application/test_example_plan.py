"""The memory plan of runs over examples."""

from functools import partial
from pathlib import Path

import pytest
import torch
from attrs import evolve

from rollgrad.application.settings.dpo import DPORun
from rollgrad.application.settings.example_plan import as_sampling_nothing, frozen_model
from rollgrad.application.settings.kd import KDRun
from rollgrad.application.settings.kto import KTORun
from rollgrad.application.settings.memory_places import Machine, RoleMemory
from rollgrad.application.settings.memory_plan import memory_plan
from rollgrad.application.settings.memory_plan_passes import head_bytes
from rollgrad.application.settings.memory_plan_tokens import pass_tokens
from rollgrad.application.settings.model_shape import ModelShape
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.prm import PRMRun
from rollgrad.application.settings.rm import RMRun
from rollgrad.application.settings.sft import SFTRun
from rollgrad.entrypoints import dry_run
from rollgrad.entrypoints.example_plan import _as_trained

SHAPE = ModelShape(parameters=1000, layers=3, hidden=8, kv_heads=2, head_dim=4, stored=2)
MACHINE = Machine(gpu=0, memory=2**40)


def plan(run: OfflineRun) -> dict[str, RoleMemory]:
    config = as_sampling_nothing(run, longest=50)
    reference = SHAPE if config.ref.model_name_or_path else None
    rows = memory_plan(config, SHAPE, compute_bytes=2, machine=MACHINE, reference=reference)
    return {row.role: row for row in rows}


@pytest.mark.parametrize("kind", [SFTRun, DPORun, KTORun, RMRun, PRMRun])
def test_a_trainer_holds_its_model_alone(kind: type[OfflineRun]) -> None:
    rows = plan(kind())
    assert list(rows) == ["actor"]
    assert (rows["actor"].weights, rows["actor"].gradients, rows["actor"].optimizer) == (2000, 4000, 12000)


def test_a_pass_has_as_many_tokens_as_a_step_at_most() -> None:
    run = SFTRun()
    run.train.batch_size, run.train.max_tokens_per_micro_batch = 4, 1000
    for longest, tokens in ((50, 200), (400, 1000), (3000, 3000)):
        assert pass_tokens(as_sampling_nothing(run, longest=longest), SHAPE, 1).distinct == tokens
    run.train.batch_tokens = 120
    assert pass_tokens(as_sampling_nothing(run, longest=50), SHAPE, 1).distinct == 150


def test_an_average_and_a_reference_that_moves_are_in_memory() -> None:
    averaged, moving = SFTRun(), DPORun()
    averaged.train.enable_ema, moving.dpo.ref_sync_steps = True, 8
    for run in (averaged, moving):
        assert plan(run)["actor"].optimizer == 12000 + 4000


def test_models_that_stay_beside_the_one_that_is_trained() -> None:
    def made(kind: type[OfflineRun], **settings: object) -> OfflineRun:
        run = kind()
        run.actor.model_name_or_path = "actor"
        for name, value in settings.items():
            section, key = name.split("__")
            setattr(getattr(run, section), key, value)
        return run

    taught = {"teacher__model_name_or_path": "teacher"}
    for run, model in (
        (made(KDRun, **taught), "teacher"),
        (made(KDRun, kd__cache=True, kd__top_k=8, **taught), None),
        (made(KDRun, kd__spans=True, **taught), None),
        (made(DPORun), None),
        (made(DPORun, ref__model_name_or_path="other"), None),
        (made(DPORun, data__stream=True), "actor"),
        (made(DPORun, data__stream=True, ref__model_name_or_path="other"), "other"),
        (made(DPORun, data__stream=True, dpo__loss=("simpo",)), None),
        (made(KTORun, data__stream=True), "actor"),
        (made(KTORun, data__stream=True, kto__ref_sync_steps=8), None),
        (made(SFTRun, data__stream=True), None),
    ):
        assert frozen_model(run) == model
        assert list(plan(run)) == ["actor", *(["reference"] if model else [])]
    adapted = made(DPORun, data__stream=True)
    adapted.actor.lora.rank = 4
    assert frozen_model(adapted) is None, "it is the same model without its adapters"


@pytest.mark.parametrize("tied", [False, True])
def test_a_reward_model_has_no_output_embedding(tied: bool) -> None:
    config = as_sampling_nothing(RMRun(), longest=50)
    writes = evolve(SHAPE, embedding=200, tied=tied)
    (whole,), (scores,) = (
        memory_plan(config, shape, compute_bytes=2, machine=MACHINE) for shape in (writes, writes.without_head())
    )
    gone = 0 if tied else 200
    assert (scores.weights, scores.gradients, scores.optimizer) == tuple(n * (1000 - gone) for n in (2, 4, 12))
    (body,) = memory_plan(config, SHAPE, compute_bytes=2, machine=MACHINE)
    assert scores.passes == body.passes < whole.passes, "neither logits, nor the gradient of what makes them"
    assert writes.without_head().without_head() == writes.without_head()


def test_a_run_that_trains_a_reward_model_is_planned_without_the_head_of_its_model(tiny_model_dir: Path) -> None:
    run = RMRun()
    run.actor.model_name_or_path = str(tiny_model_dir)
    config = as_sampling_nothing(run, longest=50)
    whole, scores = (
        dry_run._shapes(config, torch.float32, torch.device("cpu"), becomes=becomes)["actor"]
        for becomes in (dry_run.as_it_is, partial(_as_trained, run))
    )
    assert scores == whole.without_head()
    assert whole.parameters - scores.parameters == (0 if whole.tied else whole.embedding)


@pytest.mark.parametrize("size", [1, 2])
def test_a_process_reward_model_reads_two_rows_of_its_output_embedding(size: int) -> None:
    run = PRMRun()
    run.ds.tensor_parallel_size = size
    config = as_sampling_nothing(run, longest=50)
    writes = evolve(SHAPE, embedding=200)
    compares = _as_trained(run, writes)
    tokens = 50
    whole, pairs = (head_bytes(config, shape, tokens, 2, 0, gradients=True) for shape in (writes, compares))
    if size > 1:
        assert pairs == whole, "of their own rows processes compute all"
    else:
        assert pairs == tokens * 8 * 2 * 4 + 200 * 2 < whole
    assert _as_trained(DPORun(), writes) == writes
