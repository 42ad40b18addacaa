"""A newer checkpoint while replies are sampled: none is lost, and each is of one model."""

import asyncio
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.servers.operation import Loaded
from rollgrad.application.episodes.chat_request import ChatRequest
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.errors import ConfigurationError, EngineError
from rollgrad.entrypoints.cli.serve_agent import ServeAgentArguments
from rollgrad.entrypoints.composition.serving import assistant, reload
from rollgrad.entrypoints.composition.serving.assistant import LoadedAssistant, load_assistant
from rollgrad.entrypoints.composition.serving.reload import ModelReload
from rollgrad.testing.rollout_engine import FakeRolloutEngine
from tests.tiny_models import saved, tiny_model

SECONDS = 120.0


def another(path: Path, tokenizer: Any, target: Path) -> Path:
    """The model at `path` after some training."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return saved(model, tokenizer, target)


def loaded(model: Path, follow: Path | None = None) -> LoadedAssistant:
    arguments = ServeAgentArguments(model=str(model), seed=5, temperature=1.0, max_new_tokens=60, dtype=DType.FLOAT32)
    return load_assistant(arguments, follow=follow)


def ask(served: LoadedAssistant, number: int) -> "asyncio.Task[ChatReply]":
    request = ChatRequest(messages=[{"role": "user", "content": f"go {number}"}])
    return asyncio.create_task(served.assistant.answer(request))


async def replies(served: LoadedAssistant) -> list[list[int]]:
    return [list((await ask(served, number)).generation.token_ids) for number in range(6)]


async def test_requests_in_flight_finish_and_later_ones_get_the_newer_model(
    tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    newer = another(tiny_model_dir, tiny_tokenizer, tmp_path / "step_3")
    before, after = await replies(loaded(tiny_model_dir)), await replies(loaded(newer))
    assert all(old != new for old, new in zip(before, after, strict=True))

    served = loaded(tiny_model_dir, tmp_path)
    assert served.reload is not None
    tasks: list[asyncio.Task[ChatReply]] = []

    async def keep_asking() -> None:
        while True:
            tasks.append(ask(served, len(tasks) % 6))
            await asyncio.sleep(0.01)

    asking = asyncio.create_task(keep_asking())
    told = await served.reload.reload()
    assert told == {"model": str(newer), "version": 1}
    asking.cancel()
    tasks.append(ask(served, len(tasks) % 6))
    versions = set()
    for number, task in enumerate(tasks):
        generation = (await task).generation
        (version,) = set(generation.versions)
        versions.add(version)
        assert list(generation.token_ids) == (before, after)[version][number % 6]
    assert 1 in versions
    assert set((await tasks[-1]).generation.versions) == {1}


async def test_a_checkpoint_of_another_shape_is_refused(
    tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    saved(tiny_model("LlamaForCausalLM", tiny_tokenizer), tiny_tokenizer, tmp_path / "step_1")

    served = loaded(tiny_model_dir, tmp_path)
    assert served.reload is not None
    before = await replies(served)
    other = "has other parameters than the model that is served"
    with capture_logs() as logs, pytest.raises(ConfigurationError, match=other):
        await served.reload.reload()
    assert [log["event"] for log in logs if other in str(log.get("error"))] == ["model_not_reloaded"]
    assert await replies(served) == before


async def test_vllm_gets_nothing_of_a_checkpoint_of_another_shape(
    tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lose its weights, and engines of a cluster their restarts."""
    saved(tiny_model("LlamaForCausalLM", tiny_tokenizer), tiny_tokenizer, tmp_path / "step_1")
    pushed: list[int] = []

    async def push(newer: Any, version: int) -> None:
        pushed.append(version)

    def sampler(*_: Any) -> Any:
        return assistant._Sampler(
            engine=FakeRolloutEngine(), close=FakeRolloutEngine().resume, check_images=lambda _: None, push=push
        )

    monkeypatch.setitem(assistant.ENGINES, Engine.VLLM, sampler)
    served = load_assistant(
        ServeAgentArguments(model=str(tiny_model_dir), engine=Engine.VLLM, dtype=DType.FLOAT32), follow=tmp_path
    )
    assert served.reload is not None
    with pytest.raises(ConfigurationError, match="has other parameters than the model that is served"):
        await served.reload.reload()
    assert not pushed
    another(tiny_model_dir, tiny_tokenizer, tmp_path / "step_2")
    await served.reload.reload()
    assert pushed == [1]


async def test_a_run_is_followed_after_memory_ran_out(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "FOLLOW_SECONDS", 0.01)
    for number in (1, 2):
        (tmp_path / f"step_{number}").mkdir()
    tried: list[str] = []

    def load(name: str) -> Any:
        tried.append(Path(name).name)
        if len(tried) == 1:
            (tmp_path / "step_3").mkdir()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="--model")

    served = loaded(tiny_model_dir, tmp_path)
    assert served.reload is not None
    monkeypatch.setattr(served.reload, "_load", load)
    following = asyncio.create_task(served.reload.keep_following())
    async with asyncio.timeout(SECONDS):
        while set((await ask(served, 0)).generation.versions) == {0}:
            assert not following.done(), following.exception()
    following.cancel()
    assert tried == ["step_2", "step_3"]


