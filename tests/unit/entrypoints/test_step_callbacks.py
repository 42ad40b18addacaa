"""Functions of each step, and trackers, that settings name."""

from pathlib import Path
from typing import Any

import pytest
from dependency_injector import providers

from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.errors import ConfigurationError, ForeignError
from rollgrad.entrypoints.composition.offline.sft import sft_container
from rollgrad.entrypoints.composition.rl.algorithm import make_sampling_plan
from rollgrad.entrypoints.composition.rl.container import rl_container
from rollgrad.entrypoints.config_io import load_config

RL = Path(__file__).parents[3] / "examples" / "sums.yaml"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "watch.py").write_text(
        "def on_step(step, metrics, groups): return {'mine/step': step}\n"
        "def other(step, metrics, groups): return None\n"
        "def narrow(step): return None\n"
        "def with_run(step, metrics, groups, run): return None\n"
    )
    return tmp_path


def rl(path: str | None) -> Any:
    config = load_config(RL)
    config.train.on_step_path = path
    return rl_container(config)


def sft(path: str | None) -> Any:
    config = SFTRun()
    config.train.on_step_path = path
    return sft_container(config)


@pytest.mark.parametrize("container", [rl, sft])
def test_every_trainer_calls_the_function_that_is_named(container: Any, here: Path) -> None:
    assert container("watch.py").on_step()(3, {}, ()) == {"mine/step": 3}
    assert container("watch.py:other").on_step().__name__ == "other"
    assert container(None).on_step() is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.py", "--train.on_step_path is 'nowhere.py', but there is no such file"),
        ("watch.py:gone", "--train.on_step_path watch.py:gone defines no function gone: name one with"),
        ("watch.py:narrow", r"on_step cannot be called with the three arguments step, metrics and groups \(too many"),
        ("watch.py:with_run", "on_step takes the run, whose methods are awaited, but is no coroutine function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(path: str, message: str, here: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rl(path).on_step()


def test_groups_are_filtered_by_the_function_that_is_named(here: Path) -> None:
    Path("filters.py").write_text("def keep(group): return group > 1\ndef mine(group): return group > 2\n")
    config = load_config(RL)
    for path, kept in {"filters.py": [2, 3], "filters.py:mine": [3]}.items():
        config.algo.dynamic_filtering_path = path
        keeps = make_sampling_plan(config, rl_container(config).group_filter()).group_filter.keeps
        assert keeps is not None
        assert [group for group in (1, 2, 3) if keeps(group)] == kept


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("", r"dynamic_filtering_path filters.py defines no function keep"),
        ("def keep(): return True", r"cannot be called with a group \(too many positional arguments\)"),
        ("async def keep(group): return True", "names a coroutine function, which nobody awaits"),
    ],
)
def test_a_filter_that_cannot_be_asked_is_refused(function: str, message: str, here: Path) -> None:
    Path("filters.py").write_text(function)
    config = load_config(RL)
    config.algo.dynamic_filtering_path = "filters.py"
    with pytest.raises(ConfigurationError, match=message):
        rl_container(config).group_filter()


def test_a_filter_that_fails_is_named_with_its_line(here: Path) -> None:
    Path("filters.py").write_text("def keep(group):\n    return group.gone\n")
    config = load_config(RL)
    config.algo.dynamic_filtering_path = "filters.py"
    keeps = rl_container(config).group_filter()
    assert keeps is not None
    with pytest.raises(ForeignError, match=r"the function failed: AttributeError.*'gone'.*filters.py, line 2"):
        keeps(1)


TRACK = """
from rollgrad.domain.ports.run_tracker import RunTracker

class Curve(RunTracker):
    def __init__(self, run):
        self.path = run.directory / "curve.txt"

    def log(self, step, metrics):
        self.path.write_text(f"{step} {metrics['reward/mean']}")

class Half:
    def log(self, step, metrics): ...

def tracker(run): ...
"""


def test_a_tracker_of_ones_own_gets_the_metrics(here: Path) -> None:
    (here / "track.py").write_text(TRACK)
    config = load_config(RL)
    config.logger.report_to, config.logger.console = ("track.py:Curve",), False
    config.ckpt.output_dir = str(here)
    container = rl_container(config)
    container.total_steps.override(providers.Object(1))
    sink = container.sink()
    sink.log(1, {"reward/mean": 0.5})
    sink.samples(1, [])
    sink.fail("it fell over")
    container.shutdown_resources()
    assert (here / "curve.txt").read_text() == "1 0.5"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Half", "track.py:Half, which is a class without samples, fail, close: a tracker is"),
        ("tracker", "track.py:tracker, which is no class: a tracker is a class, made of the run"),
        ("Gone", "track.py:Gone, which is no class"),
    ],
)
def test_what_is_no_tracker_is_refused(name: str, message: str, here: Path) -> None:
    (here / "track.py").write_text(TRACK)
    config = load_config(RL)
    config.logger.report_to = (f"track.py:{name}",)
    with pytest.raises(ConfigurationError, match=message):
        rl_container(config).trackers()
