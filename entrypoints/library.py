"""The library face: the same runs as the command line, with any adapter replaced by keyword."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from attrs import evolve, field, frozen
from dependency_injector import providers

from rollgrad.adapters.rewards.function import FunctionReward
from rollgrad.adapters.tracking.report import write_report
from rollgrad.application.config import RLConfig
from rollgrad.application.evaluation import EvaluationService
from rollgrad.application.model_config import LoraConfig
from rollgrad.application.pipeline import Pipeline
from rollgrad.application.validation import validate, validate_evaluation
from rollgrad.domain.errors import CheckpointError, ConfigurationError
from rollgrad.domain.ports.checkpoint_store import CheckpointStore
from rollgrad.domain.ports.environment import Environment
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.entrypoints.config_io import load_config as load_config
from rollgrad.entrypoints.container import Container
from rollgrad.entrypoints.extensions import load_extension
from rollgrad.entrypoints.factories import METRICS_FILE, SAMPLES_FILE

Result = TypeVar("Result")


@frozen(kw_only=True)
class TrainResult:
    """Where the run left what it made, and how it went.

    `output_dir` holds `model/` (Hugging Face format), `metrics.jsonl`, `samples.jsonl` and the report. `before` and
    `after` are the held-out metrics, empty without an evaluation set.
    """

    output_dir: Path
    steps: int
    before: Mapping[str, float] = field(factory=dict)
    after: Mapping[str, float] = field(factory=dict)
    report: Path | None = None
    interrupted: bool = False

    @property
    def model(self) -> Path:
        """Directory of the trained model."""
        return self.output_dir / "model"


def train(
    config: RLConfig,
    *,
    reward: RewardSource | Callable[..., Any] | None = None,
    environment: Callable[[], Environment] | None = None,
    **adapters: Any,
) -> TrainResult:
    """Trains a model as `config` says.

    Args:
        config: the run; see `rollgrad train rl --help` for every setting.
        reward: a function that returns one number a reply and gets what its parameters are called (`queries`,
            `prompts`, `labels`, `completions`, columns of the row, ...; see docs/guide.md), or a `RewardSource`. Stands
            in for `config.reward`.
        environment: makes a fresh `Environment` (usually its class); episodes then have several turns, up to
            `config.rollout.max_turns`, and rewards come from the environment's steps; an episode whose last step has
            the reward None is judged by `reward`, or as `config.reward` says.
        adapters: objects that stand in for what the configuration would choose, by the port they implement:
            `engine`, `executor`, `prompts`, `policy`, `reference`, `critic`, `channel`, `sink`, `checkpoints`,
            `codec`, `clock` or any other provider of the container.

    Returns:
        What was made. An interruption (Ctrl-C) ends the run with the model of the last finished step.

    Raises:
        RollgradError: a setting, file or reward is wrong; the message says which and how to fix it.
    """
    load_extension(config)
    validate(config, has_reward=reward is not None, has_environment=environment is not None)
    container = _container(config, reward, environment, adapters)
    output_dir = Path(config.ckpt.output_dir)
    store: CheckpointStore = container.checkpoints()  # refuses an unwritable output before anything is loaded
    state = _training_state(store, config) if config.ckpt.resume else None
    metrics_path = output_dir / METRICS_FILE
    for log in (metrics_path, output_dir / SAMPLES_FILE):
        _keep_steps(log, until=-1 if state is None else state["run"]["step"])
    with _cluster(container, config):
        pipeline: Pipeline = container.pipeline()
        if state is not None:
            pipeline.resume(state)
        try:
            outcome = _run(_closing(pipeline.run(), container))
        finally:
            _close(container.reward, container.sink, container.engine)
    report = None
    if metrics_path.exists():
        title = f"{Path(config.actor.model_name_or_path).name} on {config.data.prompt_dataset}"
        report = write_report(metrics_path, output_dir, title=title, before=outcome.before, after=outcome.after)
    return TrainResult(
        output_dir=output_dir,
        steps=outcome.steps,
        before=outcome.before,
        after=outcome.after,
        report=report,
        interrupted=outcome.interrupted,
    )


def evaluate(
    config: RLConfig,
    *,
    reward: RewardSource | Callable[..., Any] | None = None,
    environment: Callable[[], Environment] | None = None,
    **adapters: Any,
) -> dict[str, float]:
    """Evaluates `config.actor.model_name_or_path` on `config.eval.dataset`; arguments as for `train`."""
    config = evolve(config, actor=evolve(config.actor, lora=LoraConfig()))  # the model as it is, which training changes
    load_extension(config)
    validate_evaluation(config, has_reward=reward is not None, has_environment=environment is not None)
    container = _container(config, reward, environment, adapters)
    container.reward_spec.override(providers.Object(config.eval.dataset))
    with _cluster(container, config):
        evaluation: EvaluationService = container.evaluation()
        try:
            return _run(_closing(evaluation.run(), container))
        finally:
            _close(container.reward, container.engine)


@contextmanager
def _cluster(container: Container, config: RLConfig) -> Iterator[None]:
    """The run's other processes, ended however the run ends."""
    if not config.cluster.enable:
        yield
        return
    cluster = container.cluster()
    try:
        yield
    finally:
        cluster.close()


