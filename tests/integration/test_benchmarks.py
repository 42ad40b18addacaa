"""Every script under benchmarks/ starts, does its smallest work (`--smoke`) and prints its result."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.scripts import QUIET, ScriptHost

pytestmark = [pytest.mark.demo, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]


def documented(page: str, head: str) -> str:
    """The table of a page of docs/ that begins with `head`."""
    rest = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n{head}")[2]
    return head + rest.partition("\n\n")[0]


RESULTS = {
    "activations.py": r"(?s:^full, moved .*)^floor: \d+\.\d MiB, \d+\.\d\d s of the processor$",
    "advantages.py": r"^ratio \d+\.\d+$",
    "agents_learn.py": r"a taskset of verifiers 0\.4\s*│ \d\.\d\d",
    "async_overlap.py": r"partial rollout, recomputed │\s+\d+\.\d\d",
    "cluster_learns.py": r"colocated │ \d+%",
    "controller.py": r"^growth \d+\.\d+$",
    "data_plane.py": r"^idle \d+ ns, \d+\.\d bytes$",
    "expert_parallel.py": r"(?s:^gathered over divided: \d+\.\d times the bytes$.)"
    r"^divided over the least, .*: \d+\.\d times$",
    "first_light.py": r"(?s:gpu_equals_cpu +ok$.*attention_is_right +ok$.*deepspeed +ok$)",
    "judges.py": r"^reasoning-gym: \d+ verdicts/s, without walls \d+: \d+\.\d+ times$",
    "learning_curves.py": r"on_policy_distill │\s+\d+%",
    "load_memory.py": r"^│ \d+\.\d\d GB .*│ \d+%",
    "long_episodes.py": r"^ratio \d+\.\d+$",
    "loops_learn.py": r"csft +│ 1 +│ +-\d+\.\d\d",
    "pictures_learn.py": r"streak +│ 1 +│ \d+ +│ \d+%",
    "prompt_sharing.py": r"^work \d+\.\d+$",
    "memory_plan.py": r"^planned over measured: (0\.9|1\.0)\d to 1\.[0-2]\d$",
    "real_clients.py": re.escape(documented("agents.md", "| client |")),
    "run_page.py": r"(?s:^one of \d+ tokens .*^memory of the server +\d+ MB$.*^50 trajectories$.*^1 steps .* 1 have "
    r"the same$.*^on the clock .*: undecided$.*^directly: .* of a step: (under|over) 1%$)",
    "sequence_parallel.py": r"^copies over queries: 3\.0 times the bytes$",
    "server_load.py": r"attacked \d+\.\d+ s: \d+\.\d+ times$",
    "streaming.py": r"embedded, 2 at once: first token \d+\.\d+ s; .*: [+-]\d+ us a token",
    "sums_reward_model.py": r"^\d+% of right and wrong replies",
    "states.py": r"^packed \d+\.\d times, kept \d+\.\d times$",
    "state_save.py": r"^│ \d+\.\d\d GB .*│ \d+\.\d+%",
    "tinker_recipes.py": r"(?s:^\| chat_sl \| .* \| \d+\.\d\d \|$.)^\| math_rl \| .* \| -?\d\.\d\d \|$",
    "trainers_learn.py": r"kd +│ tokens right +│ \d\.\d+ +│ \d\.\d+",
    "versus_trl.py": r"(?s:^ratio .*^ratio .*)^ratio \d+\.\d+$",
    "weight_delta.py": r"^\d+\.\d times fewer bytes at 5%$",
    "weight_fleet.py": r"^trainer and engines differ by \d\.\de-\d\d nats a token at most$",
    "weight_sync.py": r"tokens/s, 2 rows +\d+",
}
"""A line of the result that each script prints."""
SPAWNING = {"expert_parallel.py", "load_memory.py", "sequence_parallel.py"}
"""Scripts that start groups of processes, which are forks here."""
ON_VLLM = {"real_clients.py", "weight_delta.py", "weight_sync.py"}
"""Scripts that start vLLM, whose processes are forks, too."""
CLUSTERS = {"cluster_learns.py", "weight_fleet.py"}
"""Scripts that start Ray, whose workers are forks, too."""
LONG = {
    *("activations.py", "agents_learn.py", "cluster_learns.py", "first_light.py", "judges.py", "loops_learn.py"),
    *("pictures_learn.py", "real_clients.py", "server_load.py", "tinker_recipes.py", "trainers_learn.py"),
    *("versus_trl.py", "weight_delta.py", "weight_fleet.py", "weight_sync.py"),
}
"""Scripts whose smallest work takes a processor more than seven seconds, or the imports of vLLM. What they use of
rollgrad has tests of its own; that they call it rightly is checked with its types."""
STARTED_BY_OTHERS = {"server_clients.py"}
"""Scripts that a benchmark runs in a process of their own."""


def scripts() -> list[str]:
    """Files that run by themselves; the others are pytest's, or have what several share."""
    files = (ROOT / "benchmarks").glob("*.py")
    names = {file.name for file in files if '__name__ == "__main__"' in file.read_text(encoding="utf-8")}
    return sorted(names - STARTED_BY_OTHERS)


@pytest.fixture(scope="module")
def spawning_host(script_host: ScriptHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptHost]:
    """Runs programs whose spawned processes are forks."""
    host = ScriptHost(tmp_path_factory.mktemp("spawning"), ("forked_spawns",), QUIET, within=script_host)
    yield host
    host.close()


def test_each_script_is_started_here() -> None:
    assert scripts() == sorted(RESULTS), "a script under benchmarks/ has --smoke and, in RESULTS, a line that it prints"


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=pytest.mark.wide if name in LONG else ()) for name in scripts()]
)
def test_a_script_does_its_smallest_work(script: str, request: pytest.FixtureRequest) -> None:
    before = kept()
    kind = "worker" if script in ON_VLLM | CLUSTERS else "spawning" if script in SPAWNING else "script"
    host: ScriptHost = request.getfixturevalue(f"{kind}_host")
    variables = host.forks(workers=script in CLUSTERS)
    printed = host.run(f"benchmarks/{script}", "--smoke", variables=variables)
    assert re.search(RESULTS[script], printed, re.MULTILINE), printed
    assert kept() == before, "figures of the smallest work are not for the docs"


def test_the_table_of_recipes_has_the_figures_that_were_measured() -> None:
    from benchmarks.tinker_recipes import RECIPES, table

    measured = json.loads((ROOT / "benchmarks/results/tinker_recipes.json").read_text(encoding="utf-8"))
    assert table({name: measured[name] for name in RECIPES}) == documented("tinker.md", "| recipe |")


@pytest.mark.parametrize("chosen", ["not compiled", pytest.param("compiled", marks=pytest.mark.wide)])
def test_the_suites_do_their_smallest_work(
    chosen: str, run_script: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    words = ("--smoke", "--benchmark-only", "-q", "-p", "no:cacheprovider", "-k", chosen)
    printed = run_script("-m", "pytest", "benchmarks", *words)
    assert re.search(r"^\d+ passed", printed, re.MULTILINE), printed


def kept() -> dict[str, bytes]:
    """Files that the docs show, and results of benchmarks, by name."""
    folders = (ROOT / "docs" / "images", ROOT / "benchmarks" / "results")
    return {file.name: file.read_bytes() for folder in folders if folder.exists() for file in folder.iterdir()}
