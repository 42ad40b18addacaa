"""Settings that are a library's own, `vllm.extra` and `ds.extra`: flags, files, and what the library does not take."""

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import rollgrad
from rollgrad.adapters.engines.vllm.arguments import OWN as VLLM_OWN
from rollgrad.adapters.engines.vllm.arguments import _engine_arguments, argument_problems
from rollgrad.adapters.models.deepspeed.extra import OWN as DS_OWN
from rollgrad.adapters.models.deepspeed.extra import config_problems
from rollgrad.adapters.models.deepspeed.settings import DeepSpeedSettings, engine_config
from rollgrad.adapters.models.torch.optimizers.muon import MuonSettings
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.application.settings.rules import setting_errors
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.cli.parsing import TrainArguments, parse_run
from rollgrad.entrypoints.composition.engines import vllm_settings
from rollgrad.entrypoints.config_io import dump_config, structure_config
from rollgrad.entrypoints.dry_run import file_problems
from tests.tiny_vision import save_tiny_vlm

NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM's own list is in vLLM")

BOTH = ("--cluster.enable", "--rollout.engine", "vllm")


def read(*words: str) -> tuple[RLConfig, list[str]]:
    _, config, errors = parse_run(TrainArguments, RLConfig, "train rl", [*BOTH, *words])
    return config, [str(error) for error in errors]


def test_flags_give_names_of_the_library_values_of_yaml_nested_by_dots() -> None:
    config, errors = read(
        *("--vllm.extra.kv-cache-dtype", "fp8", "--vllm.extra.cudagraph_capture_sizes", "[1, 2]"),
        *("--vllm.extra.compilation_config.mode=3", "--vllm.extra.enforce_eager", "--train.seed", "7"),
        *("--ds.extra.zero_optimization.overlap_comm", "true", "--ds.extra", "{dump_state: false}"),
    )
    assert errors == []
    assert config.vllm.extra == {
        "kv_cache_dtype": "fp8",
        "cudagraph_capture_sizes": [1, 2],
        "compilation_config": {"mode": 3},
        "enforce_eager": True,
    }
    assert config.ds.extra == {"zero_optimization": {"overlap_comm": True}, "dump_state": False}
    assert config.train.seed == 7
    assert structure_config(yaml.safe_load(dump_config(config))) == config, "as in the run's record"


def test_flags_come_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("ds: {extra: {zero_optimization: {overlap_comm: false, sub_group_size: 5}}}\n")
    config, errors = read("--config", str(file), "--ds.extra.zero_optimization.overlap_comm", "true")
    assert errors == []
    assert config.ds.extra == {"zero_optimization": {"overlap_comm": True, "sub_group_size": 5}}


def test_what_is_no_yaml_and_no_section_is_said_beside_other_problems() -> None:
    _, errors = read("--vllm.extra.block_size", "[1", "--ds.extra", "3", "--train.sed", "1", "--vllm.extra", "{1: 2}")
    assert len(errors) == 4
    assert "--vllm.extra.block_size is '[1', which is not YAML" in errors[0]
    assert "--ds.extra is '3', but it must be a section: write --ds.extra.NAME VALUE" in errors[1]
    assert "--vllm.extra is '{1: 2}', but it must be a section" in errors[2]
    assert "--train.seed" in errors[3]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("--vllm.extra.block_size", "16", "--cluster.enable", "--rollout.engine", "embedded"), "engine vllm"),
        (("--ds.extra.dump_state", "true"), "turn on --cluster.enable"),
    ],
    ids=["vllm", "ds"],
)
def test_they_mean_nothing_without_the_library(words: tuple[str, ...], fix: str) -> None:
    _, config, _ = parse_run(TrainArguments, RLConfig, "train rl", list(words))
    assert any(fix in str(error) and ".extra" in str(error) for error in setting_errors(config))


@NEEDS_VLLM
def test_the_list_of_engine_arguments_is_the_one_of_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_")}
    assert _engine_arguments() == fields
    assert VLLM_OWN.keys() <= fields


