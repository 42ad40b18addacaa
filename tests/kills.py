"""Kills runs at random moments, continues them, and compares them with runs that nothing disturbed.

    python -m tests.kills                    # 60 kills of runs in one process, about ten minutes on two cores
    python -m tests.kills --only cluster --kills 8
    python -m tests.kills --only grpo --kills 4 --seed 7

A run in one process is killed either after a random share of the time that it takes, or before a random one of its
operations on files, which are few and decide what is left. The runs are forks of this process, which has imported what
they need, and computed nothing.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

STEPS, BATCH, SAMPLES = 5, 4, 2
OPERATIONS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink")
"""Functions of `os` by which files appear and go."""
DEADLINE_SECONDS = 900.0
"""Of one run, on a machine that other work keeps busy."""

REWARD = """
def reward_func(queries, prompts, labels):
    return [len(query) % 5 + 0.1 * len(prompt) for query, prompt in zip(queries, prompts)]
"""
COMMON: dict[str, Any] = {
    "actor": {"dtype": "float32", "adam": {"lr": 1e-3}},
    "algo": {"advantage": {"estimator": "group_norm"}},
    "rollout": {"batch_size": BATCH, "n_samples_per_prompt": SAMPLES, "max_new_tokens": 6},
    "train": {"max_steps": STEPS},
    "eval": {"steps": 2, "max_samples": 2},
    "logger": {"console": False},
    "ckpt": {"save_steps": 2, "state_steps": 1, "resume": "auto"},
}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"algo": {"kl": {"init_coef": 0.1, "target": 0.001}}, "reward": {"normalize": "running"}},
    "ppo": {
        "actor": {"optim": "muon", "lr_scheduler": "linear"},
        "algo": {"advantage": {"estimator": "gae"}},
        "train": {"batch_size": 3, "enable_ema": True},
    },
    "over-sampling": {"rollout": {"generate_batch_size": BATCH + 2}},
    "asynchronous": {"train": {"async_enable": True, "max_staleness": 0}},
}
CLUSTER: dict[str, Any] = {
    "cluster": {"enable": True, "timeout": 300},
    "actor": {"num_gpus_per_node": 2},
    "ds": {"zero_stage": 3},
}
REPEATABLE = {"grpo", "ppo", "asynchronous", "cluster"}
"""Groups that over-sampling keeps for the next rollout are played again, under the weights that are then in place."""


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    nested = {key: merged(below[key], value) for key, value in above.items() if isinstance(below.get(key), dict)}
    return {**below, **above, **nested}


def make_workspace(directory: Path) -> None:
    from tests.tiny_models import make_tiny_tokenizer, tiny_llama

    tiny_llama(make_tiny_tokenizer(), directory / "actor", head_dim=16)
    (directory / "prompts.jsonl").write_text("\n".join(json.dumps({"input": f"Say {n}."}) for n in range(9)))
    (directory / "reward.py").write_text(REWARD)
    places = {
        "actor": {"model_name_or_path": str(directory / "actor")},
        "data": {"prompt_dataset": str(directory / "prompts.jsonl")},
        "eval": {"dataset": str(directory / "prompts.jsonl")},
        "reward": {"function_path": str(directory / "reward.py")},
    }
    for kind, settings in {**KINDS, "cluster": CLUSTER}.items():
        config = merged(merged(COMMON, places), settings)
        (directory / f"{kind}.yaml").write_text(yaml.safe_dump(config))


class Runs:
    """Runs of one kind in `directory`; each goes on from what is in its output directory."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.directory, self.kind = directory, kind

    def start(self, output: Path, doomed_at: int | None = None) -> int:
        """The process of a run; it kills itself before its operation `doomed_at`, if that is not None, and writes down
        how many there were."""
        command = [
            "train",
            "rl",
            "--config",
            str(self.directory / f"{self.kind}.yaml"),
            "--ckpt.output_dir",
            str(output),
        ]
        if self.kind == "cluster":
            with (self.directory / "log").open("a") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "rollgrad.entrypoints.cli.main", *command], stdout=log, stderr=log
                )
            return process.pid
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            with (self.directory / "log").open("a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            done = count_operations(doomed_at)
            from rollgrad.entrypoints.cli.main import main

            status = main(command)
            (self.directory / "operations").write_text(str(done()))
        finally:
            os._exit(status)
        raise AssertionError

    def finish(self, process: int, seconds: float = DEADLINE_SECONDS) -> int | None:
        """The status of a run, None if it was killed: after so many seconds, or by itself."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        if seconds == DEADLINE_SECONDS:
            raise TimeoutError(f"A run of {self.kind} was not over after {seconds} seconds.")
        return None


def count_operations(doomed_at: int | None) -> Callable[[], int]:
    done = 0

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def perform(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            if done == doomed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return operation(*arguments, **options)

        return perform

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    return lambda: done


def differences(runs: Runs, output: Path, whole: Path) -> Iterator[str]:
    """In what a run that was killed and continued differs from one that nothing disturbed."""
    rows, expected = (
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (output, whole)
    )
    if [row["step"] for row in rows] != [row["step"] for row in expected]:
        yield f"steps {[row['step'] for row in rows]}"
    left = [path.name for path in output.iterdir() if path.suffix in (".new", ".old")]
    if left:
        yield f"left over: {left}"
    names = {path.relative_to(whole) for path in whole.rglob("*") if path.is_file()}
    if names != {path.relative_to(output) for path in output.rglob("*") if path.is_file()}:
        yield "other files"
    state = json.loads((output / "model.state.json").read_text())
    if state["step"] != STEPS or state["next_group"] != STEPS * BATCH or state.get("kept") or state.get("pending"):
        yield f"accounts {state['step']} {state['next_group']} {state.get('kept')} {state.get('pending')}"
    if runs.kind not in REPEATABLE:
        return
    for name in sorted(names):
        if name.suffix == ".safetensors" and (output / name).read_bytes() != (whole / name).read_bytes():
            yield f"other weights: {name}"
    if timeless(rows) != timeless(expected):
        yield "other metrics"
    if (output / "samples.jsonl").read_text() != (whole / "samples.jsonl").read_text():
        yield "other samples"


def timeless(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if not key.startswith(("time/", "sync/"))} for row in rows]


def chaos(directory: Path, kind: str, kills: int, draw: random.Random) -> list[str]:
    """Kills runs until there were so many kills; returns what went wrong."""
    runs, whole = Runs(directory, kind), directory / f"{kind}-whole"
    began = time.monotonic()
    wrong = [] if runs.finish(runs.start(whole)) == 0 else ["the undisturbed run failed"]
    duration = time.monotonic() - began
    operations = int((directory / "operations").read_text()) if kind != "cluster" else 0
    killed = completed = 0
    while killed < kills and not wrong:
        output = directory / f"{kind}-{completed}"
        while True:
            by_operation = operations > 0 and draw.random() < 0.5
            doomed_at = draw.randrange(operations) if by_operation else None
            enough = killed >= kills  # what was killed last is still to be continued to its end
            limit = DEADLINE_SECONDS if enough or by_operation else draw.uniform(0, duration)
            status = runs.finish(runs.start(output, None if enough else doomed_at), limit)
            if status is not None:
                break
            killed += 1
        completed += 1
        wrong += [f"exit status {status}"] if status else list(differences(runs, output, whole))
    print(f"{kind}: {killed} kills, {completed} runs completed, {'; '.join(wrong) or 'nothing differs'}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=[*KINDS, "cluster"], default=list(KINDS))
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(directory / "cache")
        make_workspace(directory)
        import datasets  # noqa: F401
        import matplotlib.figure  # noqa: F401
        import transformers.models.llama.modeling_llama  # noqa: F401

        import rollgrad.entrypoints.cli.main
        import rollgrad.entrypoints.library  # noqa: F401

        share = -(-arguments.kills // len(arguments.only))
        draw = random.Random(arguments.seed)
        wrong = [found for kind in arguments.only for found in chaos(directory, kind, share, draw)]
        if wrong:
            print((directory / "log").read_text()[-5000:])
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
