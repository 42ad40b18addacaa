"""vLLM in processes of a server's own: they start again when they die, with the weights that they had."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rollgrad.adapters.engines.vllm.restarted import RestartedVLLM
from rollgrad.application.episodes.chat_request import ChatRequest
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.errors import EngineError
from rollgrad.entrypoints.cli.serve_agent import ServeAgentArguments
from rollgrad.entrypoints.composition.serving.assistant import LoadedAssistant, load_assistant
from tests.fakes import cluster
from tests.tiny_models import saved

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("vllm_host"), pytest.mark.timeout(600)]


async def greedy(loaded: LoadedAssistant) -> list[int]:
    request = ChatRequest(messages=[{"role": "user", "content": "go"}], changes={"temperature": 0.0})
    return list((await loaded.assistant.answer(request)).generation.token_ids)


async def until_it_fails(check: Callable[[], Awaitable[None]]) -> None:
    while True:
        await check()
        await asyncio.sleep(0.05)


async def test_vllm_that_dies_starts_again_with_the_weights_it_had(
    wide_headed_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(wide_headed_model_dir)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    saved(model, tiny_tokenizer, tmp_path / "step_1")
    before = set(psutil.Process().children(recursive=True))
    arguments = ServeAgentArguments(
        model=str(wide_headed_model_dir), engine=Engine.VLLM, dtype=DType.FLOAT32, max_new_tokens=24
    )
    loaded = load_assistant(arguments, follow=tmp_path)
    assert loaded.reload is not None
    assert loaded.check is not None

    try:
        old = await greedy(loaded)
        await loaded.reload.reload()
        new = await greedy(loaded)
        assert new != old
        cluster.kill(set(psutil.Process().children(recursive=True)) - before)
        with pytest.raises(EngineError, match="No engine serves"):
            await until_it_fails(loaded.check)
        assert await greedy(loaded) == new, "a request waits for the engine, which gets the newest weights again"
        await loaded.check()
    finally:
        await loaded.aclose()


async def test_a_start_that_is_cancelled_ends_at_once_with_its_processes(wide_headed_model_dir: Path) -> None:
    engine = RestartedVLLM({"model": str(wide_headed_model_dir), "eos_token_ids": (), "dtype": "float32"})
    before = set(multiprocessing.active_children())
    restart = asyncio.create_task(engine.restart())
    while not (started := set(multiprocessing.active_children()) - before):
        await asyncio.sleep(0.05)
    (core,) = started
    assert core.pid is not None
    os.kill(core.pid, signal.SIGSTOP)  # by itself the start would not end

    try:
        restart.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restart
        assert not core.is_alive()
    finally:
        core.kill()
        await engine.close()