@NEEDS_VLLM
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("kv_cache_dtyp", "did you mean --vllm.extra.kv_cache_dtype?"),
        ("zzzzzz", "no engine argument of the vLLM that is installed"),
        *((name, instead) for name, instead in VLLM_OWN.items()),
    ],
)
def test_arguments_that_vllm_has_not_and_those_of_other_settings_are_refused(name: str, sentence: str) -> None:
    (problem,) = argument_problems({name: 1, "block_size": 16})
    assert problem.startswith(f"vllm.extra.{name} is ")
    assert sentence in problem


def test_what_is_set_reaches_the_engine(tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    config, _ = read("--vllm.extra.block_size", "16", "--actor.model_name_or_path", str(tiny_model_dir))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert vllm_settings(config, tokenizer, gpus=False, plays=False)["extra"] == {"block_size": 16}


@pytest.mark.parametrize(("family", "without"), [("qwen3_5", True), ("gemma3", False)])
def test_vllm_makes_no_tower_that_the_trainer_has_not(family: str, without: bool, tmp_path: Path) -> None:
    """transformers loads Qwen3.5 as a language model alone, and Gemma 3 whole."""
    from transformers import AutoTokenizer

    config, _ = read("--actor.model_name_or_path", save_tiny_vlm(family, tmp_path))
    extra = vllm_settings(config, AutoTokenizer.from_pretrained(tmp_path), gpus=False, plays=False)["extra"]
    assert extra == ({"limit_mm_per_prompt": {"image": 0, "video": 0}} if without else {})


@pytest.mark.parametrize(
    ("flags", "gpus", "together"),
    [((), True, None), ((), False, 128), (("--rollout.max_batch_size", "7"), True, 7)],
    ids=str,
)
def test_vllm_chooses_by_the_gpu_how_many_sequences_it_decodes_together(
    flags: tuple[str, ...], gpus: bool, together: int | None, tiny_model_dir: Path
) -> None:
    from transformers import AutoTokenizer

    config, _ = read("--actor.model_name_or_path", str(tiny_model_dir), *flags)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert vllm_settings(config, tokenizer, gpus=gpus, plays=False)["max_batch_size"] == together


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"wall_clock_breakdwn": True}, "did you mean --ds.extra.wall_clock_breakdown?"),
        ({"zero_optimization": {"overlap_com": True}}, "overlap_com, .* did you mean overlap_comm?"),
        ({"data_types": {"grad_accum_dtyp": "bf16"}}, "did you mean --ds.extra.data_types.grad_accum_dtype?"),
        ({"zero_optimization": {"reduce_bucket_size": "big"}}, "reduce_bucket_size is 'big'"),
        ({"communication_data_type": "bf99"}, "DeepSpeed refuses ds.extra: .*bf99"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "DeepSpeed refuses ds.extra: MiCS .* removed"),
        ({"sparse_gradients": True}, "removed"),
        ({"flops_profiler": {"enable": True}}, "did you mean --ds.extra.flops_profiler.enabled?"),
        ({"tensorboard": {"enable": True}}, r"has tensorboard.enable, which is no key of .*Config\."),
        ({"zero_optimization": False}, "must be a section: set --ds.zero_stage"),
        ({"data_types": {"grad_accum_dtype": "bf99"}}, "DeepSpeed refuses ds.extra: .*bf99"),
        ({"zero_optimization": {"cpu_offload": True}}, "set --ds.adam_offload"),
        ({"compile": {"deepcompile": True}}, "DeepCompile takes neither"),
        *(({name: 1}, instead) for name, instead in DS_OWN.items() if "." not in name),
        ({"zero_optimization": {"stage": 3}}, "set --ds.zero_stage"),
    ],
    ids=str,
)
def test_keys_that_deepspeed_does_not_read_and_those_of_other_settings_are_refused(
    extra: dict[str, Any], sentence: str
) -> None:
    (problem,) = config_problems(extra)
    assert "ds.extra" in problem
    assert re.search(sentence.replace("?", r"\?"), problem), problem


