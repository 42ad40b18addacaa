"""However a run ends, the last finished step's model and training state are there, and the run can go on from them."""

import asyncio
import io
import threading
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from structlog.testing import capture_logs

from rollgrad.application.pipelines.state_writing import StateWriter
from rollgrad.domain.batches.packed import Batch
from rollgrad.domain.control.findings import LearningWatch
from rollgrad.domain.control.staleness import StalenessBound
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.errors import (
    CheckpointError,
    EngineError,
    ExplodedWeightsError,
    NonFiniteUpdateError,
    OutOfMemory,
    RewardError,
    RollgradError,
    WorkerError,
)
from rollgrad.domain.ports.checkpoint_store import TrainingState
from rollgrad.domain.ports.models import PolicyModel, PolicyObjective, ValueModel
from rollgrad.testing.checkpoint_store import FakeCheckpointStore
from rollgrad.testing.models import VOCABULARY, FakePolicy
from tests.fakes.pipeline import GROUPS, PROMPTS, SAMPLES, Run, make_run

STEPS, FAILS_AFTER = 6, 3
EPISODES = GROUPS * SAMPLES
LOST = NonFiniteUpdateError("The loss is nan.")


class BreakingPolicy(FakePolicy):
    """Raises in the update after so many."""

    def __init__(self, after: int, error: RollgradError = LOST) -> None:
        super().__init__(torch.linspace(-0.5, 0.5, VOCABULARY))
        self.after = after
        self._error = error

    def update(self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch]) -> dict[str, float]:
        if len(self.updates) == self.after:
            raise self._error
        return super().update(micro_batches, objective)


def reward_fails(run: Run) -> None:
    def value(request: RewardRequest) -> float:
        return float("nan") if len(run.steps) == FAILS_AFTER else 0.5 + len(request.response) % 2

    run.rewards._value = value


def engine_fails(run: Run) -> None:
    log = run.sink.log

    def break_engine(step: int, metrics: Any) -> None:
        log(step, metrics)
        if step == FAILS_AFTER:
            run.engine.fail_with = "out of memory"

    run.sink.log = break_engine  # type: ignore[method-assign]


BREAKS: dict[str, tuple[Callable[[Run], None], type[Exception]]] = {
    "reward": (reward_fails, RewardError),
    "engine": (engine_fails, EngineError),
}


