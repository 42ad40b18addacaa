"""The sizes that are refused are those that vLLM's own layers and classes refuse."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgrad.adapters.engines.vllm.division import division_problems
from rollgrad.entrypoints.cli.main import main

pytestmark = pytest.mark.slow

LAYERS = "vllm.model_executor.layers"
SIZES = range(1, 9)


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets by how many processes vLLM's layers take themselves to be shared."""
    from vllm.config import VllmConfig, set_current_vllm_config

    def among(processes: int) -> None:
        for module in ("linear", "vocab_parallel_embedding"):
            monkeypatch.setattr(f"{LAYERS}.{module}.get_tensor_model_parallel_world_size", lambda: processes)
            monkeypatch.setattr(f"{LAYERS}.{module}.get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: processes)
        monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: 0)

    with set_current_vllm_config(VllmConfig()), torch.device("meta"):
        yield among


def config_of(**numbers: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **{"hidden_size": 24 * 840, "head_dim": 8, "num_hidden_layers": 3, "intermediate_size": 840 * 64, **numbers}
    )


def holds(make: Callable[[], Any]) -> bool:
    try:
        make()
    except AssertionError:
        return False
    return True


def test_heads_are_refused_as_vllm_s_attention_refuses_them(divided: Callable[[int], None]) -> None:
    from vllm.model_executor.layers.linear import QKVParallelLinear

    for processes in SIZES:
        divided(processes)
        for keys, each in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3)):
            heads = keys * each
            config = config_of(num_attention_heads=heads, num_key_value_heads=keys, vocab_size=840 * 64)
            found = [*division_problems(config, processes, 1)]
            assert (not found) == holds(lambda: QKVParallelLinear(64, 8, heads, keys)), (processes, heads, keys)  # noqa: B023


def test_vocabularies_and_widths_are_refused_as_vllm_s_layers_refuse_them(divided: Callable[[int], None]) -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for processes in SIZES:
        divided(processes)
        many = {"num_attention_heads": 840, "num_key_value_heads": 840}
        for size in (64, 100, 192, 193, 320, 448, 6400):
            (rows, *_) = [*division_problems(config_of(vocab_size=size, **many), processes, 1), None]
            assert (rows is None) == holds(lambda: ParallelLMHead(size, 64)), (processes, size)  # noqa: B023
            config = config_of(vocab_size=840 * 64, **many, intermediate_size=size)
            (width, *_) = [*division_problems(config, processes, 1), None]
            made = holds(lambda: MergedColumnParallelLinear(64, [size] * 2))  # noqa: B023
            assert (width is None) == made == holds(lambda: RowParallelLinear(size, 64)), (processes, size)  # noqa: B023


@pytest.mark.parametrize(("gpus", "sizes"), [(None, "to 2 or 4."), (3, "to 2.")])
def test_the_nearest_sizes_that_fit_are_named(gpus: int | None, sizes: str) -> None:
    config = config_of(vocab_size=840 * 64, num_attention_heads=8, num_key_value_heads=8, intermediate_size=64)
    assert all(problem.endswith(sizes) for problem in division_problems(config, 3, 1, gpus=gpus))
    assert [*division_problems(config, 4, 1, gpus=gpus)] == [] or gpus == 3


MANY = ["--tensor_parallel_size", "5", "--pipeline_parallel_size", "3"]


def test_all_rules_are_said_at_once_before_anything_is_loaded(
    wide_headed_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = ["serve", "agent", "--model", str(wide_headed_model_dir), "--engine", "vllm", "--port", "0", *MANY]
    assert main(served) == 2
    told = capsys.readouterr().err
    for words in ("attention heads", "heads of keys and values", "inner values", "has 2 layers"):
        assert words in told
    assert "--tensor_parallel_size to 4" in told


def test_a_run_and_its_rehearsal_say_them_too(
    sums_flags: dict[str, str], wide_headed_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"rollout.engine": "vllm", "actor.model_name_or_path": str(wide_headed_model_dir)}
    sizes = {"vllm.tensor_parallel_size": "3", "vllm.pipeline_parallel_size": "3"}
    words = [word for flag, value in (sums_flags | named | sizes).items() for word in (f"--{flag}", value)]
    for more in ([], ["--dry_run"]):
        assert main(["train", "rl", *words, *more]) == 2
        told = capsys.readouterr().err
        assert "--vllm.tensor_parallel_size" in told
        assert "--vllm.pipeline_parallel_size to 2 at most" in told
