"""The library face: the same runs as the command line, with any adapter replaced by keyword."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import structlog
from attrs import evolve, field, frozen
from dependency_injector import providers

from rollgrad.adapters.checkpoints.names import METRICS_FILE
from rollgrad.adapters.rewards.function import FunctionReward
from rollgrad.adapters.tracking.report import write_report
from rollgrad.application.pipelines.run import Run
from rollgrad.application.rollouts.evaluation import EvaluationService
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.settings.correction import log_correction
from rollgrad.application.settings.rules import validate, validate_evaluation
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.errors import CheckpointError, ConfigurationError
from rollgrad.domain.ports.checkpoint_store import CheckpointStore
from rollgrad.domain.ports.environment import Environment
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.entrypoints.composition.extensions import load_extension
from rollgrad.entrypoints.composition.rl import RLContainer, rl_container
from rollgrad.entrypoints.config_io import load_config as load_config
from rollgrad.entrypoints.description import check_continues, settings_file
from rollgrad.entrypoints.event_loop import run_to_end
from rollgrad.entrypoints.run_directory import (
    LOGS,
    alone,
    continues,
    keep_steps,
    output_problem,
    remove_run,
    write_config,
)

log = structlog.get_logger(__name__)

Result = TypeVar("Result")


@frozen(kw_only=True)
class TrainResult:
    """Where the run left what it made, and how it went.

    `output_dir` holds `model/` (Hugging Face format), `metrics.jsonl`, `samples.jsonl` and the report. `before` and
    `after` are the held-out metrics, empty without an evaluation set. `findings` are sentences that say why the run
    could not learn, empty where nothing was found.
    """

    output_dir: Path
    steps: int
    before: Mapping[str, float] = field(factory=dict)
    after: Mapping[str, float] = field(factory=dict)
    report: Path | None = None
    interrupted: bool = False
    stopped_by: int | None = None
    """Signal that interrupted the run: SIGINT (Ctrl-C), SIGTERM or SIGHUP."""
    findings: tuple[str, ...] = ()

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
        What was made. An interruption (Ctrl-C, SIGTERM, SIGHUP) ends the run with the model of the last finished step.

    Raises:
        RollgradError: a setting, file or reward is wrong; the message says which and how to fix it. What was trained
            until then is saved before, as after an interruption.
    """
    load_extension(config)
    validate(config, has_reward=reward is not None, has_environment=environment is not None)
    problem = output_problem(config.ckpt)
    if problem is not None:
        raise CheckpointError(problem)
    config = _from_anywhere(config)
    container = _container(config, reward, environment, adapters)
    with alone(config.ckpt):
        return _train(config, container)


def _from_anywhere(config: RLConfig) -> RLConfig:
    """The same with absolute paths of what is written: code of the user's may change the current directory."""
    states, tensorboard = config.ckpt.state_dir, config.logger.tensorboard_dir
    return evolve(
        config,
        ckpt=evolve(
            config.ckpt,
            output_dir=str(Path(config.ckpt.output_dir).absolute()),
            state_dir=states and str(Path(states).absolute()),
        ),
        logger=evolve(config.logger, tensorboard_dir=tensorboard and str(Path(tensorboard).absolute())),
    )


def _train(config: RLConfig, container: RLContainer) -> TrainResult:
    output_dir = Path(config.ckpt.output_dir)
    problem = output_problem(config.ckpt)  # again: another run may have been there until now
    if problem is not None:
        raise CheckpointError(problem)
    store: CheckpointStore = container.checkpoints()  # refuses an unwritable output before anything is loaded
    saved = store.load_training() if continues(config.ckpt) else None
    if saved is not None:
        check_continues(saved.description, container.description())
    with _cluster(container, config):
        run: Run[RolloutGroup] = container.run()
        if saved is not None:
            run.resume(saved.state)
        elif config.ckpt.overwrite:  # not before: what cannot even begin replaces nothing
            remove_run(config.ckpt)
        for name in LOGS:
            keep_steps(output_dir / name, until=-1 if saved is None else saved.step)
        write_config(output_dir, settings_file(config))
        log_correction(config)
        try:
            outcome, stopped_by = run_to_end(_heeding_signals(_closing(run.run(), container)))
        except (Exception, SystemExit):  # whatever ended it, its curves are there to look at
            _report(config, {}, {})
            raise
        finally:
            _close(container.reward, container.sink, container.engine)
    return TrainResult(
        output_dir=output_dir,
        steps=outcome.steps,
        before=outcome.before,
        after=outcome.after,
        report=_report(config, outcome.before, outcome.after),
        interrupted=outcome.interrupted,
        stopped_by=stopped_by if outcome.interrupted else None,
        findings=run.findings,
    )


def _report(config: RLConfig, before: Mapping[str, float], after: Mapping[str, float]) -> Path | None:
    """The report's path; None if nothing was logged, or no report can be written, which is no reason to fail."""
    output_dir = Path(config.ckpt.output_dir)
    metrics_path = output_dir / METRICS_FILE
    if not metrics_path.exists():
        return None
    title = f"{Path(config.actor.model_name_or_path).name} on {config.data.prompt_dataset}"
    try:
        return write_report(metrics_path, output_dir, title=title, before=before, after=after)
    except Exception as error:  # of the disk, or of the library that draws
        log.warning("no report could be written", reason=str(error))
        return None


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
            return run_to_end(_closing(evaluation.run(), container))
        finally:
            _close(container.reward, container.engine)


@contextmanager
def _cluster(container: RLContainer, config: RLConfig) -> Iterator[None]:
    """The run's other processes, ended however the run ends."""
    if not config.cluster.enable:
        yield
        return
    cluster = container.cluster()
    try:
        yield
    finally:
        cluster.close()


def _container(
    config: RLConfig,
    reward: RewardSource | Callable[..., Any] | None,
    environment: Callable[[], Environment] | None,
    adapters: Mapping[str, Any],
) -> RLContainer:
    container = rl_container(config)
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


async def _closing(work: Coroutine[Any, Any, Result], container: RLContainer) -> Result:
    """Does `work`, then ends the connections of what it used, in the same event loop."""
    try:
        return await work
    finally:
        for used in (container.reward(), container.tool_box(), container.server(), container.engine()):
            aclose = getattr(used, "aclose", None)
            if aclose is not None:
                await aclose()


async def _heeding_signals(work: Coroutine[Any, Any, Result]) -> tuple[Result, int]:
    """(what `work` returns, the signal that cancelled it, if one did): SIGTERM, as schedulers send it before they kill,
    and SIGHUP, as a closed terminal does, are heeded like Ctrl-C, but where they are ignored (nohup)."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        if len(received) == 1:  # another one must not break off the saving
            task.cancel()

    own = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP) if own}
    heeded = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in heeded:
        loop.add_signal_handler(number, stop, number)
    try:
        result = await work
    finally:
        for number, handler in heeded.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
    return result, received[0] if received else signal.SIGINT