async def test_a_broken_transfer_is_made_again_until_it_succeeds(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "FOLLOW_SECONDS", 0.01)
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="--model")
    (tmp_path / "step_1").mkdir()
    loads: list[str] = []
    brought: list[int] = []
    broken = False

    async def push(newer: Any, version: int) -> None:
        nonlocal broken
        broken = len(loads) < 3
        if broken:
            raise EngineError("A transfer of weights to vLLM broke off.")
        brought.append(version)

    def load(name: str) -> Any:
        loads.append(Path(name).name)
        return model

    engine = EmbeddedEngine(model, eos_token_ids=())
    followed = ModelReload(engine, push, load, model=str(tiny_model_dir), follow=tmp_path, broken=lambda: broken)
    following = asyncio.create_task(followed.keep_following())
    async with asyncio.timeout(SECONDS):
        while not brought:
            assert not following.done(), following.exception()
            await asyncio.sleep(0.001)
    (tmp_path / "step_2").mkdir()
    async with asyncio.timeout(SECONDS):
        while len(brought) < 2:
            await asyncio.sleep(0.001)
    following.cancel()
    assert loads == ["step_1", "step_1", "step_1", "step_2"]
    assert brought == [1, 2]
    assert followed.loaded() == Loaded(checkpoint="step_2", reloads=2, failures=2)


async def test_a_run_is_followed(
    tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "FOLLOW_SECONDS", 0.01)
    (tmp_path / "step_1").mkdir()  # none that could be loaded

    served = loaded(tiny_model_dir, tmp_path)
    assert served.reload is not None
    following = asyncio.create_task(served.reload.keep_following())
    before = list((await ask(served, 0)).generation.token_ids)
    whole = await asyncio.to_thread(another, tiny_model_dir, tiny_tokenizer, tmp_path / "unfinished")
    newest = whole.rename(tmp_path / "step_2")  # as a run does: a checkpoint is there when it is whole
    async with asyncio.timeout(SECONDS):
        while set((generation := (await ask(served, 0)).generation).versions) == {0}:
            assert list(generation.token_ids) == before
    assert list(generation.token_ids) == (await replies(loaded(newest)))[0]
    assert not following.done()
    following.cancel()


async def followed(directory: Path, model: Path, *, until: int, then: Callable[[int], None]) -> list[str]:
    """The checkpoints that a server loads that follows a run; `then` is called with the number of those so far."""
    loads: list[str] = []

    def load(name: str) -> str:
        loads.append(str(Path(name).relative_to(directory)))
        return name

    async def push(newer: Any, version: int) -> None:
        """Takes what was loaded."""

    following = ModelReload(FakeRolloutEngine(), push, load, model=str(model), follow=directory)
    task = asyncio.create_task(following.keep_following())
    async with asyncio.timeout(SECONDS):
        for count in range(1, until + 1):
            while following.loaded().reloads < count:
                assert not task.done(), task.exception()
                await asyncio.sleep(0.001)
            then(count)
    await asyncio.sleep(0.1)
    task.cancel()
    return loads


async def test_another_run_in_the_directory_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `--ckpt.overwrite`, and its checkpoints may have the names of those before."""
    monkeypatch.setattr(reload, "FOLLOW_SECONDS", 0.01)
    (tmp_path / "step_5").mkdir()

    def then(count: int) -> None:
        if count == 1:
            (tmp_path / "new").mkdir()
            (tmp_path / "step_5").rmdir()
            (tmp_path / "new").rename(tmp_path / "step_5")

    assert await followed(tmp_path, tmp_path / "other", until=2, then=then) == ["step_5", "step_5"]


async def test_the_model_of_a_runs_end_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last steps have no checkpoint of their own, and without `ckpt.save_steps` none has. A run that continues has
    newer ones."""
    monkeypatch.setattr(reload, "FOLLOW_SECONDS", 0.01)
    clock = itertools.count(2_000_000_000)

    def written(name: str) -> None:
        (tmp_path / "new").mkdir()
        os.utime(tmp_path / "new", (moment := next(clock), moment))
        (tmp_path / "new").rename(tmp_path / name)

    def then(count: int) -> None:
        if count < 3:
            written(("model", "step_20")[count - 1])

    written("step_15")
    assert await followed(tmp_path, tmp_path / "other", until=3, then=then) == ["step_15", "model", "step_20"]


def test_what_vllm_is_brought_leaves_its_gpu_free(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assistant, "default_device", lambda: torch.device("cuda"))
    arguments = ServeAgentArguments(model=str(tiny_model_dir), engine=Engine.VLLM, dtype=DType.FLOAT32)
    model = assistant._load(arguments, str(tiny_model_dir))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
