"""The memory plan of a run says what does not fit, with which recomputation it would, and what else is odd."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve
from rich.console import Console
from transformers import AutoConfig

from rollgrad.adapters.models.torch.layers.images import model_factory
from rollgrad.application.settings.example_plan import as_sampling_nothing
from rollgrad.application.settings.memory_places import Machine, places
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import Checkpointing, DType
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.reward import Verifier
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sft import SFTRun
from rollgrad.application.settings.way_out import way_out
from rollgrad.entrypoints import dry_run, planned_machine, rehearsal
from tests.tiny_vision import save_tiny_vlm

CPU = torch.device("cpu")


def test_a_run_that_does_not_fit_is_told_the_way_out(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RLConfig()
    config.actor.model_name_or_path, config.actor.dtype = str(tiny_model_dir), DType.FLOAT32
    config.rollout.max_new_tokens = config.data.max_prompt_tokens = 512
    config.rollout.batch_size, config.rollout.n_samples_per_prompt = 8, 4
    held = {}
    for kind in Checkpointing:
        changed = evolve(config, actor=evolve(config.actor, gradient_checkpointing=kind))
        machine = Machine(gpu=0, memory=0)
        rows = dry_run._rows(changed, dry_run._shapes(changed, torch.float32, CPU), machine, torch.float32)
        (held[kind],) = (place.held for place in places(rows, machine))
    assert held[Checkpointing.FULL] < held[Checkpointing.SELECTIVE] < held[Checkpointing.OFF]

    def said(memory: int) -> list[str]:
        monkeypatch.setattr(planned_machine, "this_machine", lambda: Machine(gpu=0, memory=memory))
        return dry_run.show_plan(config, Console(quiet=True))

    assert said(held[Checkpointing.OFF]) == []
    for kind in (Checkpointing.SELECTIVE, Checkpointing.FULL):
        (short,) = said(held[kind])
        assert "This may not fit" in short
        assert short.endswith(f" It would fit with --actor.gradient_checkpointing {kind}.")
    (short,) = said(held[Checkpointing.FULL] - 1)
    assert "--actor.offload_activations" in short
    assert "(--ds.sequence_parallel_size)" in short, "for samples that are longer than a pass"
    assert "It would fit" not in short


@pytest.mark.parametrize(
    ("strategy", "offloads", "flags"),
    [
        (Strategy.DEEPSPEED, lambda config: config.ds.adam_offload, "--ds.zero_stage 3 --ds.adam_offload"),
        (Strategy.FSDP2, lambda config: config.cluster.offload, "--cluster.offload"),
    ],
)
def test_a_cluster_is_told_to_divide_and_to_offload(
    strategy: Strategy, offloads: Callable[[RLConfig], bool], flags: str
) -> None:
    config, gpus = RLConfig(), Machine(gpu=80, memory=1000)
    config.cluster.enable = config.train.colocate_all = True
    config.cluster.strategy, config.rollout.engine = strategy, Engine.VLLM
    assert way_out(config, gpus, offloads) == f"It would fit with {flags}."
    sleeps = way_out(config, gpus, lambda changed: changed.train.optimizer_sleeps)
    assert sleeps == f"It would fit with {flags.rpartition('--')[0]}--train.optimizer_sleeps."
    assert way_out(config, Machine(gpu=0, memory=1000), offloads) is None, "there is no other memory"
    config.train.optimizer_sleeps = True
    told = way_out(config, gpus, lambda changed: offloads(changed) and not changed.train.optimizer_sleeps)
    assert told is not None
    assert "--train.optimizer_sleeps false" in told


def test_a_cluster_is_told_to_share_sequences() -> None:
    config, gpus = RLConfig(), Machine(gpu=80, memory=1000)
    config.cluster.enable, config.rollout.engine, config.actor.num_gpus_per_node = True, Engine.VLLM, 8

    def shares(changed: RLConfig) -> bool:
        return changed.ds.sequence_parallel_size >= 4

    assert way_out(config, gpus, shares) == "It would fit with --ds.zero_stage 3 --ds.sequence_parallel_size 4."
    told = way_out(config, gpus, lambda changed: shares(changed) and changed.ds.adam_offload)
    assert told == "It would fit with --ds.zero_stage 3 --ds.adam_offload --ds.sequence_parallel_size 4."
    config.actor.num_gpus_per_node = 6
    assert way_out(config, gpus, shares) is None, "4 processes are no groups of 6"
    config.actor.num_gpus_per_node, config.ds.tensor_parallel_size = 8, 2
    assert way_out(config, gpus, shares) is None, "processes share layers, not tokens too"


def test_a_cluster_is_told_that_frozen_models_may_rest() -> None:
    config, gpus = RLConfig(), Machine(gpu=80, memory=1000)
    config.cluster.enable = config.train.colocate_all = True
    config.rollout.engine = Engine.VLLM
    assert way_out(config, gpus, lambda changed: changed.ref.offload or changed.reward.offload) is None, "there is none"
    config.algo.kl.init_coef = 0.1
    assert way_out(config, gpus, lambda changed: changed.ref.offload) == "It would fit with --ref.offload."
    config.reward.model_name_or_path = "judge"
    told = way_out(config, gpus, lambda changed: changed.ref.offload and changed.reward.offload)
    assert told == "It would fit with --ref.offload --reward.offload."
    config.ds.tensor_parallel_size = 2
    assert way_out(config, gpus, lambda changed: changed.ref.offload) is None, "processes that share layers refuse it"


@pytest.mark.parametrize("sees", [False, True])
def test_the_plan_counts_the_tower_of_a_run_that_sees_images(sees: bool, tmp_path: Path) -> None:
    """Qwen3.5, which transformers loads without it for texts."""
    path = save_tiny_vlm("qwen3_5", tmp_path)
    settings = AutoConfig.from_pretrained(path)
    loaded = model_factory(settings, images=sees).from_config(settings)
    rl, sft = RLConfig(), SFTRun()
    rl.data.max_prompt_tokens, rl.rollout.max_new_tokens = 63, 1  # as the other's, so that they are measured once
    for run in (rl, sft):
        run.actor.model_name_or_path, run.data.image_key = path, "image" if sees else None
    for config in (rl, as_sampling_nothing(sft, longest=64)):
        shape = dry_run._shapes(config, torch.float32, CPU)["actor"]
        assert shape.parameters == sum(parameter.numel() for parameter in loaded.parameters())


def test_optimizer_steps_without_a_ratio_are_said(tiny_model_dir: Path) -> None:
    config = RLConfig()
    config.actor.model_name_or_path, config.actor.policy_loss_type = str(tiny_model_dir), "policy_gradient"
    for epochs, said in ((1, False), (2, True)):
        config.train.max_epochs = epochs
        console = Console(record=True, width=1000, file=io.StringIO())
        dry_run.show_plan(config, console)
        assert ("policy_gradient has no ratio, but a rollout feeds 2" in console.export_text()) == said


def test_the_plan_is_of_what_the_reference_is_told(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RLConfig()
    config.actor.model_name_or_path, config.ckpt.output_dir = str(tiny_model_dir), str(tmp_path / "out")
    config.data.prompt_dataset, config.reward.verifier = str(tmp_path / "prompts.jsonl"), Verifier.LAST_NUMBER
    config.rollout.max_new_tokens = 16
    config.algo.kl.init_coef, config.algo.kl.teacher_template = 0.1, "{prompt} It is {label}, as everybody knows."
    Path(config.data.prompt_dataset).write_text(json.dumps({"input": "What is 2 + 2?", "label": "4"}))
    planned: list[int] = []
    monkeypatch.setattr(rehearsal, "show_plan", lambda *_, told: planned.append(told))
    rehearsal.rehearse(config, [])
    own, read = map(int, re.findall(r"\((\d+) tokens", capsys.readouterr().out))
    assert planned == [read - own] != [0]
