"""A real `vllm serve`, started as the docs say, on a small model: it keeps an engine's promises, and trains."""

import asyncio
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from rollgrad.adapters.engines.vllm_server.endpoints import CompletionsWire
from rollgrad.adapters.engines.vllm_server.engine import ServedEngine
from rollgrad.adapters.engines.vllm_server.teacher import (
    OF_REFERENCE,
    ServedModel,
    ServedReference,
    ServedTeacher,
)
from rollgrad.adapters.models.torch.heads.distillation import DistillationSettings, Teacher
from rollgrad.adapters.models.torch.loading.loading import load_tokenizer
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.references import TorchTeacher
from rollgrad.adapters.weights.channel import EngineWeights
from rollgrad.domain.batches.examples import pack_sequences
from rollgrad.domain.episodes.examples import WeightedTokens
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.cli.main import main
from tests.contract import test_rollout_engine, test_weight_channel
from tests.example_runs import logged, rollouts
from tests.integration import test_vllm_engine
from tests.integration.test_agent_training import FORM
from tests.integration.test_vllm_engine import FLAG, PROMPT, TOLERANCE, ask, channel, learn, policy, scores
from tests.scripts import ScriptHost
from tests.tiny_models import SHARE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="session")]

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cluster.md"
START_SECONDS = 900.0
"""On a busy machine vLLM takes minutes."""

ON_A_CPU = (
    "--dtype float32 --enforce-eager --no-enable-chunked-prefill --max-num-batched-tokens 8192 --max-num-seqs 64 "
    f"--kv-cache-memory-bytes 2147483648 --gpu-memory-utilization {SHARE}"
)
"""Options that `adapters.engines.vllm.launch` sets there."""
IN_ONE_PROCESS = "--distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Another one, as on a GPU: else vLLM gives the model a process of its own, with a thread of each core, and all of them
wait for one another in loops."""

__all__ = ["channel", "policy"]  # fixtures


def documented() -> tuple[dict[str, str], list[str]]:
    """(environment, options) of the `vllm serve MODEL` in the docs."""
    text = DOCS.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if " vllm serve MODEL " in line)
    words = shlex.split(line, comments=True)
    start = words.index("vllm")
    return dict(word.split("=", 1) for word in words[:start]), words[start + 3 :]


@contextmanager
def serving(
    python: Sequence[str], model: Path, folder: Path, more: str = f"{ON_A_CPU} {IN_ONE_PROCESS}"
) -> Iterator[str]:
    """Starts `vllm serve` with these words for `sys.executable`, options, and a log in `folder`; gives its address."""
    kept = socket.socket()  # bound, it lets nobody else have its port until vLLM listens there
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does, without which it could not
    kept.bind(("127.0.0.1", 0))
    port = kept.getsockname()[1]
    environment, options = documented()
    # The CPU's build has another name, by which its own command `vllm` does not find it.
    command = [*python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += [*options, *shlex.split(more), "--port", str(port)]
    log = folder / "log"
    compiles = {"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "TRITON_F32_DEFAULT": "ieee"}
    with log.open("w") as output:
        server = subprocess.Popen(
            command, env=os.environ | environment | compiles, stdout=output, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"
    until = time.monotonic() + START_SECONDS
    try:
        while not answers(address):
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(200)
        finally:
            server.kill()
            kept.close()


@pytest.fixture(scope="module")
def url(wide_headed_model_dir: Path, vllm_host: ScriptHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(vllm_host.python(), wide_headed_model_dir, tmp_path_factory.mktemp("vllm")) as address:
        yield address


def answers(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as reply:
        return bool(reply.status == 200)
    return False


async def test_completions_are_streamed_in_the_tokens_of_the_whole_reply(url: str, wide_headed_model_dir: Path) -> None:
    """By OpenAI's endpoint, which a server has that was started without any other."""
    async with connected(url, wide_headed_model_dir) as engine:
        engine._server._wire = CompletionsWire(engine.names[0])
        for stops in ((), ("e", "a")):
            request, heard = ask(seed=4, stop_strings=stops), list[int]()
            whole = await engine.generate(request)
            streamed = await engine.generate(request, on_token=heard.append)
            assert heard == list(streamed.token_ids) == list(whole.token_ids)
            assert list(streamed.logprobs) == pytest.approx(list(whole.logprobs), abs=TOLERANCE)
            assert (streamed.stop_reason, streamed.versions) == (whole.stop_reason, whole.versions)


