"""`rollgrad doctor`: what is read from metadata, nvidia-smi and the machine."""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from rollgrad.adapters.engines.vllm.builds import cpu_builds, torch_build
from rollgrad.adapters.system.memory import total_memory
from rollgrad.entrypoints.cli import doctor
from rollgrad.entrypoints.cli.doctor_machine import (
    Driver,
    Gpu,
    compiled_each_time,
    compiler_problem,
    disk,
    driver_problem,
    missing_compiler,
    model_cache,
    parse_driver,
    parse_gpus,
    sharing_problem,
)
from rollgrad.entrypoints.cli.doctor_packages import Package, Requirements, requirements
from rollgrad.entrypoints.cli.main import main

ROOT = Path(__file__).resolve().parents[3]

# The first lines of nvidia-smi, as it printed them.
L40S = """\
Wed Aug 27 13:38:55 2025
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.163.01             Driver Version: 550.163.01     CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA L40S                    On  |   00000000:04:01.0 Off |                    0 |
| N/A   34C    P8             23W /  350W |       1MiB /  46068MiB |      0%      Default |
"""
H100 = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.173.02             Driver Version: 580.173.02     CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
|=========================================+========================+======================|
|   0  NVIDIA H100 80GB HBM3          Off |   00000000:8D:00.0 Off |                   On |
| N/A   31C    P0             69W /  700W |       0MiB /  81559MiB |     N/A      Default |
"""
WINDOWS = "| NVIDIA-SMI 581.80                 Driver Version: 581.80         CUDA Version: 13.0     |"
NEWER = "| NVIDIA-SMI 610.47                 Driver Version: 610.47         CUDA UMD Version: 13.3 |"
NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest\n"


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        (L40S, Driver("550.163.01", "12.4")),
        (H100, Driver("580.173.02", "13.0")),
        (WINDOWS, Driver("581.80", "13.0")),
        (NEWER, Driver("610.47", "13.3")),
        (NO_DRIVER, None),
        ("No devices were found\n", None),
        ("", None),
    ],
)
def test_the_driver_is_read_from_nvidia_smi(text: str, driver: Driver | None) -> None:
    assert parse_driver(text) == driver


def test_gpus_are_read_from_nvidia_smi() -> None:
    text = "NVIDIA H100 80GB HBM3, 81559\nNVIDIA RTX A6000, Ada, 49140\nNVIDIA GB10, [N/A]\n"
    sizes = [81559 * 2**20, 49140 * 2**20, None]
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA RTX A6000, Ada", "NVIDIA GB10"]
    assert parse_gpus(text) == [Gpu(name, size) for name, size in zip(names, sizes, strict=True)]
    assert parse_gpus("No devices were found\n") == []


@pytest.mark.parametrize(
    ("driver", "cuda", "said"),
    [
        (Driver("550.163.01", "12.4"), "13.0", "driver 550.163.01 supports CUDA 12.4 at most: install a newer driver"),
        (Driver("550.163.01", "12.4"), "12.8", None),
        (Driver("580.173.02", "13.0"), "12.8", None),
        (
            Driver("580.173.02", "13.0"),
            None,
            "built without CUDA, so no GPU is used: install a torch built for CUDA 13",
        ),
        (None, "13.0", None),
        (None, None, None),
    ],
)
def test_torch_s_build_is_held_against_the_driver(driver: Driver | None, cuda: str | None, said: str | None) -> None:
    problem = driver_problem(driver, [Gpu("H100", None)], cuda, "2.13.0")
    assert (problem is None) == (said is None)
    assert said is None or said in str(problem)


def test_modules_that_each_process_compiles_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    source = tmp_path / "torch" / "__init__.py"
    source.touch()
    found = importlib.util.spec_from_file_location("torch", source)
    assert found is not None
    assert found.cached is not None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert "-m compileall -q" in str(compiled_each_time())
    Path(found.cached).parent.mkdir(parents=True, exist_ok=True)
    Path(found.cached).touch()
    assert compiled_each_time() is None
    Path(found.cached).unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert compiled_each_time() is None


def test_what_kernels_are_compiled_with_has_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu("H100", None)]
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()
    assert compiler_problem(gpus) is None
    (tmp_path / "Python.h").unlink()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    said = compiler_problem(gpus)
    assert said is not None
    assert f"a C compiler and Python's headers ({tmp_path}/Python.h) lack here" in said
    assert compiler_problem([]) is None


def test_gpus_that_take_one_process_alone_are_told() -> None:
    assert sharing_problem(["Default", "Default"]) is None
    assert sharing_problem(["[N/A]"]) is None
    assert sharing_problem([]) is None
    one, two = (
        sharing_problem(modes) for modes in (["Default", "Exclusive_Process"], ["Prohibited", "Exclusive_Process"])
    )
    assert one is not None
    assert one.startswith("GPU 1 is in the compute mode Exclusive_Process, so that no two processes")
    assert two is not None
    assert two.startswith("GPUs 0, 1 are in the compute mode Exclusive_Process and Prohibited, so")


def test_all_extras_of_the_project_are_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = requirements()
    assert asked is not None
    assert set(asked.extras) == set(project["optional-dependencies"])
    assert {package.name for package in asked.extras["qlora"]} == {"peft", "bitsandbytes", "accelerate"}
    assert {"torch", "transformers", "tyro"} <= {package.name for package in asked.required}
    assert asked.python == project["requires-python"]
    assert set(doctor.PURPOSES) | {*doctor.CLUSTER, *doctor.ENGINES} == set(asked.extras)


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed package that asks for some that are there, not there, and there in another version."""
    (tmp_path / "asking-1.0.dist-info").mkdir()
    (tmp_path / "asking-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: asking\nVersion: 1.0\nRequires-Python: >=3.99\n"
        "Requires-Dist: attrs>=20\nRequires-Dist: no-such-package>=1\nRequires-Dist: pyyaml<1\n"
        "Provides-Extra: more\nProvides-Extra: none\n"
        'Requires-Dist: rich>=1; extra == "more"\nRequires-Dist: no-such-extra; extra == "none"\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "asking"


def test_versions_are_held_against_what_is_asked_for(distribution: str) -> None:
    asked = requirements(distribution)
    assert asked is not None
    assert [package.fits for package in asked.required] == [True, False, False]
    assert (asked.missing("more"), asked.missing("none")) == (False, True)
    python, absent, outside = asked.problems
    assert python == f"Python is {platform.python_version()}, but rollgrad is tested with >=3.99."
    assert absent == "no-such-package is not installed, which every run needs: pip install rollgrad."
    assert outside.startswith("pyyaml is ")
    assert outside.endswith("but rollgrad is tested with <1.")


def test_what_is_not_installed_has_no_metadata() -> None:
    assert requirements("no-such-distribution") is None


def test_torch_s_build_is_read_without_importing_it() -> None:
    import torch

    assert torch_build("cuda") == torch.version.cuda


def test_disks_are_those_where_a_run_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk(tmp_path / "not" / "there").free_bytes > 0
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert model_cache() == Path("~/.cache/huggingface/hub")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert model_cache() == tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert model_cache() == tmp_path / "cache"
    assert total_memory() > 2**28


def test_trial_imports_name_what_fails(capsys: pytest.CaptureFixture[str]) -> None:
    report = doctor.Report(quiet=False)
    report.facts["torch"] = {}
    packages = (Package("attrs", "", "25"), Package("cattrs", "", "25"), Package("absent", "", None))
    asked = Requirements(python="", required=packages, extras={"dev": (Package("no-such-package", "", "1"),)})
    doctor.try_imports(report, asked)
    assert report.problems == []
    doctor.try_imports(report, Requirements(python="", required=(Package("no-such-module", "", "1"),), extras={}))
    (problem,) = report.problems
    assert "importing no_such_module fails: ModuleNotFoundError" in problem
    printed = capsys.readouterr().out
    assert "attrs          works" in printed
    assert problem in printed


def test_it_ends_with_what_can_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) in (0, 1)
    text = capsys.readouterr().out
    asked = requirements()
    assert asked is not None
    able = text.partition("What can run here\n")[2]
    for what in (
        "training in this process",
        "compiled layers",
        "vLLM engines",
        "a cluster",
        "the demos",
        "LoRA",
        "TensorBoard",
    ):
        assert f"  {what}" in able
    assert all(": yes" in line or ": no" in line for line in able.splitlines())
    for name in ("/dev/shm", "memory", "cores", "disk, output", "disk, models", "driver", "GPUs", "Python", "torch"):
        assert f"\n  {name}" in text
    for extra in set(asked.extras) - doctor.NOT_TRIED:
        assert f"  [{extra}]" in text
    assert "(allowed: " in text


