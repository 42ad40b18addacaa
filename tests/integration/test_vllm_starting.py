"""vLLM as it starts and ends: its threads and processes, a run of its own, and what is said when it fails."""

import asyncio
import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rollgrad.adapters.engines.vllm.engine import VLLMEngine
from rollgrad.adapters.engines.vllm.launch import start
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.weights.channel import PROBE_TOKENS, EngineWeights
from rollgrad.application.settings.sections.vllm import SyncBackend
from rollgrad.domain.errors import ConfigurationError, EngineError, MissingExtraError
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.entrypoints.cli.main import main
from tests.caught_requests import begun, caught
from tests.example_runs import logged
from tests.fakes import cluster
from tests.integration.test_vllm_engine import HALF_TOLERANCE, PROMPT, TOLERANCE, ask, learn, policy, scores
from tests.tiny_architectures import tiny_model
from tests.tiny_models import SHARE, saved, tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_host")]

__all__ = ["policy"]  # a fixture

AHEAD: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}
"""Engine arguments by which vLLM takes what followed the last tokens before for what follows them now."""

ON_A_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="is about vLLM on a CPU")


def test_without_vllm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm.engine.arg_utils", None)
    with pytest.raises(MissingExtraError, match=r"pip install rollgrad\[vllm\]"):
        VLLMEngine("any", eos_token_ids=())


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="vLLM did not start"):
        VLLMEngine(str(tmp_path / "nothing"), eos_token_ids=())


