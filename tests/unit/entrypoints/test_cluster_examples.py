"""The scripts of examples/cluster: with --dry_run they check the settings, else they call what they say."""

import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from rollgrad.application.settings.derived import ranks
from rollgrad.application.settings.rules import validate
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.config_io import structure_config
from tests.fakes.cluster import wait_for

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ("slurm.sh", "ray_job.sh")
DEADLINE = 300
"""Seconds that a script may take on a busy machine."""


@pytest.fixture
def workplace(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A checkout's examples, with a tiny model where the demo unpacks the real one."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(tiny_model_dir, tmp_path / ".models" / "SmolLM2-135M-Instruct")
    return tmp_path


def run(script: str, *arguments: str, workplace: Path, programs: Path, **environment: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr; the commands that it calls are looked for in `programs` first."""
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", f"examples/cluster/{script}", *arguments],
        cwd=workplace,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
    )
    return done.returncode, done.stdout, done.stderr


def programs(place: Path, **sources: str) -> Path:
    directory = place / "programs"
    directory.mkdir()
    for name, source in sources.items():
        (directory / name).write_text(f"#!/bin/sh\n{source}\n")
        (directory / name).chmod(0o755)
    return directory


def rehearsed(script: str, *flags: str, workplace: Path, status: int = 0) -> tuple[list[str], list[str]]:
    """Lines that a dry run of the script prints, and the words after `rollgrad` of the command that it calls, whose
    exit status it hands on."""
    recording = programs(workplace, rollgrad=f'printf "%s\\n" "$@" > words\nexit {status}')
    arguments = ("--dry_run", "examples/sums_cluster.yaml", *flags)
    ended, output, errors = run(script, *arguments, workplace=workplace, programs=recording)
    assert (ended, errors) == (status, "")
    return output.splitlines(), (workplace / "words").read_text().splitlines()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_prints_the_command_and_checks_the_settings(
    script: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said, words = rehearsed(script, "--train.max_steps", "3", workplace=workplace)
    assert all(line.startswith("+ ") for line in said)
    assert "rollgrad train rl --config examples/sums_cluster.yaml --cluster.address auto" in said[-1]
    assert said[-1].endswith("--train.max_steps 3")
    assert said[-1].endswith(shlex.join(words[:-1]))
    assert words[-1] == "--dry_run"
    monkeypatch.chdir(workplace)
    assert main(words) == 0
    assert {'cluster.address: "auto"', "train.max_steps: 3"} <= {*capsys.readouterr().out.splitlines()}
    assert not (workplace / "runs").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_refuses_what_the_run_would(
    script: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, words = rehearsed(script, "--ds.param_offload", "--ds.zero_stage=2", workplace=workplace, status=2)
    monkeypatch.chdir(workplace)
    assert main(words) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if "level=info" not in line]
    assert len(told) == 1
    assert told[0].startswith("error: ds.param_offload is True, but ds.zero_stage 2")


RECORD = 'echo "${0##*/} $*" >> calls'


@pytest.mark.parametrize("status", [0, 130])
@pytest.mark.parametrize("nodes", [1, 3])
def test_slurm_starts_ray_everywhere_runs_once_and_ends_it(nodes: int, status: int, workplace: Path) -> None:
    # Like `ray start --block`, srun lasts until it is killed; the run begins when all have joined.
    joined = "until grep -q srun calls; do sleep 0.1; done" if nodes > 1 else "true"
    recording = programs(
        workplace,
        ray=f'{RECORD}\n[ "$1" != get-auth-token ] || echo secret',
        rollgrad=f"{joined}\n{RECORD}\nexit {status}",
        srun=f"{RECORD}\nexec sleep {DEADLINE}",
    )
    where = {"workplace": workplace, "programs": recording, "SLURM_JOB_NUM_NODES": str(nodes)}
    ended, output, _ = run("slurm.sh", "my.yaml", "--train.seed", "2", **where)
    assert ended == status
    host = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
    joins = f"srun --nodes 2 --ntasks 2 --exclude {host} ray start --address {host}:6379 --block"
    expected = [
        "ray start --head --port 6379",
        *([joins] if nodes > 1 else []),
        "rollgrad train rl --config my.yaml --cluster.address auto --ckpt.resume auto --train.seed 2",
    ]
    token = "ray get-auth-token --generate"
    assert (workplace / "calls").read_text().splitlines() == [token, *expected]
    assert [line.removeprefix("+ ").removesuffix(" &") for line in output.splitlines()] == expected


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_slurm_s_warning_makes_the_run_save_before_anything_ends(number: int, workplace: Path) -> None:
    """SLURM tells the script alone, as `#SBATCH --signal` says."""
    lines = (workplace / "examples" / "cluster" / "slurm.sh").read_text().splitlines()
    assert "#SBATCH --signal=B:USR1@300" in lines
    saves = "trap 'echo saved >> calls; exit 143' TERM\necho begun >> calls\nwhile true; do sleep 0.1; done"
    stand_ins = programs(workplace, ray="true", rollgrad=saves)
    environment = {**os.environ, "PATH": f"{stand_ins}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "examples/cluster/slurm.sh", "my.yaml"]
    with subprocess.Popen(command, cwd=workplace, env=environment, stdout=subprocess.DEVNULL) as script:
        calls = workplace / "calls"
        wait_for(lambda: calls.exists() and calls.read_text() == "begun\n", "the run", DEADLINE)
        script.send_signal(number)
        assert script.wait(DEADLINE) == 143
    assert calls.read_text() == "begun\nsaved\n"


@pytest.mark.parametrize(("status", "address"), [(0, None), (7, "http://head:8265")])
def test_ray_job_hands_over_the_command_and_its_status(status: int, address: str | None, workplace: Path) -> None:
    recording = programs(workplace, ray=f"{RECORD}\nexit {status}")
    environment = {} if address is None else {"RAY_ADDRESS": address}
    ended, output, _ = run("ray_job.sh", "my.yaml", workplace=workplace, programs=recording, **environment)
    assert ended == status
    (call,) = (workplace / "calls").read_text().splitlines()
    assert call == (
        f"ray job submit --address {address or 'http://127.0.0.1:8265'} -- env -C {workplace} "
        "rollgrad train rl --config my.yaml --cluster.address auto"
    )
    assert output == f"+ {call}\n"


def test_kuberay_s_command_is_a_run_that_its_pod_has_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load((ROOT / "examples" / "cluster" / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert program == "rollgrad"
    assert main([*arguments, "--print_config"]) == 0
    config = structure_config(yaml.safe_load(capsys.readouterr().out))
    validate(config)
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (container,) = pod["containers"]
    limits = container["resources"]["limits"]
    processes = ranks(config) + config.vllm.num_engines
    assert processes <= limits["nvidia.com/gpu"]
    assert processes <= limits["cpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
