"""Kills runs, continues them, and compares them with runs that nothing disturbed.

    python -m tests.kills                    # 60 kills of runs in one process, about ten minutes on two cores
    python -m tests.kills --only cluster --kills 8
    python -m tests.kills --only grpo --kills 4 --seed 7
    python -m tests.kills --only "partial rollouts in a cluster" --kills 6
    python -m tests.kills --only "partial rollouts of vLLM" --kills 4

In turn, each at a random moment: in an update and while a training state is saved, both after the first state; while
a model is saved; where the engine has a copy of the weights, while they are sent; and anywhere. Runs whose replies go
on under new weights are not repeatable: they are to train on each sample once, and none may be lost. In a cluster one
of its processes is also killed, after which the run starts again by itself. While something is saved, half of the
kills fall before one of the operations on files, which are few and decide what is left.
The runs in one process are forks of this one, which has imported what they need, and computed nothing.
"""

import argparse
import importlib
import inspect
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from attrs import asdict, frozen

from rollgrad.adapters.tracking.trajectory_files import read_trajectories
from tests.example_runs import logged, rollouts
from tests.fakes.cluster import processes

STEPS, BATCH, SAMPLES = 5, 4, 2
PARTIAL, LAG = "partial rollouts", 2
OPERATIONS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink")
"""Functions of `os` by which files appear and go."""
STORE = "rollgrad.adapters.checkpoints.local", "LocalCheckpointStore"
PLACES = {
    "update": ("rollgrad.application.learning.update", "UpdateService", "run"),
    "training state": (*STORE, "save_training"),
    "model": (*STORE, "save_model"),
    "weights sent": ("rollgrad.adapters.engines.embedded.weights", "CopiedWeights", "push"),
    "weights sent to engines": ("rollgrad.adapters.weights.channel", "FleetWeights", "push"),
}
"""Module, class and method of what is worth to be killed in."""
WORKER = "ray::RankWorker"
"""Title of the processes among which a cluster divides a model."""
OF_WORKERS = ("update", "weights sent", "weights sent to engines")
"""Places in which such a process is killed, too."""
DEADLINE_SECONDS = 900.0
"""Longest time of one run, on a machine that other work keeps busy."""

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
    PARTIAL: {"train": {"async_enable": True, "max_staleness": LAG, "partial_rollout": "keep"}},
}
CLUSTER: dict[str, Any] = {
    "cluster": {"enable": True, "timeout": 300},
    "actor": {"num_gpus_per_node": 2},
    "ds": {"zero_stage": 3},
}


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    nested = {key: merged(below[key], value) for key, value in above.items() if isinstance(below.get(key), dict)}
    return {**below, **above, **nested}


CLUSTERS = {
    "cluster": CLUSTER,
    "partial rollouts in a cluster": merged(CLUSTER, KINDS[PARTIAL]),
    "partial rollouts of vLLM": merged(merged(CLUSTER, KINDS[PARTIAL]), {"rollout": {"engine": "vllm"}}),
}


def make_workspace(directory: Path) -> None:
    from tests.tiny_models import make_tiny_tokenizer, tiny_llama

    tokenizer = make_tiny_tokenizer()
    tiny_llama(tokenizer, directory / "actor", head_dim=16)
    tiny_llama(tokenizer, directory / "of vLLM", head_dim=32)
    (directory / "prompts.jsonl").write_text("\n".join(json.dumps({"input": f"Say {n}."}) for n in range(9)))
    (directory / "reward.py").write_text(REWARD)
    places = {
        "actor": {"model_name_or_path": str(directory / "actor")},
        "data": {"prompt_dataset": str(directory / "prompts.jsonl")},
        "eval": {"dataset": str(directory / "prompts.jsonl")},
        "reward": {"function_path": str(directory / "reward.py")},
    }
    for kind, settings in {**KINDS, **CLUSTERS}.items():
        config = merged(merged(COMMON, places), settings)
        if config["rollout"].get("engine") == "vllm":
            config["actor"]["model_name_or_path"] = str(directory / "of vLLM")
        (directory / f"{kind}.yaml").write_text(yaml.safe_dump(config))