@pytest.fixture(params=[None, StalenessBound(updates=STEPS, groups=GROUPS, max_staleness=1)], ids=["sync", "async"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Run]:
    def build(**settings: Any) -> Run:
        return make_run(tmp_path, steps=STEPS, state_minutes=30.0, bound=request.param, **settings)

    return build


def trained_ids(run: Run) -> list[int]:
    return [int(i) for step in run.policy.updates for part in step for i in part.sample_ids_S]


@pytest.mark.parametrize(("breaks", "error"), BREAKS.values(), ids=BREAKS)
def test_an_error_leaves_the_last_finished_step(
    make: Callable[..., Run], breaks: Callable[[Run], None], error: type[Exception]
) -> None:
    run = make()
    breaks(run)
    with pytest.raises(error):
        run.train()
    done = len(run.steps)
    assert done >= 1
    assert run.checkpoints.models == ["model"]
    assert run.checkpoints.states["model"]["step"] == done
    assert run.checkpoints.training is not None
    assert run.checkpoints.training["run"]["step"] == done


def test_weights_with_which_nothing_can_be_computed_are_not_saved(make: Callable[..., Run]) -> None:
    run = make(policy=BreakingPolicy(FAILS_AFTER, ExplodedWeightsError("Step 4 has made a weight NaN.")))
    with pytest.raises(ExplodedWeightsError):
        run.train()
    assert "model" not in run.checkpoints.models


def test_a_run_that_an_update_ended_continues_as_if_it_never_had(make: Callable[..., Run]) -> None:
    """Also the prompts whose update failed are trained on, once."""
    broken = make(policy=BreakingPolicy(FAILS_AFTER))
    with pytest.raises(NonFiniteUpdateError):
        broken.train()
    state = broken.checkpoints.training
    assert state is not None
    assert state["run"]["step"] == FAILS_AFTER
    resumed = make()
    resumed.pipeline.resume(state)
    assert resumed.train().steps == STEPS
    assert sorted(trained_ids(broken) + trained_ids(resumed)) == list(range(STEPS * EPISODES))
    if "pending" not in state["run"]:  # which groups an asynchronous run joins in an update goes by time
        whole = make()
        whole.train()
        assert torch.equal(resumed.policy.state_dict()["table"], whole.policy.state_dict()["table"])


def test_a_last_evaluation_that_fails_does_not_cost_the_training(make: Callable[..., Run]) -> None:
    run = make(evaluation=True, max_failures=0)

    def value(request: RewardRequest) -> float:
        return float("nan") if len(run.steps) == STEPS else 0.5

    run.rewards._value = value
    with pytest.raises(RewardError):
        run.train()
    assert run.checkpoints.states["model"]["step"] == STEPS


def test_an_evaluation_is_neither_left_out_nor_repeated(tmp_path: Path) -> None:
    """Returns whether it ended the run, or the run was over."""

    def run(*, broken: bool = False) -> Run:
        made = make_run(tmp_path, steps=STEPS, eval_steps=2, evaluation=True, state_steps=1)
        if broken:
            made.rewards._value = lambda request: float("nan") if len(made.steps) == 2 else 0.5
        return made

    def evaluated(made: Run) -> list[int]:
        return [step for step, metrics in made.sink.records if "eval/pass@1" in metrics]

    first, second, third = run(broken=True), run(), run()
    with pytest.raises(RewardError):
        first.train()
    assert first.checkpoints.training is not None
    second.pipeline.resume(first.checkpoints.training)
    outcome = second.train()
    assert (evaluated(first), evaluated(second)) == ([0], [2, 4, 6])
    assert second.checkpoints.training is not None
    third.pipeline.resume(second.checkpoints.training)
    assert third.train() == outcome
    assert evaluated(third) == []


def test_a_model_of_a_step_is_neither_left_out_nor_written_twice(tmp_path: Path) -> None:
    """Returns whether the run ended as the step did, or later."""

    def run(*, ends_with: int | None = None, breaks_after: int = STEPS) -> Run:
        made = make_run(
            tmp_path,
            steps=STEPS,
            save_steps=2,
            state_steps=STEPS,
            state_minutes=30.0,
            policy=BreakingPolicy(breaks_after),
        )
        log = made.sink.log

        def end(step: int, metrics: Any) -> None:
            log(step, metrics)
            if step == ends_with:
                raise LOST

        made.sink.log = end  # type: ignore[method-assign]
        return made

    def resumed(before: Run, **settings: int) -> Run:
        made = run(**settings)
        assert before.checkpoints.training is not None
        made.pipeline.resume(before.checkpoints.training)
        return made

    first = run(ends_with=2)
    with pytest.raises(NonFiniteUpdateError):
        first.train()
    second = resumed(first, breaks_after=2)  # in step 5
    with pytest.raises(NonFiniteUpdateError):
        second.train()
    third = resumed(second)
    third.train()
    saved = [[name for name in made.checkpoints.models if name != "model"] for made in (first, second, third)]
    assert saved == [[], ["step_2", "step_4"], []]


async def test_programs_are_answered_while_a_report_is_written(make: Callable[..., Run]) -> None:
    run, loop, written = make(save_steps=2), asyncio.get_running_loop(), list[int]()

    def report() -> None:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(timeout=30.0)
        written.append(len(run.steps))

    await run.pipeline.run(report)
    assert written == [2, 4]


def test_optimizer_steps_of_an_unfinished_update_are_saved_in_the_model_alone(tmp_path: Path) -> None:
    """A training state in the middle of an update is of no use: the one before stays."""
    policy = BreakingPolicy(after=3)  # the second of two steps of the second update
    run = make_run(tmp_path, steps=STEPS, state_steps=1, policy=policy)
    run.update._batch_size = EPISODES // 2
    with pytest.raises(NonFiniteUpdateError):
        run.train()
    assert run.checkpoints.models == ["model"]
    assert run.checkpoints.training is not None
    assert run.checkpoints.training["run"]["step"] == 1


class HungryPolicy(BreakingPolicy):
    """Asks for more memory than any machine has."""

    def update(self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch]) -> dict[str, float]:
        if len(self.updates) == self.after:
            torch.empty(2**60)
        return super().update(micro_batches, objective)