@asynccontextmanager
async def connected(url: str, model: Path) -> AsyncIterator[ServedEngine]:
    vocabulary = len(load_tokenizer(str(model), flag=FLAG))
    engine = ServedEngine(url, eos_token_ids=(), vocabulary=vocabulary)
    await engine.ready()
    await engine.require_weights()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(url: str, wide_headed_model_dir: Path) -> AsyncIterator[ServedEngine]:
    async with connected(url, wide_headed_model_dir) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def vllm_engine(served: ServedEngine) -> ServedEngine:
    """Awake, running, at version 0."""
    await served.wake()
    await served.resume()
    served.set_version(0)
    return served


@pytest.fixture(params=["server"])
def make(vllm_engine: ServedEngine) -> Callable[[], ServedEngine]:
    return lambda: vllm_engine


@pytest.fixture
def parts(
    channel: EngineWeights, vllm_engine: ServedEngine, policy: TorchPolicy
) -> tuple[EngineWeights, ServedEngine, TorchPolicy]:
    return channel, vllm_engine, policy


PROMISES = {
    name: test
    for suite in (test_rollout_engine, test_weight_channel)
    for name, test in vars(suite).items()
    if name.startswith("test_") and {"make", "parts"}.intersection(test.__code__.co_varnames)
}
AS_WITHOUT_A_SERVER = {
    name: getattr(test_vllm_engine, name)
    for name in (
        "test_sixty_four_requests_at_once",
        "test_each_token_is_heard_once_and_in_order",
        "test_a_stop_string_is_part_of_the_reply",
        "test_no_stop_token_before_the_minimum",
        "test_the_trainer_knows_the_tokens_that_a_form_allowed",
        "test_what_is_longer_than_the_engine_holds_is_refused",
        "test_after_a_push_the_engine_computes_what_the_trainer_computes",
        "test_a_frozen_request_goes_on_under_the_new_weights_with_its_keys_and_values",
        "test_what_is_asked_after_a_push_reads_no_keys_and_values_of_the_old_weights",
        "test_weights_that_do_not_arrive_are_noticed_and_the_next_push_heals",
        "test_changes_alone_make_the_engine_that_all_weights_make",
    )
}
globals().update(PROMISES | AS_WITHOUT_A_SERVER)


@pytest.mark.wide
async def test_a_server_that_makes_its_own_imports_samples_from_new_weights(
    wide_headed_model_dir: Path, policy: TorchPolicy, tmp_path: Path
) -> None:
    """As a user starts it."""
    learn(policy)
    with serving([sys.executable], wide_headed_model_dir, tmp_path, ON_A_CPU) as address:
        async with connected(address, wide_headed_model_dir) as engine:
            await EngineWeights(engine).push(policy, 1)
            generation = await engine.generate(ask())
    assert set(generation.versions) == {1}
    assert list(generation.logprobs) == pytest.approx(scores(policy, PROMPT, generation.token_ids), abs=TOLERANCE)


def test_every_promise_is_looked_at() -> None:
    assert len(PROMISES) > 15


async def test_the_server_teaches_what_the_model_itself_teaches(
    url: str, vllm_engine: ServedEngine, policy: TorchPolicy, channel: EngineWeights
) -> None:
    """Its most likely tokens at trained places, of sequences of different lengths; the weights are not the file's."""
    learn(policy)
    await channel.push(policy, 1)
    top_k, size = 8, policy.module.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    sequences = [
        WeightedTokens(
            token_ids_T=torch.randint(3, 300, (length,), generator=generator),
            weights_T=(torch.arange(length) >= 3).float(),
            prompt_length=3,
        )
        for length in (5, 24, 9)
    ]
    batch = pack_sequences(sequences, group_ids=range(3), sample_ids=[0] * 3)
    live = Teacher(policy.module, DistillationSettings(top_k=top_k))
    expected = TorchTeacher(live, size).predict(batch)
    served = ServedModel(url, name="the only one", size=size, asked=OF_REFERENCE)
    reference = ServedReference(served, complete=asyncio.run)  # not in this loop
    teacher = partial(ServedTeacher, reference)
    found = await asyncio.to_thread(teacher(top_k=top_k).predict, batch)
    assert found.ids_AK.shape == (2 + 21 + 6, top_k)
    assert torch.equal(found.ids_AK, expected.ids_AK)
    torch.testing.assert_close(found.logprobs_AB, expected.logprobs_AB, rtol=2e-3, atol=2e-3)  # float16
    with pytest.raises(ConfigurationError, match="--max-logprobs 64"):
        await asyncio.to_thread(teacher(top_k=64).predict, batch)
    scores = await asyncio.to_thread(reference.score, batch)
    torch.testing.assert_close(scores.logprobs_N, policy.score(batch).logprobs_N, rtol=0, atol=TOLERANCE)


