"""First light on one GPU, or several: what is right, and what is fast, in one call of under twenty minutes on one.

    python3 benchmarks/first_light.py [--smoke] [--only NAME,NAME] [--out DIR] [--seconds SECONDS]

Each section runs in a process of its own, which is killed when its time or that of all is over, so that none spoils or
holds up the next; those whose answers matter most come first. While one runs, the next makes its imports. What a
section finds is printed at once, and with --out written to OUT/first_light.json; if it failed or hung, so is the place
where it did. Sections that an error of CUDA's has ended are tried again in a mode in which each call is waited for. At
the end comes a table. `--smoke` is the same code on small shapes, for machines without a GPU too. Model: random weights
in the shape of Qwen3-0.6B, so nothing has to be downloaded. `divisions` and `fleets` are about two GPUs and more, and
take twenty minutes. `ipc` unpacks by vLLM's own file, of the installed vLLM or --vllm-packed; `deepspeed` needs that
library, `gpu_tests` what tests need. For a machine without a network `scripts/offline.py` gathers what it lacks.
"""

import argparse
import faulthandler
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where rollgrad is not installed

import benchmarks  # noqa: E402

benchmarks.__path__ = [str(ROOT / "benchmarks")]  # not those of another package

from benchmarks.first_light_common import RUN, Found  # noqa: E402
from benchmarks.first_light_engines import cluster, vllm  # noqa: E402
from benchmarks.first_light_families import families  # noqa: E402
from benchmarks.first_light_fast import (  # noqa: E402
    attention_is_fast,
    compiled,
    decode,
    fused,
    head,
    profile,
    state,
    update,
)
from benchmarks.first_light_many import deepspeed, fsdp2, ipc  # noqa: E402
from benchmarks.first_light_right import (  # noqa: E402
    architectures,
    attention_is_right,
    environment,
    gpu_equals_cpu,
    gpu_tests,
    graphs,
)
from benchmarks.first_light_several import divisions, fleets  # noqa: E402


def installed_packing() -> str:
    """The file of the installed vLLM that unpacks weights, found without importing it; empty without vLLM."""
    found = importlib.util.find_spec("vllm")
    return "" if found is None else str(Path(str(found.origin)).parent / "distributed/weight_transfer/packed_tensor.py")


LONGEST = 1170 + 1200 * (torch.cuda.device_count() > 1)
"""Seconds of all sections together, at most."""

ARGS = argparse.ArgumentParser()
ARGS.add_argument("--smoke", "--tiny", dest="tiny", action="store_true")
ARGS.add_argument("--only", default="", help="sections, by commas")
ARGS.add_argument("--out", default=os.environ.get("OUT", ""), help="folder of the results")
ARGS.add_argument("--seconds", type=float, default=LONGEST, help="of all sections together, at most")
ARGS.add_argument("--section", default="", help="the one to run in this process; --out is then its file")
ARGS.add_argument("--vllm-packed", default=installed_packing(), help="another packed_tensor.py than the installed one")

SECTIONS = {
    environment: 60,
    gpu_equals_cpu: 60,
    attention_is_right: 60,
    update: 120,
    decode: 90,
    graphs: 40,
    architectures: 90,
    fused: 60,
    head: 60,
    state: 90,
    attention_is_fast: 60,
    ipc: 90,
    profile: 60,
    fsdp2: 60,
    compiled: 120,
    vllm: 300,
    cluster: 460,
    families: 300,
    gpu_tests: 120,
    deepspeed: 150,
    divisions: 540,
    fleets: 660,
}
"""Seconds of each on a GPU at most, and what it compiles included."""

LEAST = 30.0
"""Seconds at least for a section that is tried again because of an error of CUDA's, which comes some calls later."""

STACKS = 4.0
"""Seconds before its end at which a section writes where each of its threads is."""