class HungryRank(BreakingPolicy):
    """A process of it asks its GPU for more memory than it has."""

    def update(self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch]) -> dict[str, float]:
        if len(self.updates) == self.after:
            raise WorkerError("Of the 8 training processes of actor, rank 3 failed (OutOfMemoryError: CUDA out of")
        return super().update(micro_batches, objective)


@pytest.mark.parametrize("policy", [HungryPolicy, HungryRank])
def test_running_out_of_memory_saves_and_names_what_takes_less(
    policy: type[BreakingPolicy], make: Callable[..., Run]
) -> None:
    run = make(policy=policy(FAILS_AFTER))
    said = rf"^Step {FAILS_AFTER + 1} ran out of memory: lower --train.max_tokens_per_micro_batch\. \S"
    with pytest.raises(OutOfMemory, match=said):
        run.train()
    assert run.checkpoints.states["model"]["step"] == FAILS_AFTER
    assert run.checkpoints.training is not None


def test_nothing_trained_is_nothing_saved(make: Callable[..., Run]) -> None:
    run = make(policy=BreakingPolicy(after=0))
    with pytest.raises(NonFiniteUpdateError):
        run.train()
    assert run.checkpoints.models == []
    assert run.checkpoints.training is None


class FullDisk(FakeCheckpointStore):
    """Has no room for a model."""

    def save_model(self, policy: PolicyModel | ValueModel, name: str, critic: ValueModel | None = None) -> Path:
        raise CheckpointError("No space left on device")


def test_the_error_that_ended_the_run_is_raised_also_if_nothing_can_be_saved(
    make: Callable[..., Run], tmp_path: Path
) -> None:
    run = make(policy=BreakingPolicy(FAILS_AFTER))
    run.pipeline._checkpoints = FullDisk(tmp_path)
    with pytest.raises(NonFiniteUpdateError):
        run.train()


@pytest.mark.parametrize(("fails_after", "error"), [(FAILS_AFTER, NonFiniteUpdateError), (STEPS, CheckpointError)])
def test_a_training_state_is_saved_also_where_the_model_cannot_be(
    fails_after: int, error: type[RollgradError], make: Callable[..., Run], tmp_path: Path
) -> None:
    """Its directory may be on another disk; the run ends by an error of its own, or by that of the model."""
    run = make(policy=BreakingPolicy(fails_after))
    run.pipeline._checkpoints = FullDisk(tmp_path)
    with capture_logs() as logs, pytest.raises(error):
        run.train()
    assert run.checkpoints.training is not None
    assert run.checkpoints.training["run"]["step"] == fails_after
    assert continued(logs) == ([(fails_after, 0)] if fails_after < STEPS else [])


def test_nobody_is_told_to_continue_from_a_state_that_could_not_be_saved(make: Callable[..., Run]) -> None:
    run = make(policy=BreakingPolicy(FAILS_AFTER))
    run.checkpoints.save_training = no_room  # type: ignore[method-assign]
    with capture_logs() as logs, pytest.raises(NonFiniteUpdateError):
        run.train()
    assert [log["event"] for log in logs if "saved" in log["event"]] == ["no training state was saved"]
    assert continued(logs) == []


class LostRank(BreakingPolicy):
    """A process of it fails, without which nothing can be saved."""

    def save(self, path: Path) -> None:
        raise WorkerError("Of the 8 training processes of actor, rank 3 failed")

    def state_dict(self) -> dict[str, Any]:
        if len(self.updates) == self.after:
            raise WorkerError("Of the 8 training processes of actor, rank 3 failed")
        return super().state_dict()


@pytest.mark.parametrize(
    "policy",
    [LostRank(FAILS_AFTER), BreakingPolicy(FAILS_AFTER, ExplodedWeightsError("Step 4 has made a weight NaN."))],
    ids=["lost", "exploded"],
)
def test_where_nothing_more_can_be_saved_it_is_told_from_which_step_a_run_goes_on(
    policy: BreakingPolicy, tmp_path: Path
) -> None:
    run = make_run(tmp_path, steps=STEPS, state_steps=2, policy=policy)
    with capture_logs() as logs, pytest.raises(type(policy._error)):
        run.train()
    assert continued(logs) == [(2, FAILS_AFTER - 2)]
    assert "--ckpt.state_minutes" in logs[-1]["lose_fewer_by"]