ASYNC = {"train.async_enable": "True"}
FULL = {"algo.kl.use_loss": "True", "algo.kl.estimator": "full", "algo.kl.top_k": "8"}
CENTRED = {"algo.score_centering_top_k": "19", "algo.correction.level": "off", "algo.old_logprobs": "recompute"}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="sync", marks=pytest.mark.wide),
        pytest.param(ASYNC, id="none", marks=pytest.mark.wide),
        pytest.param({**ASYNC, "train.partial_rollout": "keep"}, id="keep"),
        pytest.param(
            {**ASYNC, **CENTRED, "train.partial_rollout": "recompute"}, id="recompute", marks=pytest.mark.wide
        ),
        pytest.param({**CENTRED, "rollout.server_sync": "disk", "rollout.server_sync_delta": "True"}, id="files"),
    ],
)
def test_a_run_trains_on_what_the_server_samples(
    url: str, sums_flags: dict[str, str], settings: dict[str, str]
) -> None:
    flags = sums_flags | {"rollout.engine": "server", "rollout.server_urls": url, "train.max_steps": "3"}
    assert main(["train", "rl", *words(flags | settings)]) == 0
    steps = logged(Path("out"))
    assert [step["step"] for step in steps] == [1, 2, 3]
    exact = steps[:1] if settings.keys() >= ASYNC.keys() else steps  # the others' samples may be of an older policy
    for step in exact:  # the ratio is of the trainer's probability to the server's
        assert step["policy/ratio_mean"] == pytest.approx(1.0, abs=TOLERANCE)
        assert step.get("policy/centering_residual", 0.0) < 1e-3
    asked = ("actor.model_name_or_path", "rollout.engine", "rollout.server_urls", "reward.function_path")
    held_out = {"eval.dataset": "prompts.jsonl", "data.label_key": "label", "eval.max_new_tokens": "8"}
    assert main(["eval", *words({flag: flags[flag] for flag in asked} | held_out)]) == 0


@pytest.mark.parametrize("how", [{}, FULL], ids=["sampled tokens", "likely tokens"])
async def test_a_teacher_on_the_server_teaches_as_one_in_the_run(
    url: str,
    policy: TorchPolicy,
    channel: EngineWeights,
    sums_flags: dict[str, str],
    tmp_path: Path,
    how: dict[str, str],
) -> None:
    learn(policy)
    await channel.push(policy, 1)
    policy.save(tmp_path / "teacher")
    distilled = {"algo.advantage.estimator": "on_policy_distill", "algo.kl.init_coef": "1", "rollout.temperature": "1"}
    flags = sums_flags | distilled | how | {"train.max_steps": "2"}
    del flags["algo.old_logprobs"], flags["reward.function_path"]
    found = []
    for of in ({"ref.url": url}, {"ref.model_name_or_path": "teacher", "ckpt.overwrite": "True"}):
        assert await asyncio.to_thread(main, ["train", "rl", *words(flags | of)]) == 0
        steps = logged(Path("out"))
        names = ("policy/ref_kl", "policy/loss", "policy/grad_norm")
        found.append([step[name] for step in steps if names[0] in step for name in names])
    assert found[0] == pytest.approx(found[1], rel=0.02)
    assert len(found[0]) == 6
    assert min(found[0][::3]) > 0.5, "the server has other weights than those that the run begins with"


def test_a_run_learns_from_replies_of_a_prescribed_form(url: str, sums_flags: dict[str, str]) -> None:
    Path("agent.py").write_text(FORM)
    of_agent = {"train.agent_func_path": "agent.py", "rollout.max_new_tokens": "24", "train.max_steps": "2"}
    flags = sums_flags | {"rollout.engine": "server", "rollout.server_urls": url, "reward.function_path": "None"}
    assert main(["train", "rl", *words(flags | of_agent)]) == 0
    kept = [*rollouts(Path("out"), ("grammars", "token_logprob", "token_trainer_logprob"))]
    assert kept
    for row in kept:
        assert row["grammars"] is not None
        assert row["token_trainer_logprob"] == pytest.approx(row["token_logprob"], abs=TOLERANCE)


def words(flags: dict[str, str]) -> list[str]:
    return [
        part for flag, value in flags.items() for part in ((f"--{flag}",) if value == "True" else (f"--{flag}", value))
    ]
