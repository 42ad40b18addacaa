"""The library face: the same runs as the command line, with any adapter replaced by keyword."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import structlog
from attrs import evolve

from rollgrad.application.rollouts.evaluation import EvaluationService, PromptScores
from rollgrad.application.settings.correction import log_correction
from rollgrad.application.settings.rules import validate, validate_evaluation
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.application.settings.unit_ratio import log_ratios
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.environment import Environment
from rollgrad.entrypoints.composition.brought import check_brought, check_environment, is_rows
from rollgrad.entrypoints.composition.cluster import keep_roles
from rollgrad.entrypoints.composition.injection import providers
from rollgrad.entrypoints.composition.lifetimes import closing, give, given, gives_memory_back, shut_down
from rollgrad.entrypoints.composition.rl.container import RLContainer, rl_container
from rollgrad.entrypoints.composition.rl.data import make_eval_rows, make_row_source
from rollgrad.entrypoints.composition.rl.executors import has_turns
from rollgrad.entrypoints.composition.rl.extensions import load_extension
from rollgrad.entrypoints.composition.rl.rewards import Brought, brought_reward
from rollgrad.entrypoints.config_io import load_config as load_config
from rollgrad.entrypoints.evaluated_replies import evaluated_replies
from rollgrad.entrypoints.inputs import check_inputs
from rollgrad.entrypoints.run_directory import alone, check_output
from rollgrad.entrypoints.training import TrainResult as TrainResult
from rollgrad.entrypoints.training import from_anywhere, run_interruptibly, train_in

Result = TypeVar("Result")
TRUNCATED_SHARE = 0.1
"""Share of replies that are cut off from which on an evaluation says so."""

log = structlog.get_logger(__name__)


@gives_memory_back
def train(
    config: RLConfig,
    *,
    reward: Brought | Sequence[Brought] | None = None,
    environment: Callable[[], Environment] | None = None,
    **adapters: Any,
) -> TrainResult:
    """Trains a model as `config` says.

    Args:
        config: the run; see `rollgrad train rl --help` for every setting.
        reward: a function that returns one number a reply and gets what its parameters are called (`queries`,
            `prompts`, `labels`, `completions`, columns of the row, ...; see docs/rewards.md), a `RewardSource`, or a
            list of several, which are summed by `config.reward.weights`. It replaces `config.reward`.
        environment: makes a fresh `Environment` (usually its class). Episodes then have several turns, up to
            `config.rollout.max_turns`, and rewards come from the environment's steps. An episode whose last step has
            the reward None is judged by `reward`, or as `config.reward` says.
        adapters: objects that replace those of the configuration, by the port that they implement:
            `engine`, `executor`, `prompts`, `policy`, `reference`, `critic`, `channel`, `sink`, `checkpoints`,
            `codec`, `clock` or any other provider of the container. `prompts` may also be rows, a list of mappings or
            a `datasets.Dataset`, which are read as those of `config.data.prompt_dataset` would be. `on_step`: a
            function of the number of each finished step, its metrics and the groups that it learned from, in the place
            of `train.on_step_path`. It returns metrics of its own or None, and ends the run by
            `rollgrad.StopTraining`; any other exception in it is an error of the run. A coroutine function may take the
            run fourth, of which it asks replies and evaluations (`RunAccess`).

    Returns:
        The result. An interruption (Ctrl-C, SIGTERM, ...) ends the run with the model of the last finished step.

    Raises:
        RollgradError: a setting, file or reward is wrong; the message says which and how to fix it. The training so
            far is saved first, as after an interruption.
    """
    load_extension(config)
    validate(
        config,
        has_reward=reward is not None,
        has_environment=environment is not None,
        has_prompts=adapters.get("prompts") is not None,
    )
    check_output(config)
    config = from_anywhere(config)
    container = container_with(config, reward, environment, adapters)
    with alone(config.ckpt):
        return train_in(
            config,
            container,
            title=f"{Path(config.actor.model_name_or_path).name} on {config.data.prompt_dataset or 'your prompts'}",
            check=lambda: check_inputs(container, trains=config),
            before_run=lambda: _log_choices(config),
        )


def _log_choices(config: RLConfig) -> None:
    """Logs which off-policy correction acts, which settings do nothing, and which steps nothing corrects."""
    log_correction(config)
    log_ratios(config)


def evaluate(
    config: RLConfig,
    *,
    reward: Brought | Sequence[Brought] | None = None,
    environment: Callable[[], Environment] | None = None,
    output: Path | str | None = None,
    **adapters: Any,
) -> dict[str, float]:
    """Evaluates `config.actor.model_name_or_path` on `config.eval.dataset`. The arguments are those of `train`, with
    two differences. `prompts` are rows that take the place of that dataset. Replies and scores of each prompt are
    appended to the file `output` when it has been played; an evaluation that ended early is continued by the same call.
    A file that was begun by other settings, prompts or weights is refused; what is brought as `reward`, `environment`
    or adapter is not compared."""
    return _evaluate(config, output, reward=reward, environment=environment, **adapters)[0]


def evaluate_models(
    configs: Sequence[RLConfig], *, output: Path | None = None
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the name and the metrics of each model when it is evaluated; of those after the first also by how much
    they are better, with the standard error (`PromptScores.difference`)."""
    first: PromptScores | None = None
    for config in configs:
        metrics, scores = _evaluate(config, output)
        yield config.actor.model_name_or_path, metrics | ({} if first is None else scores.difference(first))
        first = first or scores


