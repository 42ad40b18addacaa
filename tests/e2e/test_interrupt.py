"""Ctrl-C ends a run between two steps, says so, and leaves a model that loads."""

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml

STARTUP_SECONDS = 300.0
STOP_SECONDS = 200.0


@pytest.fixture
def workspace(tiny_model_dir: Path, tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"input": f"Say {n}."}) for n in range(8)))
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [len(q) % 5 for q in queries]\n"
    )
    settings = {
        "actor": {"model_name_or_path": str(tiny_model_dir), "dtype": "float32"},
        "algo": {"advantage": {"estimator": "rloo"}},
        "data": {"prompt_dataset": "prompts.jsonl"},
        "reward": {"function_path": "reward.py"},
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 2, "max_new_tokens": 32},
        "train": {"max_steps": 100_000},
        "ckpt": {"output_dir": "out"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def wait_for_lines(process: "subprocess.Popen[str]", path: Path, count: int) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while lines(path) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} has {lines(path)} lines after {STARTUP_SECONDS} s"
        time.sleep(0.02)


def heed_interrupts() -> None:
    """A suite that a shell started in the background ignores SIGINT, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--train.async_enable", "--train.partial_rollout", "keep", "--ckpt.state_steps", "1000"),
        # Its scorer runs in worker processes, which a terminal's Ctrl-C reaches as well.
        (
            *("--data.prompt_dataset", "reasoning_gym:basic_arithmetic", "--reward.function_path", "None"),
            *("--reward.timeout", "300"),
        ),
    ],
    ids=["asynchronous", "worker_processes"],
)
def test_ctrl_c_saves_and_says_where(workspace: Path, rollgrad_command: list[str], flags: tuple[str, ...]) -> None:
    command = [*rollgrad_command, "train", "rl", "--config", "run.yaml", *flags]
    process = subprocess.Popen(
        command,
        cwd=workspace,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    try:
        wait_for_lines(process, workspace / "out" / "metrics.jsonl", 4)
        process.send_signal(signal.SIGINT)  # which all processes of the run's group get
        stdout, stderr = process.communicate(timeout=STOP_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "what was trained is in out" in stderr
    assert stdout.strip().endswith("out/report.html")

    steps = lines(workspace / "out" / "metrics.jsonl")
    state = json.loads((workspace / "out" / "model.state.json").read_text())
    assert state["step"] == steps >= 2
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(workspace / "out" / "model", dtype=torch.float32)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    AutoTokenizer.from_pretrained(workspace / "out" / "model")


def test_ctrl_c_in_a_notebook_ends_the_run_too(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inside a running event loop the run has a thread of its own, which the signal does not reach by itself."""
    import huggingface_hub

    import rollgrad

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_a-token-of-nobody")  # which is never sent
    monkeypatch.chdir(workspace)
    heed_interrupts()
    config = rollgrad.load_config("run.yaml")
    config.logger.console, config.ckpt.push_to_hub = False, "me/name"
    metrics = workspace / "out" / "metrics.jsonl"

    over = threading.Event()

    def interrupt() -> None:
        deadline = time.monotonic() + STARTUP_SECONDS
        while lines(metrics) < 2 and time.monotonic() < deadline and not over.wait(0.02):
            pass
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    async def notebook() -> "rollgrad.TrainResult":
        threading.Thread(target=interrupt, daemon=True).start()
        return rollgrad.train(config)

    loop = asyncio.new_event_loop()  # unlike asyncio.run, it leaves SIGINT to Python: KeyboardInterrupt
    try:
        result = loop.run_until_complete(notebook())
    finally:
        over.set()  # a run that failed is not interrupted, nor what comes after it
        loop.close()
    assert result.interrupted
    assert result.steps >= 2
    assert (result.model / "model.safetensors").exists()
    assert f"hf upload me/name {result.model} uploads this one" in capsys.readouterr().err
