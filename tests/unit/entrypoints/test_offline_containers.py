"""Messages of containers to the processes of a cluster."""

import os
from pathlib import Path
from typing import Any

import pytest
import structlog
from attrs import evolve
from dependency_injector import providers

from rollgrad.adapters.checkpoints.fingerprint import model_fingerprint
from rollgrad.adapters.checkpoints.states import save_state
from rollgrad.adapters.data.examples.prepared import PreparedExamples
from rollgrad.application.settings.dpo import DPORun, PreferenceModelConfig
from rollgrad.application.settings.kto import KTORun, UnpairedModelConfig
from rollgrad.application.settings.prm import PRMRun, StepModelConfig
from rollgrad.application.settings.rm import RewardModelConfig, RMRun
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import ActorConfig
from rollgrad.application.settings.sections.ckpt import CheckpointConfig, Resume
from rollgrad.application.settings.sections.cluster import ClusterConfig
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.application.settings.sections.examples import (
    ExampleDataConfig,
    ExampleTrainConfig,
    LabelDataConfig,
    PairDataConfig,
    RowsConfig,
    StepDataConfig,
)
from rollgrad.application.settings.sections.ref import RefConfig
from rollgrad.application.settings.sft import SFTRun, SupervisedModelConfig
from rollgrad.domain.algorithms.preference_settings import PreferenceSettings
from rollgrad.domain.ports.checkpoint_store import TrainingState
from rollgrad.entrypoints.composition.cluster import Cluster, Role, neighbours
from rollgrad.entrypoints.composition.offline.dpo import dpo_container, make_dpo_roles
from rollgrad.entrypoints.composition.offline.kto import kto_container
from rollgrad.entrypoints.composition.offline.preparation import cache_directory, make_total_steps, reference_directory
from rollgrad.entrypoints.composition.offline.prm import prm_container
from rollgrad.entrypoints.composition.offline.reference import reference_fingerprint, reference_key
from rollgrad.entrypoints.composition.offline.rm import rm_container
from rollgrad.entrypoints.composition.offline.sft import sft_container
from rollgrad.entrypoints.composition.rl.container import rl_container
from rollgrad.entrypoints.composition.rl.data import make_rollouts

DPO = DPORun(
    actor=PreferenceModelConfig(model_name_or_path="m", num_nodes=2, num_gpus_per_node=3),
    data=PairDataConfig(dataset="nowhere.jsonl"),
)
SFT = SFTRun(actor=SupervisedModelConfig(model_name_or_path="m"), data=ExampleDataConfig(dataset="nowhere.jsonl"))
KTO = KTORun(actor=UnpairedModelConfig(model_name_or_path="m"), data=LabelDataConfig(dataset="nowhere.jsonl"))
RM = RMRun(actor=RewardModelConfig(model_name_or_path="m"), data=PairDataConfig(dataset="nowhere.jsonl"))
PRM = PRMRun(actor=StepModelConfig(model_name_or_path="m"), data=StepDataConfig(dataset="nowhere.jsonl"))
RL = RLConfig(actor=ActorConfig(model_name_or_path="m"), data=DataConfig(prompt_dataset="nowhere.jsonl"))


@pytest.mark.parametrize(
    ("make", "run"),
    [
        (dpo_container, DPO),
        (kto_container, KTO),
        (rm_container, RM),
        (prm_container, PRM),
        (sft_container, SFT),
        (rl_container, RL),
    ],
)
def test_a_process_that_is_told_the_number_of_steps_reads_no_data(make: Any, run: Any) -> None:
    container = make(run)
    container.total_steps.override(providers.Object(7))
    assert container.actor_steps() == 7


def test_the_reference_has_processes_where_the_actor_cannot_stand_for_it() -> None:
    actor = Role(6, 3)
    assert make_dpo_roles(DPO) == {"actor": actor}
    named = evolve(DPO, ref=RefConfig(model_name_or_path="r"))
    continued = evolve(DPO, ckpt=CheckpointConfig(resume=Resume.AUTO))
    streamed = evolve(DPO, data=evolve(DPO.data, stream=True))
    for run in (named, continued, streamed):
        assert make_dpo_roles(run) == {"actor": actor, "reference": actor}
        assert dpo_container(run).roles() == make_dpo_roles(run)
    for run in (DPO, named):  # the reference shares the actor's GPUs, where it is there
        container = dpo_container(run)
        processes = {name: role.processes for name, role in container.roles().items()}
        assert neighbours("actor", processes, container.colocated()) == sorted(processes)
    for run in (continued, streamed):
        assert make_dpo_roles(evolve(run, dpo=PreferenceSettings(loss=("simpo",)))) == {"actor": actor}