@frozen
class Doom:
    """A run is killed in call number `call` of `place` (see `PLACES`; None: of the run itself), after `seconds` of it
    or before operation number `operation` on files in it. With `worker` one of its processes is killed instead."""

    place: str | None = None
    call: int = 0
    operation: int | None = None
    seconds: float | None = None
    worker: bool = False

    def __str__(self) -> str:
        return f"{self.place or 'anywhere'}{' of a worker' if self.worker else ''}"


class Runs:
    """Runs of one kind in `directory`; each goes on from what is in its output directory."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.directory, self.kind = directory, kind

    def start(self, output: Path, doom: Doom | None = None) -> int:
        """The process of a run, which ends by `doom`, and if it does not writes down how it went, see `Watch`."""
        sys.stdout.flush()
        arguments = [str(self.directory / f"{self.kind}.yaml"), str(output), json.dumps(asdict(doom) if doom else None)]
        if self.kind in CLUSTERS:
            with (self.directory / "log").open("a") as log:
                code = "import sys; from tests.kills import run; sys.exit(run(*sys.argv[1:]))"
                return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=log, stderr=log).pid
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            with (self.directory / "log").open("a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            status = run(*arguments)
        finally:
            os._exit(status)
        raise AssertionError

    def finish(self, process: int) -> int | None:
        """The status of a run, None if it killed itself."""
        end = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < end:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        raise TimeoutError(f"A run of {self.kind} was not over after {DEADLINE_SECONDS} seconds.")

    def record(self) -> dict[str, Any]:
        """Returns the record of the last run that came to its end."""
        found: dict[str, Any] = json.loads((self.directory / f"{self.kind}.record").read_text())
        return found


def run(config: str, output: str, doom: str) -> int:
    """One run in this process; returns its exit status, if it is not killed."""
    watch = Watch(Doom(**found) if (found := json.loads(doom)) else None)
    from rollgrad.entrypoints.cli.main import main

    status = main(["train", "rl", "--config", config, "--ckpt.output_dir", output])
    Path(config).with_suffix(".record").write_text(json.dumps(watch.record()))
    return status


class Watch:
    """Counts and times what a run does, and kills it where `doom` says."""

    def __init__(self, doom: Doom | None) -> None:
        self._doom = doom
        self._killed = False
        self._began = time.monotonic()
        self._operations = 0
        self._calls: dict[str, list[dict[str, float]]] = {place: [] for place in PLACES}
        self._place: tuple[str | None, int] = None, 0
        if doom is not None and doom.place is None and doom.seconds is not None:
            self._kill_after(doom.seconds)
        for name in OPERATIONS:
            setattr(os, name, self._counted(getattr(os, name)))
        for place, (module, owner, method) in PLACES.items():
            found = getattr(importlib.import_module(module), owner)
            setattr(found, method, self._watched(place, getattr(found, method)))

    def record(self) -> dict[str, Any]:
        """`seconds` and `operations` of the whole run, and of each call of each place; whether a process was killed."""
        whole = {"seconds": time.monotonic() - self._began, "operations": self._operations}
        return {**whole, "calls": self._calls, "killed": self._killed}

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def perform(*arguments: Any, **options: Any) -> Any:
            doom, (place, call) = self._doom, self._place
            done = self._calls[place][call]["operations"] if place else self._operations
            if doom is not None and doom.operation is not None:
                here = place if doom.place else None
                before = done if doom.place else self._operations
                if (here, call if doom.place else 0, before) == (doom.place, doom.call, doom.operation):
                    self._kill()
            self._operations += 1
            if place:
                self._calls[place][call]["operations"] += 1
            return operation(*arguments, **options)

        return perform

    def _watched(self, place: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def watching() -> Iterator[None]:
            doom, calls, began = self._doom, self._calls[place], time.monotonic()
            self._place = place, len(calls)
            calls.append({"operations": 0, "seconds": 0.0})
            seconds = doom.seconds if doom is not None and (doom.place, doom.call) == self._place else None
            if seconds is not None:
                self._kill_after(seconds)
            try:
                yield
            finally:
                if seconds is not None:  # the call was faster than the one that was measured
                    self._kill()
                self._place = None, 0
                calls[-1]["seconds"] = time.monotonic() - began

        def watched(*arguments: Any, **options: Any) -> Any:
            with watching():
                return method(*arguments, **options)

        async def awaited(*arguments: Any, **options: Any) -> Any:
            with watching():
                return await method(*arguments, **options)

        return awaited if inspect.iscoroutinefunction(method) else watched

    def _kill_after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._kill)
        timer.daemon = True
        timer.start()

    def _kill(self) -> None:
        doom, self._doom = self._doom, None
        if doom is None:  # it was killed before
            return
        self._killed = True
        os.kill(processes(WORKER)[-1].pid if doom.worker else os.getpid(), signal.SIGKILL)


def differences(output: Path, whole: Path) -> Iterator[str]:
    """Returns the differences between a run that was killed and continued and one that nothing disturbed."""
    left = [path.name for path in output.iterdir() if path.suffix in (".new", ".old")]
    if left:
        yield f"left over: {left}"
    names = {path.relative_to(whole) for path in whole.rglob("*") if path.is_file()}
    if names != {path.relative_to(output) for path in output.rglob("*") if path.is_file()}:
        yield "other files"
    for name in sorted(names):
        if (output / name).is_file() and not same(output / name, whole / name):
            yield f"other content: {name}"


def accounts(output: Path, whole: Path) -> Iterator[str]:
    """Returns what is wrong with the samples that a run has trained on, which was killed and continued while episodes
    were in flight; those of an undisturbed run have the same numbers, in whatever step they were trained on."""
    if left := [path.name for path in output.iterdir() if path.suffix in (".new", ".old")]:
        yield f"left over: {left}"
    played, expected = (
        [row for row in rollouts(run, ("kind", "step", "group_id", "sample_id", "prompt")) if row["kind"] == "update"]
        for run in (output, whole)
    )
    samples, due = (sorted((r["group_id"], r["sample_id"], r["prompt"]) for r in found) for found in (played, expected))
    if samples != due or len(samples) != STEPS * BATCH * SAMPLES:
        yield f"trained on {samples}, not on {due}"
    if sorted(row["step"] for row in played) != sorted([*range(1, STEPS + 1)] * BATCH * SAMPLES):
        yield "updates of another size"
    steps = [row for row in logged(output) if "staleness/max" in row]
    if [row["step"] for row in steps] != [*range(1, STEPS + 1)]:
        yield f"other steps: {[row['step'] for row in steps]}"
    if (oldest := max(row["staleness/max"] for row in steps)) > LAG:
        yield f"a lag of {oldest}"


def same(one: Path, other: Path) -> bool:
    """Returns whether two files of runs are alike, but for times, and where they are."""
    if one.suffix == ".parquet":
        tables = [read_trajectories(path).drop_columns("seconds") for path in (one, other)]
        return tables[0].equals(tables[1])
    if one.suffix in (".safetensors", ".json") and one.name not in ("manifest.json", "description.json", "run.json"):
        return one.read_bytes() == other.read_bytes()
    if one.name == "metrics.jsonl":
        logs = [[json.loads(line) for line in path.read_text().splitlines()] for path in (one, other)]
        return timeless(logs[0]) == timeless(logs[1])
    if one.name == "samples.jsonl":
        return one.read_text() == other.read_text()
    if one.suffix == ".pt":
        states = [torch.load(path, weights_only=True) for path in (one, other)]
        return alike(timeless(states[0]), timeless(states[1]))
    return True


def timeless(value: Any) -> Any:
    """Returns the data without entries that say how long something took."""
    if isinstance(value, dict):
        return {
            key: timeless(below)
            for key, below in value.items()
            if not str(key).startswith(("time/", "memory/", "sync/"))
        }
    return [timeless(below) for below in value] if isinstance(value, list | tuple) else value


def alike(one: Any, other: Any) -> bool:
    """Returns whether two nested values are the same to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def dooms(record: dict[str, Any], cluster: bool, draw: random.Random) -> Iterator[Doom]:
    """Ends of runs that go as `record` says: kills without end, each place in turn."""
    calls = record["calls"]
    for turn in itertools.count():
        by_operation = draw.random() < 0.5
        for place in (place for place in PLACES if calls[place]):
            number = draw.randrange(place != "model", len(calls[place]))  # a state is there from the second call on
            call = calls[place][number]
            if place in ("training state", "model") and by_operation:
                yield Doom(place, number, operation=draw.randrange(call["operations"]))
            else:
                worker = cluster and place in OF_WORKERS and turn % 2 == 1
                yield Doom(place, number, seconds=draw.uniform(0, call["seconds"]), worker=worker)
        yield (
            Doom(operation=draw.randrange(record["operations"]))
            if by_operation
            else Doom(seconds=draw.uniform(0, record["seconds"]))
        )


