"""Files with optimizers and schedules of the learning rate."""

from pathlib import Path
from typing import Any

import pytest

from rollgrad.application.settings.rules import setting_errors
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.optimizer import Optim
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.composition.anywhere import with_absolute_paths
from rollgrad.entrypoints.composition.models import make_optimizer
from rollgrad.entrypoints.composition.own_optimizer import check_own_optimizers, load_schedule

MINE = """
import itertools
import torch

calls = itertools.count()


def lr_scheduler(step, total_steps):
    return (total_steps - step) / total_steps


def negative(step, total_steps):
    return 1 - step


def forgetful(step, total_steps):
    return next(calls)


def failing(step, total_steps):
    return 1 / abs(step - 2)


def optim(groups):
    return torch.optim.SGD(groups)


def by_number(groups):
    return torch.optim.SGD(groups)


by_number.elementwise = True
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)


def test_a_schedule_and_an_optimizer_are_found(mine: None) -> None:
    config = RLConfig()
    config.actor.lr_scheduler_path, config.actor.optim_path = "mine.py", "mine.py"
    check_own_optimizers(config)
    settings = make_optimizer(config.actor, 4)
    assert settings.factors == (1.0, 0.75, 0.5, 0.25)
    assert [settings.factor(step) for step in (0, 3, 4)] == [1.0, 0.25, 0.25]
    assert settings.own is not None
    assert settings.own.setting == "--actor.optim_path mine.py"


def test_torch_has_optimizers_by_name() -> None:
    run = SFTRun()
    run.actor.optim_path = "torch.optim:Adafactor"
    check_own_optimizers(run)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.py", "--actor.lr_scheduler_path is 'gone.py', but there is no such file"),
        ("mine.py:gone", "mine.py:gone defines no gone: name a function with --actor.lr_scheduler_path mine.py:NAME"),
        ("mine.py:negative", "gives -1 at step 2 of 3: return the share of the peak"),
        ("mine.py:forgetful", "gives another learning rate when it is asked again for step 0"),
        ("mine.py:failing", r"failed at step 2: ZeroDivisionError: division by zero \(mine.py, line 21\)"),
        ("mine.py:optim", r"failed at step 0: TypeError: optim\(\) takes 1 positional"),
    ],
)
def test_a_bad_schedule_is_one_sentence(mine: None, path: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_schedule(path, 3, "--actor.lr_scheduler_path")


def test_all_problems_of_the_files_are_told(mine: None) -> None:
    config = RLConfig()
    config.actor.lr_scheduler_path = config.critic.optim_path = "gone.py"
    config.actor.optim_path, config.cluster.enable = "mine.py", True
    with pytest.raises(ConfigurationError) as caught:
        check_own_optimizers(config)
    first, second, third = str(caught.value).splitlines()
    assert first.startswith("--actor.lr_scheduler_path is 'gone.py'")
    assert second.startswith("--actor.optim_path mine.py does not say that it steps each number by itself")
    assert third.startswith("--critic.optim_path is 'gone.py'")
    config.actor.lr_scheduler_path = config.critic.optim_path = None
    config.actor.optim_path = "mine.py:by_number"
    check_own_optimizers(config)


def test_processes_of_a_cluster_find_the_files(mine: None, tmp_path: Path) -> None:
    config = RLConfig()
    config.actor.lr_scheduler_path, config.critic.optim_path = "mine.py", "mine.py:by_number"
    config.actor.optim_path = "torch.optim:SGD"
    found = with_absolute_paths(config)
    assert found.actor.lr_scheduler_path == str(tmp_path / "mine.py")
    assert found.critic.optim_path == f"{tmp_path / 'mine.py'}:by_number"
    assert found.actor.optim_path == "torch.optim:SGD"


def _rates(config: Any) -> None:
    config.actor.lr_scheduler_path, config.actor.lr_warmup_ratio = "mine.py", 0.1


def _constants(config: Any) -> None:
    config.actor.optim_path, config.actor.adam.betas = "mine.py", (0.5, 0.5)


def _muon(config: Any) -> None:
    config.actor.optim_path, config.actor.optim = "mine.py", Optim.MUON


def _divided(config: Any) -> None:
    config.actor.optim_path, config.cluster.enable, config.cluster.strategy = "mine.py", True, Strategy.DEEPSPEED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_rates, "actor.lr_warmup_ratio is 0.1, but actor.lr_scheduler_path mine.py gives the learning rate of every"),
        (_constants, "actor.adam.betas is (0.5, 0.5), but actor.optim_path mine.py is the optimizer"),
        (_muon, "actor.optim is muon, but actor.optim_path mine.py is the optimizer"),
        (_divided, "actor.optim_path is 'mine.py' with cluster.strategy deepspeed, whose processes step runs"),
    ],
)
def test_settings_that_it_replaces_are_refused(change: Any, message: str) -> None:
    config = RLConfig()
    change(config)
    assert [error for error in map(str, setting_errors(config)) if message in error]