def test_more_epochs_take_the_steps_of_the_examples_that_are_left(tmp_path: Path) -> None:
    """100 examples in steps of 64: the first epoch has ended with a step of 36."""
    examples, train = range(100), ExampleTrainConfig(batch_size=64, num_epochs=3)
    ckpt = CheckpointConfig(output_dir=str(tmp_path), resume=Resume.AUTO)
    assert make_total_steps(train, examples, ckpt) == 5
    state = {"run": {}, "update": {}, "before": {}}
    position = {"step": 2, "seed": 1, "epoch": 1, "index": 0}
    save_state(tmp_path, TrainingState(step=2, state=state, description={"position": position}), keep=1)
    assert make_total_steps(train, examples, ckpt) == 2 + 4
    assert make_total_steps(evolve(train, num_epochs=1), examples, ckpt) == 2
    assert make_total_steps(train, examples, evolve(ckpt, resume=Resume.NEVER)) == 5
    save_state(tmp_path, TrainingState(step=2, state=state, description={}), keep=1)  # of an earlier version
    assert make_total_steps(train, examples, ckpt) == 5


def test_log_probs_of_references_are_kept_where_data_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own, named = RowsConfig(), RowsConfig(cache_dir="/data/cache")
    assert (cache_directory(own), reference_directory(own)) == (
        tmp_path / "rollgrad" / "examples",
        tmp_path / "rollgrad" / "reference",
    )
    assert (cache_directory(named), reference_directory(named)) == (Path("/data/cache"), Path("/data/cache/reference"))


def test_references_that_differ_in_any_weight_have_keys_of_their_own(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(os.urandom(2**23))
    run = evolve(DPO, actor=PreferenceModelConfig(model_name_or_path=str(tmp_path)))
    one, probed = reference_key(run, reference_fingerprint(run), "data"), model_fingerprint(str(tmp_path))
    with weights.open("r+b") as file:
        file.seek(2**18)  # between two probes
        file.write(b"other weights")
    assert model_fingerprint(str(tmp_path)) == probed
    assert reference_key(run, reference_fingerprint(run), "data") != one
    assert reference_key(run, reference_fingerprint(run), None) is None


def test_a_callers_own_examples_need_no_fingerprint() -> None:
    container = sft_container(SFT)
    container.examples.override(providers.Object(["an example"]))
    assert container.description()["data"] is None
    free = dpo_container(evolve(DPO, dpo=PreferenceSettings(loss=("simpo",))))
    free.examples.override(providers.Object(["a pair"]))
    assert free.pairs() == ["a pair"]
    compared = rm_container(RM)
    compared.examples.override(providers.Object(["a pair"]))
    assert compared.pairs() == ["a pair"]


def test_a_clusters_reference_ends_when_the_log_probs_are_there() -> None:
    run = evolve(DPO, cluster=ClusterConfig(enable=True), ref=RefConfig(model_name_or_path="r"))
    made, ended = [], []

    class FakeCluster:
        def reference(self, make: Any) -> object:
            made.append(object())
            return made[-1]

        def end(self, role: str) -> None:
            ended.append(role)

    container = dpo_container(run)
    container.cluster.override(providers.Object(FakeCluster()))
    assert container.loaded_reference() is container.loaded_reference()
    container.unload()
    assert ended == ["reference"]
    assert container.loaded_reference() is made[1], "another one, for held-out pairs"


def test_a_cluster_ends_the_processes_of_one_role() -> None:
    class Group:
        def __init__(self, name: str) -> None:
            self.name, self.closed = name, 0

        def close(self) -> None:
            self.closed += 1

    cluster = Cluster.__new__(Cluster)
    actor, reference = groups = [Group("actor"), Group("reference")]
    cluster._groups = list[Any](groups)
    cluster.end("reference")
    cluster.end("reference")
    assert (actor.closed, reference.closed, cluster._groups) == (0, 1, [actor])


class Few(PreparedExamples):
    """Two rows, of which nothing but their number is asked."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return 2


def test_a_step_of_more_examples_than_rows_is_told() -> None:
    with structlog.testing.capture_logs() as logs:
        make_total_steps(ExampleTrainConfig(batch_size=2, max_steps=1), Few(), CheckpointConfig())
        assert logs == []
        make_total_steps(ExampleTrainConfig(batch_size=3, max_steps=1), Few(), CheckpointConfig())
    assert [(log["event"], log["rows"]) for log in logs] == [("rows repeat within a step", 2)]


def test_a_rollout_of_more_prompts_than_there_are_is_told() -> None:
    config = RLConfig()
    config.rollout.batch_size, config.train.max_steps = 3, 1
    prompts: Any = [1, 2]
    with structlog.testing.capture_logs() as logs:
        assert make_rollouts(config, prompts) == 1
    assert [(log["event"], log["prompts"]) for log in logs] == [("prompts repeat within a rollout", 2)]