def test_what_is_lost_without_any_training_state_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=STEPS, state_minutes=30.0, policy=LostRank(FAILS_AFTER))
    with capture_logs() as logs, pytest.raises(NonFiniteUpdateError):
        run.train()
    assert continued(logs) == []
    assert logs[-1]["event"] == "there is no training state from which the run could continue"
    assert logs[-1]["lost_steps"] == FAILS_AFTER


def continued(logs: Sequence[MutableMapping[str, Any]]) -> list[tuple[int, int]]:
    """From which step a log says that a run continues, and how many that loses."""
    return [(log["step"], log["lost_steps"]) for log in logs if "continues the run" in log["event"]]


# How often the training state is saved.


@pytest.mark.parametrize(
    ("minutes", "expected"), [(1.0, [1, 2, 3, 4, 5, 6]), (2.5, [3, 6]), (30.0, [5, 6]), (None, [])]
)
def test_the_training_state_is_saved_every_so_many_minutes_and_at_the_end(
    tmp_path: Path, minutes: float | None, expected: list[int]
) -> None:
    """Every step takes a minute."""
    run = make_run(tmp_path, steps=STEPS, state_minutes=minutes)
    saved: list[int] = []
    log, save = run.sink.log, run.checkpoints.save_training

    def a_minute_each(step: int, metrics: Any) -> None:
        run.clock.advance(60.0)
        log(step, metrics)

    def count(state: TrainingState) -> Path:
        saved.append(state.step)
        return save(state)

    run.sink.log = a_minute_each  # type: ignore[method-assign]
    run.checkpoints.save_training = count  # type: ignore[method-assign]
    run.train()
    assert saved == expected


def no_room(state: TrainingState) -> Path:
    raise CheckpointError("The training state cannot be written: No space left on device")


def test_a_state_that_nobody_asked_for_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, steps=STEPS, state_minutes=30.0)
    run.checkpoints.save_training = no_room  # type: ignore[method-assign]
    assert run.train().steps == STEPS
    assert "No space left" in capsys.readouterr().out
    asked = make_run(tmp_path, steps=STEPS, state_minutes=30.0, state_steps=2)
    asked.checkpoints.save_training = no_room  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="No space left"):
        asked.train()
    assert asked.checkpoints.models == ["model"]


# States that are written in the background.


class SlowStore:
    """Writes each training state of `run` when it is `released`; `begun` and `written` are the steps."""

    def __init__(self, run: Run) -> None:
        self.released = threading.Semaphore(0)
        self.begun: list[int] = []
        self.written: list[int] = []
        self._save = run.checkpoints.save_training
        run.checkpoints.save_training = self.save  # type: ignore[method-assign]

    def save(self, state: TrainingState) -> Path:
        assert self.begun == self.written, "one at a time"
        self.begun.append(state.step)
        assert self.released.acquire(timeout=60)
        path = self._save(state)
        self.written.append(state.step)
        return path


def in_background(tmp_path: Path, **settings: Any) -> Run:
    return make_run(tmp_path, steps=STEPS, state_steps=3, state_in_background=True, **settings)


def at_step(run: Run, at: int, call: Callable[[], Any]) -> None:
    log = run.sink.log

    def logged(step: int, metrics: Any) -> None:
        log(step, metrics)
        if step == at:
            call()

    run.sink.log = logged  # type: ignore[method-assign]


def test_training_goes_on_while_a_state_is_written(tmp_path: Path) -> None:
    """The state of step 3 is written after two more steps, and it is that of step 3; the run's end waits for it."""
    run = in_background(tmp_path)
    store = SlowStore(run)
    tables: dict[int, Any] = {}

    def look() -> None:
        assert store.written == []
        store.released.release(2)

    at_step(run, 5, look)
    at_step(run, 3, lambda: tables.update({3: run.policy.state_dict()["table"]}))
    save = store._save

    def keep(state: TrainingState) -> Path:
        tables[-state.step] = state.state["update"]["policy"]["table"]
        return save(state)

    store._save = keep
    assert run.train().steps == STEPS
    assert store.written == [3, STEPS]
    assert torch.equal(tables[-3], tables[3])
    assert not torch.equal(tables[-STEPS], tables[3])