@ON_A_CPU
def test_the_core_has_the_threads_that_it_is_given(
    wide_headed_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    seen: list[str] = []
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda _, **__: seen.append(os.environ["OMP_NUM_THREADS"]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings: dict[str, Any] = {"model": str(wide_headed_model_dir), "max_num_seqs": 8}
    for threads, workers in ((3, 1), (4, 2), (None, 2)):
        start(SyncBackend.SHARED_MEMORY, threads=threads, tensor_parallel_size=workers, **settings)
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert seen == ["3", "2", "1"]


@pytest.mark.parametrize(
    ("longest", "held"), [(None, None), (100, 100), (512, 512), (5000, 512), (3, PROBE_TOKENS)], ids=str
)
def test_vllm_holds_what_a_run_can_ask_for_and_no_more_than_the_model_has_positions(
    wide_headed_model_dir: Path, monkeypatch: pytest.MonkeyPatch, longest: int | None, held: int | None
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    seen: list[Any] = []
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda arguments, **_: seen.append(arguments))
    start(SyncBackend.SHARED_MEMORY, longest=longest, model=str(wide_headed_model_dir), max_num_seqs=8)
    assert seen[0].max_model_len == held


def test_guessing_ahead_is_refused_with_a_record_of_experts(wide_headed_model_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"leave --vllm\.extra\.speculative_config or --actor\.router_replay"):
        start(
            SyncBackend.SHARED_MEMORY,
            model=str(wide_headed_model_dir),
            max_num_seqs=8,
            extra=AHEAD,
            records_experts=True,
        )


@ON_A_CPU
def test_guessing_ahead_is_refused_on_a_cpu_with_layers_that_remember(tiny_tokenizer: Any, tmp_path: Path) -> None:
    path = saved(tiny_model("falcon_h1"), tiny_tokenizer, tmp_path / "model")
    with pytest.raises(ConfigurationError, match=r"cannot take back .* leave --vllm\.extra\.speculative_config"):
        start(SyncBackend.SHARED_MEMORY, model=str(path), max_num_seqs=8, extra=AHEAD)


@pytest.mark.parametrize(("dtype", "products"), [("float32", "ieee"), ("bfloat16", None)])
def test_on_a_gpu_kernels_of_a_model_in_float32_multiply_in_float32(
    wide_headed_model_dir: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, products: str | None
) -> None:
    """Triton's own products of float32 are in TF32, which is further from the trainer's than a push allows."""
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    seen: list[str | None] = []
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    monkeypatch.setattr(
        AsyncLLM, "from_engine_args", lambda *_, **__: seen.append(os.environ.get("TRITON_F32_DEFAULT"))
    )
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    start(SyncBackend.SHARED_MEMORY, model=str(wide_headed_model_dir), max_num_seqs=8, sleeps=False, dtype=dtype)
    assert seen == [products]
    assert "TRITON_F32_DEFAULT" not in os.environ


@pytest.mark.parametrize("divided", ["tensor_parallel_size", "pipeline_parallel_size", None], ids=str)
def test_on_gpus_processes_share_a_model_without_ray_and_steps_are_as_large_as_a_server_s(
    wide_headed_model_dir: Path, monkeypatch: pytest.MonkeyPatch, divided: str | None
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    seen: list[inspect.BoundArguments] = []
    signature = inspect.signature(AsyncLLM.from_engine_args)
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda *a, **more: seen.append(signature.bind(*a, **more)))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    size: dict[str, Any] = {} if divided is None else {divided: 2}
    start(SyncBackend.SHARED_MEMORY, model=str(wide_headed_model_dir), max_num_seqs=8, sleeps=False, **size)
    given = seen[0].arguments
    assert given["engine_args"].distributed_executor_backend == (None if divided is None else "mp")
    assert given["engine_args"].enable_sleep_mode is False
    assert given["engine_args"].max_num_batched_tokens is None  # vLLM chooses
    chosen, _ = EngineArgs.get_batch_defaults(1)
    assert given["usage_context"] in chosen
    assert UsageContext.ENGINE_CONTEXT not in chosen  # AsyncLLM's own, for which vLLM has no large steps


@pytest.mark.chaos
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
@pytest.mark.parametrize(
    "divided", [pytest.param("tensor_parallel_size", marks=pytest.mark.wide), "pipeline_parallel_size"]
)
async def test_an_engine_of_two_processes_says_what_the_trainer_computes_until_it_is_killed(
    tiny_tokenizer: Any, tmp_path: Path, policy: TorchPolicy, divided: str
) -> None:
    size: Any = {divided: 2}
    before = set(psutil.Process().children(recursive=True))
    model = str(tiny_llama(tiny_tokenizer, tmp_path / "model", head_dim=32, positions=8192))
    engine = VLLMEngine(
        model, eos_token_ids=(), dtype="float32", max_batch_size=8, max_tokens=8000, memory_fraction=SHARE, **size
    )
    assert engine.max_tokens == 8000
    started = set(psutil.Process().children(recursive=True)) - before
    learn(policy)
    await EngineWeights(engine).push(policy, 1)
    generation = await engine.generate(ask())
    assert set(generation.versions) == {1}
    expected = scores(policy, PROMPT, generation.token_ids)
    assert list(generation.logprobs) == pytest.approx(expected, abs=TOLERANCE)

    async def each(doing: Callable[[psutil.Process], None]) -> None:
        for process in started:
            with suppress(psutil.NoSuchProcess):
                doing(process)

    requests = [ask(s, max_new_tokens=7000) for s in range(4)]
    tasks = await caught(
        lambda: begun(engine, *requests),
        lambda: each(psutil.Process.suspend),
        lambda: each(psutil.Process.resume),
    )
    cluster.kill(started)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineError)
        assert "vLLM's processes have died" in str(result)
    for work in (engine.generate(ask()), engine.pause(PauseMode.KEEP), engine.resume(), engine.ping()):
        with pytest.raises(EngineError, match="have died"):
            await work
    engine.close()


def test_a_run_in_float16_trains_on_what_vllm_samples_and_guesses_ahead(
    sums_flags: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    flags = sums_flags | {"rollout.engine": "vllm", "vllm.sync_backend": "disk", "train.max_steps": "2"}
    flags["actor.dtype"] = "float16"
    flags |= {
        f"vllm.extra.speculative_config.{name}": str(value) for name, value in AHEAD["speculative_config"].items()
    }
    before = set(psutil.Process().children(recursive=True))
    assert main(["train", "rl", *(part for flag, value in flags.items() for part in (f"--{flag}", value))]) == 0
    assert "tokens that vLLM guessed ahead" in capfd.readouterr().err
    started = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(
        [child for child in started if cluster.title_of(child).startswith("VLLM")], timeout=120
    )
    assert not alive
    steps = logged(Path("out"))
    assert [step["step"] for step in steps] == [1, 2]
    assert [path.name for path in Path("out", "weights").iterdir()] == ["2"]
    for step in steps:  # the ratio is of the trainer's probability to vLLM's
        assert step["policy/ratio_mean"] == pytest.approx(1.0, abs=HALF_TOLERANCE)
        assert abs(step["policy/approx_kl"]) < TOLERANCE
        assert step["policy/loss_scale"] > 1