@gives_memory_back
def _evaluate(
    config: RLConfig,
    output: Path | str | None,
    *,
    reward: Brought | Sequence[Brought] | None = None,
    environment: Callable[[], Environment] | None = None,
    **adapters: Any,
) -> tuple[dict[str, float], PromptScores]:
    """Returns the metrics of `evaluate`, and the scores that they are of."""
    load_extension(config)
    config = evolve(config, actor=evolve(config.actor, lora=LoraConfig()))  # the model as it is, which training changes
    validate_evaluation(
        config,
        has_reward=reward is not None,
        has_environment=environment is not None,
        has_prompts=adapters.get("prompts") is not None,
    )
    container = container_with(config, reward, environment, adapters, "evaluate")
    container.reward_spec.override(providers.Object(config.eval.dataset))
    keep_roles(container, "engines", "reward")
    try:
        check_inputs(container, ["eval_prompts"])
        with ExitStack() as files:
            known: dict[str, Any] = {}
            if output is not None:
                writer, kept = files.enter_context(evaluated_replies(container, config, Path(output)))
                known = {"on_group": writer, "kept": kept}
                if len(kept) == len(container.eval_prompts()):
                    container.rollout.override(providers.Object(None))  # nothing is played: no model is loaded
            evaluation: EvaluationService = container.evaluation()
            metrics = run_interruptibly(closing(evaluation.run(**known), container), "the evaluation ends")
        assert evaluation.latest is not None  # of the run above
        if not has_turns(config, environment):
            _note_truncated(config, metrics["eval/truncated_share"])
        return metrics, evaluation.latest
    finally:
        shut_down(container)


def _note_truncated(config: RLConfig, share: float) -> None:
    """Warns where so many replies were cut off that scores tell more of their bound than of the model."""
    bound = config.eval.max_new_tokens or config.rollout.max_new_tokens
    if share > TRUNCATED_SHARE and bound > 1:
        log.warning(
            f"{share:.0%} of the replies to eval.dataset were cut off, and are judged as they are: raise "
            f"--eval.max_new_tokens, which is {bound}, if the model should end by itself",
            model=config.actor.model_name_or_path,
        )


def container_with(
    config: RLConfig,
    reward: Brought | Sequence[Brought] | None,
    environment: Callable[[], Environment] | None,
    adapters: Mapping[str, Any],
    function: str = "train",
) -> RLContainer:
    """Returns the container of a run in which a caller's objects have their places; arguments as for `train`.

    Raises:
        ConfigurationError: there is no such adapter; the message says to which `function` it was given.
    """
    container = rl_container(config)
    if environment is not None:
        check_environment(environment)
        container.environment.override(providers.Object(environment))
    if reward is not None:
        container.reward.override(given(brought_reward(reward, config)))
        # What is generated is judged later, by the reward of the settings.
        container.reward_replaced.override(providers.Object(function != "generate"))
    rows = adapters.get("prompts")
    if is_rows(rows):
        adapters = {name: adapter for name, adapter in adapters.items() if name != "prompts"}
        place, make = (
            (container.prompts, make_row_source) if function == "train" else (container.eval_prompts, make_eval_rows)
        )
        place.override(
            providers.Singleton(
                make, providers.Object(rows), container.rows_config, container.codec, container.environment
            )
        )
    elif isinstance(rows, list) or (rows is not None and function != "train"):
        raise ConfigurationError(
            f"prompts are a {type(rows).__name__} without rows that can be read one by one, but {function}() takes a "
            "list of mappings, of one at least, such as [{'input': 'What is 3 + 4?', 'label': '7'}], or a "
            "datasets.Dataset."
        )
    check_brought(adapters, trains=function == "train")
    give(container, adapters, function)
    return container
