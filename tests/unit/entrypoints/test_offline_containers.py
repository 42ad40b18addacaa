"""What the containers of offline trainers say to the processes of a cluster."""

from typing import Any

import pytest
from attrs import evolve
from dependency_injector import providers

from rollgrad.application.settings.dpo import DPORun, PreferenceModelConfig
from rollgrad.application.settings.sections.ckpt import CheckpointConfig, Resume
from rollgrad.application.settings.sections.examples import ExampleDataConfig, PairDataConfig
from rollgrad.application.settings.sections.ref import RefConfig
from rollgrad.application.settings.sft import SFTRun, SupervisedModelConfig
from rollgrad.domain.algorithms.settings import PreferenceSettings
from rollgrad.entrypoints.composition.cluster import Role, neighbours
from rollgrad.entrypoints.composition.dpo import dpo_container, make_dpo_roles
from rollgrad.entrypoints.composition.sft import sft_container

DPO = DPORun(
    actor=PreferenceModelConfig(model_name_or_path="m", num_nodes=2, num_gpus_per_node=3),
    data=PairDataConfig(dataset="nowhere.jsonl"),
)
SFT = SFTRun(actor=SupervisedModelConfig(model_name_or_path="m"), data=ExampleDataConfig(dataset="nowhere.jsonl"))


@pytest.mark.parametrize(("make", "run"), [(dpo_container, DPO), (sft_container, SFT)])
def test_a_process_that_is_told_the_number_of_steps_reads_no_data(make: Any, run: Any) -> None:
    container = make(run)
    container.total_steps.override(providers.Object(7))
    assert container.actor_steps() == 7


def test_the_reference_has_processes_where_the_actor_cannot_stand_for_it() -> None:
    actor = Role(6, 3)
    assert make_dpo_roles(DPO) == {"actor": actor}
    named = evolve(DPO, ref=RefConfig(model_name_or_path="r"))
    continued = evolve(DPO, ckpt=CheckpointConfig(resume=Resume.AUTO))
    for run in (named, continued):
        assert make_dpo_roles(run) == {"actor": actor, "reference": actor}
        assert dpo_container(run).roles() == make_dpo_roles(run)
    for run in (DPO, named):  # the reference shares the actor's GPUs, where it is there
        container = dpo_container(run)
        processes = {name: role.processes for name, role in container.roles().items()}
        assert neighbours("actor", processes, container.colocated()) == sorted(processes)
    free = evolve(continued, dpo=PreferenceSettings(loss=("simpo",)))
    assert make_dpo_roles(free) == {"actor": actor}