@pytest.mark.parametrize(
    "extra",
    [
        {"flops_profiler": {"enabled": True}},
        {"activation_checkpointing": {"partition_activations": True}},
        {"aio": {"block_size": 4096}},
        {"tensorboard": {"enabled": False}},
        {"comms_logger": {"enabled": True}},
        {"timers": {"throughput": {"enabled": False}}},
        {"checkpoint": {"parallel_write": {"pipeline_stage": True}}},
        {"zero_optimization": {"leaf_module": {"classes": ["Block"]}, "overlap_comm": True}},
    ],
    ids=str,
)
def test_no_section_that_deepspeed_reads_is_refused(extra: dict[str, Any]) -> None:
    assert list(config_problems(extra)) == []


def test_what_is_set_reaches_deepspeed_section_by_section() -> None:
    extra = {"zero_optimization": {"overlap_comm": True}, "communication_data_type": "bf16", "dump_state": True}
    weights = [torch.nn.Parameter(torch.zeros(3))]
    plain = engine_config(OptimizerSettings(lr=1.0), DeepSpeedSettings(), weights, clips=True)
    config = engine_config(OptimizerSettings(lr=1.0), DeepSpeedSettings(extra=extra), weights, clips=True)
    assert config.pop("dump_state") is True
    assert config.pop("communication_data_type") == "bf16"
    assert plain.pop("communication_data_type") == "fp32"
    assert config["zero_optimization"].pop("overlap_comm") is True
    assert config == plain
    wrong = DeepSpeedSettings(extra={"zero_optimization": {"stage": 1}})
    with pytest.raises(ConfigurationError, match=re.escape("set --ds.zero_stage")):
        engine_config(OptimizerSettings(lr=1.0), wrong, weights, clips=True)


def test_muon_keeps_all_matrices_of_divided_parameters_in_one_group() -> None:
    """In several it would write one group's momentum over the weights of another."""
    weights = [torch.nn.Parameter(torch.zeros(3, 3))]
    divided = DeepSpeedSettings(zero_stage=3, extra={"zero_optimization": {"sub_group_size": 5}})
    with pytest.raises(ConfigurationError, match=re.escape("leave --ds.extra.zero_optimization.sub_group_size out")):
        engine_config(OptimizerSettings(lr=1.0, muon=MuonSettings(lr=1.0)), divided, weights, clips=True)
    config = engine_config(OptimizerSettings(lr=1.0), divided, weights, clips=True)
    assert config["zero_optimization"]["sub_group_size"] == 5


@NEEDS_VLLM
def test_all_problems_are_said_before_anything_is_loaded(tiny_model_dir: Path, tmp_path: Path) -> None:
    config, _ = read(
        *("--actor.model_name_or_path", str(tiny_model_dir), "--ckpt.output_dir", str(tmp_path / "out")),
        *("--vllm.extra.dtype", "auto", "--vllm.extra.blok_size", "3", "--ds.extra.dump_stat", "true"),
    )
    said = "\n".join(map(str, file_problems(config).values()))
    for fix in ("--actor.dtype", "--vllm.extra.block_size", "--ds.extra.dump_state"):
        assert fix in said


def test_on_a_cpu_vllm_is_not_asked_for_experts(tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    model = ("--actor.model_name_or_path", str(tiny_model_dir))
    config, _ = read(*model, "--actor.router_replay", "engine", "--rollout.engine", "vllm")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert vllm_settings(config, tokenizer, gpus=True, plays=False)["records_experts"]
    with pytest.raises(ConfigurationError, match=r"without a GPU.*--actor\.router_replay trainer"):
        vllm_settings(config, tokenizer, gpus=False, plays=False)
    other, _ = read(*model)
    assert not vllm_settings(other, tokenizer, gpus=False, plays=False)["records_experts"]


def test_a_notebook_completes_the_public_names() -> None:
    assert set(rollgrad.__all__) <= set(dir(rollgrad))
