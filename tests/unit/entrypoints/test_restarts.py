"""A run that loses a process starts again from its last training state, a bounded number of times."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.ckpt import Resume
from rollgrad.domain.errors import START_AGAIN, LostProcessError, RollgradError, WorkerError
from rollgrad.domain.ports.checkpoint_store import TrainingState
from rollgrad.entrypoints import restarts
from rollgrad.entrypoints.restarts import until_finished
from rollgrad.entrypoints.run_record import RunRecord, read_run


@pytest.fixture
def run(tmp_path: Path) -> RLConfig:
    config = RLConfig()
    config.ckpt.output_dir = str(tmp_path / "run")
    return config


class Trainer:
    """Loses a process in each of its first starts, after some hours of training and with a training state."""

    def __init__(self, losses: int, hours: float = 0.0, state: bool = True, error: RollgradError | None = None) -> None:
        self.losses, self.hours, self.state = losses, hours, state
        self.error = error or LostProcessError(f"rank 1 died.{START_AGAIN}")
        self.starts: list[RLConfig] = []
        self.now = 0.0

    def __call__(self, config: RLConfig) -> str:
        self.starts.append(config)
        if self.state:
            store = LocalCheckpointStore(Path(config.ckpt.output_dir))
            store.save_training(TrainingState(step=len(self.starts), state={}, description=None))
        self.now += self.hours * 3600
        if len(self.starts) <= self.losses:
            raise self.error
        return "done"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trainer], Trainer]:
    def of(trainer: Trainer) -> Trainer:
        monkeypatch.setattr(restarts.time, "monotonic", lambda: trainer.now)
        return trainer

    return of


def test_it_starts_again_from_its_training_state_and_says_why(run: RLConfig) -> None:
    run.ckpt.overwrite = True
    trainer = Trainer(losses=3)
    with capture_logs() as logs:
        assert until_finished(run, trainer) == "done"
    assert [(start.ckpt.resume, start.ckpt.overwrite) for start in trainer.starts] == [
        (Resume.NEVER, True),
        *[(Resume.AUTO, False)] * 3,
    ]
    assert [(line["start"], line["reason"]) for line in logs] == [(n, "rank 1 died.") for n in (1, 2, 3)]
    assert run.ckpt.resume is Resume.NEVER, "the caller's settings stay as they are"


def test_without_a_training_state_it_starts_anew(run: RLConfig) -> None:
    run.ckpt.overwrite = True
    trainer = Trainer(losses=1, state=False)
    assert until_finished(run, trainer) == "done"
    assert (trainer.starts[1].ckpt.resume, trainer.starts[1].ckpt.overwrite) == (Resume.AUTO, True)


@pytest.mark.parametrize("most", [0, 2])
def test_one_that_cannot_go_on_ends_with_the_error(run: RLConfig, most: int) -> None:
    run.cluster.max_restarts = most
    trainer = Trainer(losses=9)
    with pytest.raises(LostProcessError, match="rank 1 died"):
        until_finished(run, trainer)
    assert len(trainer.starts) == 1 + most


def test_it_is_running_while_it_starts_again(run: RLConfig) -> None:
    directory, seen = Path(run.ckpt.output_dir), list[tuple[str, str | None]]()
    trainer = Trainer(losses=2)

    def train(config: RLConfig) -> str:
        directory.mkdir(parents=True, exist_ok=True)
        seen.extend((found["status"], found["reason"]) for found in [read_run(directory)] if found)
        with RunRecord(directory, learning={"steps": 4}):
            return trainer(config)

    assert until_finished(run, train) == "done"
    assert seen == [("running", f"starts again, {n} of 3 times: rank 1 died.") for n in (1, 2)]
    found = read_run(directory)
    assert found is not None
    assert found["status"] == "finished"


def test_losses_of_a_long_run_do_not_add_up(run: RLConfig, timed: Callable[[Trainer], Trainer]) -> None:
    run.cluster.max_restarts = 1
    assert until_finished(run, timed(Trainer(losses=5, hours=1.5))) == "done"
    with pytest.raises(LostProcessError):
        until_finished(run, timed(Trainer(losses=2, hours=0.5)))


def test_models_without_a_state_are_not_written_over(run: RLConfig) -> None:
    (Path(run.ckpt.output_dir) / "step_1").mkdir(parents=True)
    trainer = Trainer(losses=1, state=False)
    with pytest.raises(LostProcessError):
        until_finished(run, trainer)
    assert len(trainer.starts) == 1


def test_other_errors_end_it(run: RLConfig) -> None:
    error: Any = WorkerError("rank 0 failed (ValueError)")
    with pytest.raises(WorkerError, match="ValueError"):
        until_finished(run, Trainer(losses=1, error=error))
