"""An assistant on several engines: how they are started, when they count as dead, and their end."""

import asyncio
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.episodes.chat_request import ChatRequest
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.control.engine_health import FleetBounds
from rollgrad.domain.errors import EngineError
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.serve_agent import ServeAgentArguments
from rollgrad.entrypoints.composition import cluster
from rollgrad.entrypoints.composition.cluster import Role
from rollgrad.entrypoints.composition.engines import reply_ends
from rollgrad.entrypoints.composition.serving.assistant import LoadedAssistant, load_assistant
from tests.fakes.fleet_member import FakeFleetMember

SECONDS = 60.0


@pytest.mark.parametrize(("listed", "own", "ends"), [(None, None, []), ([3, 5], 4, [3, 4, 5]), (None, 2, [2])], ids=str)
def test_that_no_token_ends_a_reply_is_said(listed: Any, own: int | None, ends: list[int]) -> None:
    with capture_logs() as logs:
        assert reply_ends(SimpleNamespace(eos_token_id=listed), SimpleNamespace(eos_token_id=own)) == ends
    assert [line["event"].partition(":")[0] for line in logs] == ([] if ends else ["no token ends a reply"])


@pytest.mark.parametrize("command", ["chat", "serve agent", "serve tinker"])
def test_a_model_that_is_not_there_is_told_before_anything_is_loaded(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tinker", ModuleType("tinker"))
    sys.modules["tinker"].__spec__ = ModuleSpec("tinker", None)
    for module in ("assistant", "tinker"):  # they import what loads models
        monkeypatch.setitem(sys.modules, f"rollgrad.entrypoints.composition.{module}", None)
    assert main([*command.split(), "--model", str(tmp_path / "no_model")]) == 2
    assert "no_model', which is no directory: name a model with --model." in capsys.readouterr().err


class FakeCluster:
    """Starts fake engines where a cluster starts vLLM's."""

    def __init__(self, config: Any, roles: Mapping[str, Role], colocated: list[Any]) -> None:
        self.config, self.roles, self.closed = config, roles, False
        self.members = [FakeFleetMember() for _ in range(roles["engines"].processes)]

    def engines(self, settings: Mapping[str, Any], beside_training: bool) -> EngineFleet:
        self.settings = settings
        patient = FleetBounds(suspect_after=1000.0, dead_after=1000.0, max_restarts=10**9)
        self.fleet = EngineFleet(self.members, bounds=patient, ping_seconds=0.005)
        return self.fleet

    def close(self) -> None:
        self.closed = True


async def until_dead(served: LoadedAssistant, members: list[FakeFleetMember]) -> None:
    """Kills engines for good; returns when the assistant says that it can serve nothing."""
    for member in members:
        member.fail_starts = 10**9
        member.kill()
    assert served.check is not None
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                await served.check()
                await asyncio.sleep(0.005)
            except EngineError as error:
                assert "No engine serves" in str(error)  # noqa: PT017
                return


@pytest.fixture
def loaded(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LoadedAssistant, FakeCluster]:
    made: list[FakeCluster] = []

    def fake(*arguments: Any) -> FakeCluster:
        made.append(FakeCluster(*arguments))
        return made[-1]

    monkeypatch.setattr(cluster, "Cluster", fake)
    arguments = ServeAgentArguments(
        model=str(tiny_model_dir),
        engine=Engine.VLLM,
        num_engines=3,
        cluster_address="auto",
        tensor_parallel_size=2,
        max_batch_size=7,
        vllm_extra={"block_size": 16},
        dtype=DType.FLOAT32,
        max_new_tokens=4,
    )
    return load_assistant(arguments), made[0]


async def test_requests_are_served_until_all_engines_are_dead(
    loaded: tuple[LoadedAssistant, FakeCluster], tiny_model_dir: Path
) -> None:
    served, started = loaded
    assert (started.config.cluster.address, started.config.vllm.gpus_per_engine) == ("auto", 2)
    assert (started.settings["model"], started.settings["tensor_parallel_size"]) == (str(tiny_model_dir), 2)
    assert (started.settings["max_batch_size"], started.settings["extra"]) == (7, {"block_size": 16})

    assert served.check is not None
    asked = [ChatRequest(messages=[{"role": "user", "content": f"go {number}"}]) for number in range(6)]
    replies = await asyncio.gather(*map(served.assistant.answer, asked))
    assert [len(reply.generation.token_ids) for reply in replies] == [4] * 6
    assert all(member.served for member in started.members)
    for member in started.members[1:]:
        member.fail_starts = 10**9
        member.kill()
    await served.check()
    await until_dead(served, started.members[:1])
    await served.aclose()
    assert started.closed
    assert all(member.closed for member in started.members)


async def test_a_server_without_hope_of_an_engine_says_so(loaded: tuple[LoadedAssistant, FakeCluster]) -> None:
    served, started = loaded
    assert served.until_hopeless is not None
    waiting = asyncio.ensure_future(served.until_hopeless())
    started.fleet.health.bounds = FleetBounds(max_restarts=1)
    for member in started.members:
        member.fail_starts = 1
        member.kill()
    with pytest.raises(EngineError, match="All 3 engines are dead, each after 1 restarts"):
        async with asyncio.timeout(SECONDS):
            await waiting
    await served.aclose()


def test_the_command_ends_with_the_reason_when_no_engine_is_left(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Doomed(FakeCluster):
        def engines(self, settings: Mapping[str, Any], beside_training: bool) -> EngineFleet:
            self.members[0].kill()
            return EngineFleet(self.members, bounds=FleetBounds(max_restarts=0), ping_seconds=0.005)

    monkeypatch.setattr(cluster, "Cluster", Doomed)
    model = ["--model", str(tiny_model_dir), "--dtype", "float32"]
    assert main(["serve", "agent", *model, "--engine", "vllm", "--num_engines", "1", "--port", "0"]) == 2
    told = capsys.readouterr()
    assert told.out.startswith("http://127.0.0.1:")
    assert "error: All 1 engines are dead, each after 0 restarts" in told.err


async def test_engines_that_die_before_any_request_do_not_count_as_ready(
    loaded: tuple[LoadedAssistant, FakeCluster],
) -> None:
    """Not even while a newer checkpoint waits for one that lives."""

    served, started = loaded
    await until_dead(served, started.members)
    assert served.reload is not None
    assert served.check is not None
    reloading = asyncio.create_task(served.reload.reload())
    async with asyncio.timeout(SECONDS):
        while started.fleet.health.version is None:  # it is not being sent yet
            assert not reloading.done()
            await asyncio.sleep(0.005)
    with pytest.raises(EngineError, match="No engine serves"):
        await served.check()
    reloading.cancel()
    await served.aclose()
