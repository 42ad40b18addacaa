"""Sections of first light about vLLM on the GPU of what is trained, alone and in a cluster of Ray."""

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_light_common import DEV, GPU, RUN, batch, model, played, policy, step, sync

ROOT = Path(__file__).resolve().parent.parent

REWARD = """
def reward_func(completions, **given):
    return [reply.count("e") / max(1, len(reply)) for reply in completions]
"""
"""Reward of a run: something that a random model can learn."""

TOLD = (
    *(
        "time/",
        "sync/",
        "memory/",
        "policy/mismatch",
        "policy/grad_norm",
        "policy/ref_kl",
        "critic/grad_norm",
        "policy/centering",
    ),
    *("reward/mean", "rollout/response_length_mean"),
)
"""Beginnings of the names of metrics that are kept."""

LONGEST = 225.0
"""Seconds of a run at most: vLLM alone took 78 to start on an H200, and compiles for the first of them."""

LETTERS, FILES = 2500, 4
"""Letters of an error that are kept of a run that failed, and processes of which they are."""

AHEAD = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
"""Engine arguments of vLLM by which it guesses tokens ahead."""

SOON = 3e-4
"""Learning rate at which a step changes log-probs by far more than the formats of numbers do."""


def lacking(*packages: str) -> str:
    """Names of those that are not installed."""
    return ", ".join(name for name in packages if not importlib.util.find_spec(name))


@contextmanager
def saved(made: Any) -> Iterator[str]:
    """Saves a model and a tokenizer in a folder, for as long as the block."""
    from tests.tiny_models import make_tiny_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        make_tiny_tokenizer().save_pretrained(folder)
        yield folder


def vllm(out: Any) -> None:
    """An engine of vLLM beside the model that is trained, as in a run of one process: how long it takes to start and to
    sample; how far its log-probs are from the trainer's, before and after weights are pushed; and how much memory it
    gives back when it sleeps."""
    if not GPU or (missing := lacking("vllm")):
        out["left out"] = f"needs {missing if GPU else 'a GPU'}"
        return
    beside(out, _sampled)
    for name, extra in (("eight bits", {"quantization": "fp8_per_tensor"}), ("guessed ahead", AHEAD)):
        out[name] = {}
        beside(out[name], _as_trained, **extra)


def beside(out: Any, measured: Callable[[Any, Any, Any], Coroutine[Any, Any, None]], **extra: Any) -> None:
    """Starts an engine with these settings of vLLM, and lets it be measured with what is trained."""
    from rollgrad.adapters.engines.vllm.engine import VLLMEngine
    from rollgrad.application.settings.sections.vllm import SyncBackend

    made = model()
    trained = policy(made, lr=SOON)
    with saved(made) as folder:
        t = time.perf_counter()
        engine = VLLMEngine(
            folder,
            eos_token_ids=(),
            dtype="bfloat16",
            max_tokens=256 if RUN.tiny else 2048,
            memory_fraction=0.4,
            sync_backend=SyncBackend.CUDA_IPC if GPU else SyncBackend.SHARED_MEMORY,
            extra=extra,
        )
        out["start_s"] = round(time.perf_counter() - t, 1)
        try:
            asyncio.run(measured(out, engine, trained))
        finally:
            engine.close()


async def _as_trained(out: Any, engine: Any, trained: Any) -> None:
    _, right, wrong = await _pushed(out, engine, trained)
    assert 2 * right < wrong, "the engine does not have the trainer's weights"


async def _pushed(out: Any, engine: Any, trained: Any) -> tuple[Any, float, float]:
    """Pushes weights after some steps; returns the channel, and by how much the log-probs of engine and trainer differ
    with the same weights, at most, and with those of before the steps."""
    from benchmarks.weight_sync import difference
    from rollgrad.adapters.weights.channel import EngineWeights
    from rollgrad.adapters.weights.cuda_ipc import cuda_ipc
    from rollgrad.adapters.weights.shared_memory import shared_memory

    channel, new = EngineWeights(engine, backend=cuda_ipc if GPU else shared_memory), _new()
    out["differs"] = same = await difference(engine, trained, new)
    for _ in range(3):
        step(trained, batch(1, 2, 8, 16))
    out["differs before the push"] = before = await difference(engine, trained, new)
    for version in (1, 2, 3):
        t = time.perf_counter()
        moved = await channel.push(trained, version)
        out[f"push {version}"] = {
            "s": round(moved["seconds"], 3),
            "with the comparison": round(time.perf_counter() - t, 3),
            "gib": round(moved["bytes"] / 2**30, 2),
        }
    out["differs after it"] = after = await difference(engine, trained, new)
    return channel, max(same, after), before


def _new() -> int:
    """Tokens of a reply."""
    return 4 if RUN.tiny else 256