def test_the_next_state_waits_for_the_one_before(tmp_path: Path) -> None:
    run = in_background(tmp_path)
    run.pipeline._schedule = evolve(run.pipeline._schedule, state_steps=2)
    store = SlowStore(run)
    store.released.release(3)
    assert run.train().steps == STEPS
    assert store.written == [2, 4, STEPS]


@pytest.mark.parametrize("minutes", [None, 30.0])
def test_a_state_that_could_not_be_written_is_told_in_the_next_step(
    minutes: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends the run if states were asked for by steps, after which the last one is written."""
    run = in_background(tmp_path)
    if minutes is not None:
        run.pipeline._schedule = evolve(run.pipeline._schedule, state_steps=-1, state_minutes=minutes)
        run.pipeline._states = StateWriter(run.checkpoints, required=False)
        at_step(run, 3, lambda: run.clock.advance(60 * minutes))
    save, calls, failed = run.checkpoints.save_training, list[int](), threading.Event()

    def fails_once(state: TrainingState) -> Path:
        calls.append(state.step)
        if len(calls) == 1:
            failed.set()
            return no_room(state)
        return save(state)

    run.checkpoints.save_training = fails_once  # type: ignore[method-assign]

    def wait() -> None:
        assert failed.wait(60)
        writing = run.pipeline._states._writing
        assert writing is not None
        writing[1].exception(60)

    at_step(run, 4, wait)
    if minutes is None:
        with pytest.raises(CheckpointError, match="No space left"):
            run.train()
        assert calls == [3, 4]
        assert run.checkpoints.models == ["model"]
    else:
        assert run.train().steps == STEPS
        assert calls == [3, STEPS]
        assert "No space left" in capsys.readouterr().out


def test_an_error_waits_for_the_state_that_is_being_written(tmp_path: Path) -> None:
    run = in_background(tmp_path, policy=BreakingPolicy(5))
    store = SlowStore(run)
    at_step(run, 5, lambda: store.released.release(2))
    with pytest.raises(NonFiniteUpdateError):
        run.train()
    assert store.written == [3, 5]


def test_weights_that_explode_leave_the_state_that_is_being_written(tmp_path: Path) -> None:
    """It is the newest from which the run can continue, and its processes end with the run."""
    run = in_background(tmp_path, policy=BreakingPolicy(5, ExplodedWeightsError("Step 6 has made a weight NaN.")))
    store, states = SlowStore(run), run.pipeline._states
    finish = states.finish

    def written_when_waited_for() -> None:
        store.released.release()
        finish()

    at_step(run, 5, lambda: setattr(states, "finish", written_when_waited_for))
    with pytest.raises(ExplodedWeightsError):
        run.train()
    assert store.written == [3]
    assert run.checkpoints.models == []


# Failed episodes.


def failing(every: int) -> Callable[[RewardRequest], float]:
    """Every so many-th judgement fails."""
    calls: list[int] = []

    def value(request: RewardRequest) -> float:
        calls.append(1)
        return float("nan") if len(calls) % every == 0 else float(len(calls) % 2)

    return value


def test_by_default_one_failed_episode_in_twenty_ends_no_run_and_is_named(
    make: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    """One of six episodes a rollout may fail: a twentieth, rounded up."""
    run = make(max_failures=None, value=failing(EPISODES + 1))
    assert run.train().steps == STEPS
    failed = sum(metrics.get("rollout/failed_reward", 0.0) for metrics in run.steps)
    assert failed >= 4
    assert capsys.readouterr().out.count("an episode failed") == failed


def test_by_default_more_failures_end_the_run_with_what_was_trained(make: Callable[..., Run]) -> None:
    run = make(max_failures=None)

    def value(request: RewardRequest) -> float:
        return float("nan") if len(run.steps) >= FAILS_AFTER else 0.5

    run.rewards._value = value
    with pytest.raises(RewardError, match=r"episodes failed \(\d reward\), and 1 may .*max_failures"):
        run.train()
    assert run.checkpoints.models == ["model"]


# What a rollout had left over.


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Run, dict[str, Any]]:
    """A run of over-sampling that was interrupted after its first step, and its state as it is read back."""
    run = make_run(tmp_path, steps=5, state_steps=1, in_flight=GROUPS + 1)

    async def interrupted() -> None:
        task = asyncio.create_task(run.pipeline.run())
        while len(run.steps) < 1:
            await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(interrupted())
    assert run.checkpoints.training is not None
    file = io.BytesIO()
    torch.save(run.checkpoints.training, file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert state["run"]["kept"], "the case that this is about"
    return run, state


def trained_tokens(run: Run) -> list[list[Any]]:
    """Returns the numbers of the samples of each micro-batch, and the versions of the weights that drew them."""
    return [
        [values.tolist() for values in (part.sample_ids_S, part.tokens_N, part.rollout_logprobs_N, part.versions_N)]
        for step in run.policy.updates
        for part in step
    ]


def test_groups_that_were_kept_for_the_next_rollout_are_part_of_the_state(
    kept: tuple[Run, dict[str, Any]], tmp_path: Path
) -> None:
    """A resumed run trains on what the weights of that moment had drawn, as a run that nothing interrupted."""
    first, state = kept
    resumed, whole = (make_run(tmp_path, steps=5, state_steps=1, in_flight=GROUPS + 1) for _ in range(2))
    resumed.pipeline.resume(state)
    assert resumed.pipeline.state_dict() == state["run"]
    assert resumed.train() == whole.train()
    assert trained_tokens(first) + trained_tokens(resumed) == trained_tokens(whole)
    assert torch.equal(resumed.policy.state_dict()["table"], whole.policy.state_dict()["table"])


def test_an_update_that_fails_leaves_the_groups_that_were_kept_as_they_were(tmp_path: Path) -> None:
    broken, resumed, whole = (
        make_run(tmp_path, steps=5, state_steps=1, in_flight=GROUPS + 1, policy=policy)
        for policy in (BreakingPolicy(1), None, None)
    )
    with pytest.raises(NonFiniteUpdateError):
        broken.train()
    assert broken.checkpoints.training is not None
    assert broken.checkpoints.training["groups"]
    resumed.pipeline.resume(broken.checkpoints.training)
    resumed.train()
    whole.train()
    assert trained_tokens(broken) + trained_tokens(resumed) == trained_tokens(whole)


def test_groups_of_a_state_without_their_samples_are_played_again(
    kept: tuple[Run, dict[str, Any]], tmp_path: Path
) -> None:
    """States of earlier versions: none is lost or trained on twice."""
    first, state = kept
    del state["groups"]
    second = make_run(tmp_path, steps=5, state_steps=1, in_flight=GROUPS + 1)
    second.pipeline.resume(state)
    assert second.pipeline.state_dict() == state["run"]
    assert second.train().steps == 5
    trained = trained_ids(first) + trained_ids(second)
    assert len(trained) == len(set(trained)) == 5 * EPISODES
    assert max(trained) == 5 * EPISODES - 1


def test_evaluations_that_fall_are_told_unless_their_settings_are_others(tmp_path: Path) -> None:
    def run(broken_after: int = 0) -> Run:
        """Replies are worth little from step 3 on, to one prompt a little more than to others."""
        made = make_run(tmp_path, steps=STEPS, eval_steps=1, evaluation=True, state_steps=1)

        def value(request: RewardRequest) -> float:
            if len(made.steps) == broken_after > 0:
                return float("nan")
            return (0.2 if len(made.steps) >= 3 else 0.8) + 0.01 * (request.prompt == PROMPTS[0])

        made.rewards._value = value
        return made

    whole = run()
    with capture_logs() as logs:
        whole.train()
    told = [(line["finding"], line["step"]) for line in logs if line.get("finding") == "evaluation_falls"]
    assert told == [("evaluation_falls", 4)]
    broken = run(broken_after=2)
    with pytest.raises(RewardError):
        broken.train()
    resumed = run()
    resumed.pipeline._schedule = evolve(resumed.pipeline._schedule, measured={"temperature": 1.0})
    state = broken.checkpoints.training
    assert state is not None
    resumed.pipeline.resume(state)
    assert resumed.pipeline.learning.evaluations_since == state["run"]["step"] + 1
    resumed.pipeline.watch_on({"eval/mean@1": {0: 0.8, 1: 0.8}, "eval/mean_stderr": {0: 0.01, 1: 0.01}})
    assert resumed.pipeline._watch == LearningWatch(resumed.pipeline.learning)
    again = run()
    again.pipeline._schedule = resumed.pipeline._schedule
    again.pipeline.resume(resumed.pipeline.training_state())
    assert again.pipeline.learning == resumed.pipeline.learning
