"""The composition root of `rollgrad train rm`."""

from functools import partial
from typing import Any

import structlog

from rollgrad.adapters.chat.padding import set_padding_apart
from rollgrad.adapters.data.examples.prepared import PreparedExamples, PreparedPairs
from rollgrad.adapters.data.examples.streaming import preference
from rollgrad.adapters.models.torch.loading.loading import load_generation_settings
from rollgrad.application.learning.rewards import RewardLearner
from rollgrad.application.pipelines.epochs import RewardEvaluation
from rollgrad.application.settings.derived import shares_of_pass, tokens_per_pass
from rollgrad.application.settings.rm import RMRun
from rollgrad.application.settings.sections.actor import ModelConfig
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.application.settings.sections.examples import RowsConfig
from rollgrad.domain.algorithms.losses.reward_model import RewardObjective
from rollgrad.domain.batches.examples import pack_comparisons
from rollgrad.domain.episodes.examples import Preference
from rollgrad.domain.errors import DataError
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.entrypoints.composition.base import BaseContainer, trainer_kind
from rollgrad.entrypoints.composition.chat import make_tokenizer
from rollgrad.entrypoints.composition.injection import providers
from rollgrad.entrypoints.composition.models import make_optimizer, make_trained_reward
from rollgrad.entrypoints.composition.offline.container import OfflineContainer, complete, if_evaluated
from rollgrad.entrypoints.composition.offline.preparation import make_stream

log = structlog.get_logger(__name__)


def make_reward_tokenizer(actor: ModelConfig, data: DataConfig | RowsConfig) -> Any:
    """Returns the tokenizer, with a padding token that ends no text; raises as `make_tokenizer`."""
    tokenizer = make_tokenizer(actor, data)
    ends = load_generation_settings(actor.model_name_or_path).eos_token_id
    set_padding_apart(tokenizer, ends if isinstance(ends, list) else [] if ends is None else [ends])
    return tokenizer


def make_compared(
    config: RMRun, examples: PreparedExamples | ExampleSource[Preference], setting: str
) -> ExampleSource[Preference]:
    """Returns the pairs of prepared examples, which `setting` names.

    Raises:
        DataError: the loss reads margins, but no row has one; of streamed rows only the first are known.
    """
    if not isinstance(examples, PreparedExamples):
        return examples
    given = bool(examples.margins.any())
    if config.rm.margin and not given and not config.data.stream:
        raise DataError(
            f"rm.margin is set, but no row of {setting} has a number other than 0 in its column margin: leave "
            "--rm.margin out, or name data with margins."
        )
    if given and not config.rm.margin:
        log.warning("the rows have margins that are not used", data=setting, to_use_them="--rm.margin")
    return PreparedPairs(examples)


class RMContainer(OfflineContainer):
    """All objects of a run that trains a reward model; `config` is the validated `RMRun`. `rm_container` makes it."""

    local_reward = providers.Singleton(
        make_trained_reward,
        BaseContainer.config.provided.actor,
        BaseContainer.config.provided.train.seed,
        BaseContainer.tokenizer,
        providers.Callable(
            make_optimizer,
            BaseContainer.config.provided.actor,
            BaseContainer.actor_steps,
            BaseContainer.average,
        ),
        BaseContainer.optimize,
        BaseContainer.shard,
        BaseContainer.image_renderer,
    )
    reward_model = providers.Selector(
        providers.Callable(trainer_kind, BaseContainer.config),
        process=local_reward,
        cluster=providers.Singleton(
            lambda cluster, make, steps: cluster.trained_reward(make, steps),
            BaseContainer.cluster,
            BaseContainer.make,
            BaseContainer.total_steps,
        ),
    )
    pairs = providers.Singleton(make_compared, BaseContainer.config, OfflineContainer.examples, "data.dataset")
    eval_pairs = providers.Singleton(
        make_compared, BaseContainer.config, OfflineContainer.eval_examples, "eval.dataset"
    )
    reward_learner = providers.Singleton(
        RewardLearner,
        reward_model,
        pack=OfflineContainer.pack,
        objective=OfflineContainer.objective,
        max_tokens=providers.Callable(tokens_per_pass, BaseContainer.config),
        shares=providers.Callable(shares_of_pass, BaseContainer.config),
    )


def rm_container(config: RMRun) -> RMContainer:
    """Returns the container of a run with these settings."""
    container = RMContainer(config=config, make=providers.Object(rm_container))
    learned: providers.Provider[Any] = container.pairs
    if config.data.stream:
        learned = providers.Singleton(make_stream, container.preparation, config.train, preference)
    complete(
        container,
        tokenizer=providers.Singleton(make_reward_tokenizer, config.actor, config.data),
        pack=providers.Object(partial(pack_comparisons, margins=config.rm.margin)),
        objective=providers.Singleton(RewardObjective, centring=config.rm.centring),
        learned=learned,
        held_out=container.eval_pairs,
        first=providers.List(container.pairs, container.eval_pairs),
        learner=container.reward_learner,
        evaluation=if_evaluated(
            container.config,
            providers.Singleton(RewardEvaluation, container.reward_learner, container.eval_pairs, container.eval_names),
        ),
    )
    return container