async def _sampled(out: Any, engine: Any, trained: Any) -> None:
    from benchmarks.weight_sync import difference

    new = _new()
    for rows in (2,) if RUN.tiny else (1, 32, 128, 256):
        await played(engine, rows, new)
        t = time.perf_counter()
        await played(engine, rows, new)
        t = time.perf_counter() - t
        out[f"{rows} rows"] = {"ms_a_step": round(1e3 * t / new, 2), "tok_s": round(rows * new / t)}
    channel, right, wrong = await _pushed(out, engine, trained)
    for turn in ("first", "again"):
        free, t = _free_gib(), time.perf_counter()
        await engine.sleep()
        slept, asleep = time.perf_counter() - t, _free_gib()
        step(trained, batch(1, 2, 8, 16))
        t = time.perf_counter()
        await engine.wake()
        await channel.push(trained, 4)
        out[f"sleeps, {turn}"] = {
            "gib": round(asleep - free, 2),
            "sleep_s": round(slept, 2),
            "wake_and_push_s": round(time.perf_counter() - t, 2),
        }
    out["differs after it slept"] = slept_after = await difference(engine, trained, new)
    assert 5 * max(right, slept_after) < wrong, "the engine does not have the trainer's weights"


def _free_gib() -> float:
    if not GPU:
        return 0.0
    torch.cuda.empty_cache()
    sync()
    return torch.cuda.mem_get_info(DEV)[0] / 2**30


def cluster(out: Any) -> None:
    """Runs of the command line in which Ray places actor, critic, reference and an engine of vLLM on one GPU, which
    they share, by ZeRO and by FSDP2: whether they end well, and the time of their steps."""
    if not GPU or (missing := lacking("ray", "vllm", "deepspeed")):
        out["left out"] = f"needs {missing if GPU else 'a GPU'}"
        return
    in_a_cluster(out)


def in_a_cluster(out: Any) -> None:
    """Starts both runs, one after the other."""
    shared = ["--train.colocate_all", "--vllm.gpu_memory_utilization", "0.3", "--algo.advantage.estimator", "gae"]
    ipc = ["--vllm.sync_backend", "cuda_ipc" if GPU else "shared_memory"]
    runs_of(
        out,
        {
            "zero 2": [*shared, "--ds.zero_stage", "2", *ipc],
            "fsdp2": [*shared, "--cluster.strategy", "fsdp2", "--algo.score_centering_top_k", "20"],
        },
    )


def runs_of(out: Any, runs: dict[str, list[str]], *, longest: float = LONGEST) -> None:
    """Starts runs of a few steps in clusters, each with some flags, one after the other; each may take so many
    seconds."""
    with saved(model()) as folder:
        prompts, reward = Path(folder) / "prompts.jsonl", Path(folder) / "reward.py"
        rows = [{"input": f"What is {a} plus {b}?"} for a in range(20) for b in range(20)]
        prompts.write_text("\n".join(map(json.dumps, rows)))
        reward.write_text(REWARD)
        sizes = ("2", "4", "8") if RUN.tiny else ("32", "8", "256")
        for name, words in runs.items():
            path = Path(folder) / re.sub(r"\W+", "_", name)
            t = time.perf_counter()
            status = _run(
                [
                    *("train", "rl", "--cluster.enable", "--rollout.engine", "vllm"),
                    *("--actor.model_name_or_path", folder, "--actor.dtype", "bfloat16", "--actor.adam.lr", "1e-5"),
                    *("--data.prompt_dataset", str(prompts), "--reward.function_path", str(reward)),
                    *("--algo.kl.init_coef", "0.01"),
                    *("--rollout.batch_size", sizes[0], "--rollout.n_samples_per_prompt", sizes[1]),
                    *("--rollout.max_new_tokens", sizes[2], "--train.max_steps", "3"),
                    *("--ckpt.output_dir", str(path), "--ckpt.state_minutes", "None", *words),
                ],
                longest,
            )
            kept = path / "metrics.jsonl"
            lines = kept.read_text().rpartition("\n")[0].splitlines() if kept.exists() else []
            steps = [json.loads(line) for line in lines]
            result = {"seconds": round(time.perf_counter() - t, 1), "steps": [_told(step) for step in steps]}
            out[name] = {"FAILED": status, **result, "said": _said()} if status else result
    assert not any("FAILED" in found for found in out.values())


def _run(words: list[str], longest: float) -> int | str:
    """Runs the command line; returns its exit status, or that it took too long."""
    command = [sys.executable, "-m", "rollgrad.entrypoints.cli.main", *words]
    try:
        return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=longest).returncode
    except subprocess.TimeoutExpired:
        return f"took more than {longest:g} s"


def _said() -> dict[str, str]:
    """The first error of each process of Ray that had one, vLLM's among them: Ray shows them nobody."""
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "session_latest", "logs")
    found: dict[str, str] = {}
    for log in sorted(folder.glob("worker-*"), key=lambda log: log.stat().st_mtime, reverse=True):
        said = log.read_text(errors="replace")
        begun = said.find("Traceback")
        if begun >= 0 and len(found) < FILES:
            found[log.name] = said[begun : begun + LETTERS]
    return found


def _told(step: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in step.items() if name.startswith(TOLD)}