def chaos(directory: Path, kind: str, kills: int, draw: random.Random) -> list[str]:
    """Kills runs until there were so many kills; returns what went wrong."""
    runs, whole = Runs(directory, kind), directory / f"{kind}-whole"
    if runs.finish(runs.start(whole)) != 0:
        return [f"{kind}: the undisturbed run failed"]
    ends = itertools.islice(dooms(runs.record(), kind in CLUSTERS, draw), draw.randrange(len(PLACES) + 1), None)
    wrong: list[str] = []
    places: Counter[str] = Counter()
    completed = continued = 0
    doom: Doom | None = next(ends)
    while doom is not None and not wrong:
        output, undisturbed = directory / f"{kind}-{completed}", doom
        while True:  # runs of one directory, until one is not killed: it had less to do than it takes
            status = runs.finish(runs.start(output, doom))
            if status is None or (status and doom is not None and doom.worker):
                places[str(doom)] += 1
                continued += any(output.glob("training_state_*"))
                doom = next(ends) if places.total() < kills else None
            else:
                break
        completed += 1
        if doom is not None and not status and runs.record()["killed"]:  # and started again by itself
            places[str(doom)] += 1
            doom = next(ends) if places.total() < kills else None
        elif doom is undisturbed:  # a whole run did not come to it, nor would the next: operations go by time, too
            doom = next(ends)
        compared = accounts if kind.startswith(PARTIAL) else differences
        wrong += [f"exit status {status}"] if status else list(compared(output, whole))
        shutil.rmtree(output)
    told = ", ".join(f"{count} {place}" for place, count in places.items())
    print(
        f"{kind}: {places.total()} kills ({told}; {continued} of them after a training state), {completed} runs "
        f"completed, {'; '.join(wrong) or 'nothing differs'}",
        flush=True,
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=[*KINDS, *CLUSTERS], default=list(KINDS))
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(directory / "cache")
        make_workspace(directory)
        import datasets  # noqa: F401
        import matplotlib.figure  # noqa: F401
        import transformers.models.llama.modeling_llama  # noqa: F401

        import rollgrad.entrypoints.cli.commands
        import rollgrad.entrypoints.library  # noqa: F401
        from rollgrad.adapters.tracking import curves

        curves.PANELS = ()  # charts take as long as a run
        share = -(-arguments.kills // len(arguments.only))
        draw = random.Random(arguments.seed)
        wrong = [found for kind in arguments.only for found in chaos(directory, kind, share, draw)]
        if wrong:
            print((directory / "log").read_text()[-5000:])
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