def test_it_says_how_weights_reach_engines_beside_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.machine, "find_gpus", lambda: (None, [Gpu("H100", 80 * 2**30)]))
    monkeypatch.setattr(Requirements, "missing", lambda self, extra: False)  # also where there is no vLLM
    import torch

    main(["doctor"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "weights to engines" in line]
    without = cpu_builds()
    assert line.endswith(f"by shared memory: {without}" if without else "by the GPUs (nccl, cuda_ipc)")
    assert bool(without) == (torch.version.cuda is None)


@pytest.mark.parametrize(
    ("on_gpu", "variables", "missing"),
    [
        (False, {}, None),
        (False, {"CXX": "no-such-compiler"}, "a C++ compiler (g++, or the variable CXX)"),
        (True, {"CC": "no-such-compiler"}, "a C compiler (gcc, or the variable CC)"),
        (True, {}, None),
    ],
)
def test_it_says_what_compiling_needs(
    on_gpu: bool, variables: dict[str, str], missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton" or None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in ("gcc", "g++") else None)
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert missing_compiler(on_gpu=on_gpu) == missing


def test_without_triton_a_gpu_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing_compiler(on_gpu=True) == "triton"


def test_json_has_every_fact(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert (status == 1) == bool(facts["problems"])
    assert facts["python"] == platform.python_version()
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 0
    assert {"version", "cuda", "gpus"} <= set(facts["torch"])
    for extra, about in facts["extras"].items():
        assert set(about) == {"installed", "missing", "outside", "install"}
        assert about["install"] == f"pip install 'rollgrad[{extra}]'"
    assert {
        "system",
        "transformers",
        "driver",
        "disks",
        "shared_memory_bytes",
        "can_run",
        "warnings",
        "problems",
    } <= set(facts)


def test_lines_come_as_they_are_found(tmp_path: Path) -> None:
    """The first lines are read while nvidia-smi still waits: for us, who have read them."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        f"#!/bin/sh\nwhile [ ! -e {tmp_path}/read ]; do sleep 0.05; done\n"
        f'case "$1" in --query*) echo "NVIDIA H100, 81559";; *) cat {tmp_path}/banner;; esac\n'
    )
    smi.chmod(0o755)
    (tmp_path / "banner").write_text(H100)
    process = subprocess.Popen(
        [sys.executable, "-m", "rollgrad.entrypoints.cli.main", "doctor"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "The machine\n"
    (tmp_path / "read").touch()
    rest, _ = process.communicate(timeout=300)
    assert "driver         580.173.02, for CUDA up to 13.0" in rest
    assert "GPUs           NVIDIA H100 (80 GiB)" in rest