def _training_state(store: CheckpointStore, config: RLConfig) -> Mapping[str, Any]:
    state = store.load_training()
    if state is None:
        raise CheckpointError(
            f"--ckpt.resume is on, but {config.ckpt.output_dir} holds no training state: leave it out to start anew, "
            "and set --ckpt.state_steps to be able to continue."
        )
    return state


def _keep_steps(log: Path, *, until: int) -> None:
    """Takes the lines of later steps out of a JSONL file; without any left, removes it."""
    if log.exists():
        kept = [line for line in log.read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] <= until]
        log.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        if not kept:
            log.unlink()


def _container(
    config: RLConfig,
    reward: RewardSource | Callable[..., Any] | None,
    environment: Callable[[], Environment] | None,
    adapters: Mapping[str, Any],
) -> Container:
    container = Container(config=config)
    if environment is not None:
        container.environment.override(providers.Object(environment))
    if reward is not None:
        source = (
            reward
            if isinstance(reward, RewardSource)
            else FunctionReward(
                reward,
                timeout=config.reward.timeout,
                name=getattr(reward, "__name__", type(reward).__name__),
                weights=config.reward.weights,
            )
        )
        container.reward.override(providers.Object(source))
    for name, adapter in adapters.items():
        if name not in container.providers:
            known = ", ".join(sorted(container.providers))
            raise ConfigurationError(f"train() has no adapter called {name!r}; the known ones are {known}.")
        container.providers[name].override(providers.Object(adapter))
    return container


def _close(*providers_used: providers.Provider[Any]) -> None:
    """Releases what holds threads, processes or files."""
    for provider in providers_used:
        close = getattr(provider(), "close", None)
        if close is not None:
            close()


async def _closing(work: Coroutine[Any, Any, Result], container: Container) -> Result:
    """Does `work`, then ends the connections of what it used, in the same event loop."""
    try:
        return await work
    finally:
        for used in (container.reward(), container.tool_box(), container.server(), container.engine()):
            aclose = getattr(used, "aclose", None)
            if aclose is not None:
                await aclose()


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine to its end, also from inside a running event loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    box: list[Result] = []
    errors: list[BaseException] = []
    cancel: list[Callable[[], object]] = []

    async def cancellable() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
        return await work

    def target() -> None:
        try:
            box.append(asyncio.run(cancellable()))
        except BaseException as error:  # whatever it is, the calling thread raises it
            errors.append(error)
        finally:
            done.set()

    done = threading.Event()  # an interrupted Thread.join cannot be repeated: Python 3.11 then takes it for ended
    threading.Thread(target=target).start()
    try:
        done.wait()
    except KeyboardInterrupt:  # it reaches the main thread only: the work has to be told
        for stop in cancel:
            stop()
        done.wait()
    if errors:
        raise errors[0]
    return box[0]