def run_section(name: str) -> bool:
    """Runs one in this process, once a line with its seconds comes; returns whether it failed."""
    out = Found()
    try:
        import transformers.models.qwen3.modeling_qwen3  # noqa: F401 (what all sections need)

        import rollgrad.adapters.engines.embedded.engine
        import rollgrad.adapters.models.torch.models  # noqa: F401

        seconds = float(sys.stdin.readline())
        stacks = open(f"{RUN.file}.stacks", "w")  # noqa: SIM115 (as long as the process)
        faulthandler.dump_traceback_later(max(1.0, seconds - STACKS), file=stacks)
        faulthandler.enable(stacks)
        globals()[name](out)
    except BaseException as error:
        traceback.print_exc()
        out["FAILED"] = f"{type(error).__name__}: {error}"[:500]
        out["at"] = traceback.format_exc()[-4000:]
        return True
    finally:
        faulthandler.cancel_dump_traceback_later()
    return False


class Section:
    """A section in a process of its own, which makes its imports and waits."""

    def __init__(self, name: str, **variables: str) -> None:
        self._ended = False
        self._folder = tempfile.TemporaryDirectory()
        self._file = Path(self._folder.name) / "found.json"
        words = [*sys.argv[1:], "--section", name, "--out", str(self._file)]
        self._child = subprocess.Popen(
            [sys.executable, __file__, *words],
            start_new_session=True,
            stdin=subprocess.PIPE,
            env={**os.environ, **variables},
        )

    def found(self, seconds: float) -> dict[str, Any]:
        """Lets it run; returns what it finds, after so many seconds at most."""
        assert self._child.stdin is not None
        with suppress(OSError):  # it has died
            self._child.stdin.write(f"{seconds}\n".encode())
            self._child.stdin.close()
        try:
            status: Any = self._child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = f"stopped after {seconds:.0f} s"
        self.end()
        found = json.loads(self._file.read_text()) if self._file.exists() else {}
        if status == 0 or "FAILED" in found:
            return found
        stacks = Path(f"{self._file}.stacks")
        at = stacks.read_text()[-6000:] if stacks.exists() else ""
        print(at, flush=True)
        return {**found, "FAILED": status, "at": at}

    def end(self) -> None:
        """Ends it, and the processes that it has started, once."""
        if not self._ended:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._ended = True


def tell(name: str, results: dict[str, dict[str, Any]], folder: str) -> None:
    """Prints what a section has found, and writes what all have."""
    print(f"== {name}: {json.dumps(results[name])}", flush=True)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "first_light.json").write_text(json.dumps(results, indent=1))


def results_of(names: Mapping[str, float], given: Any) -> dict[str, dict[str, Any]]:
    """Runs sections one after the other, while the next one starts, and tells what each has found; those that an error
    of CUDA's has ended run again, where each call is waited for. `names` has the seconds that each may take."""
    results: dict[str, dict[str, Any]] = {}
    began = time.perf_counter()
    begun: dict[str, Section] = {}
    try:
        for name, following in zip(names, [*[*names][1:], None], strict=True):
            t = time.perf_counter()
            left = min(given.seconds if given.tiny else names[name], given.seconds - (t - began))
            results[name] = {"FAILED": "no time was left for it"}
            if left > 0:
                for each in (name, following):
                    if each is not None and each not in begun:
                        begun[each] = Section(each)
                results[name] = begun[name].found(left)
            results[name]["seconds of it"] = round(time.perf_counter() - t, 1)
            tell(name, results, given.out)
        for name in [name for name, found in results.items() if "CUDA error" in str(found.get("FAILED"))]:
            left = min(names[name], given.seconds - (time.perf_counter() - began))
            if left > LEAST:
                again = begun[f"{name}, blocking"] = Section(name, CUDA_LAUNCH_BLOCKING="1")
                results[f"{name}, blocking"] = again.found(left)
                tell(f"{name}, blocking", results, given.out)
    finally:
        for section in begun.values():
            section.end()
    return results


def main() -> None:
    given = ARGS.parse_args()
    if given.section:
        RUN.tiny, RUN.file, RUN.packed = given.tiny, given.out, given.vllm_packed
        sys.exit(run_section(given.section))
    wanted = {n for n in given.only.split(",") if n}
    names = {s.__name__: seconds for s, seconds in SECTIONS.items() if not wanted or s.__name__ in wanted}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # sections are in sessions of their own, and would go on
    results = results_of(names, given)
    failed = [name for name, found in results.items() if "FAILED" in found]
    print("\n".join(f"{name:20} {'FAILED' if name in failed else 'ok'}" for name in results))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
