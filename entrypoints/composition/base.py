"""Parts of every trainer, whether it samples or not: models, tokenizer, checkpoints, sinks, clock, processes.

A run's own container adds what the run's steps do. It inherits from `BaseContainer`: by way of `OfflineContainer`
(`offline.py`) if it learns from examples, of `EngineContainer` (`engines.py`) if it samples. A function makes it from
the settings, and provides what its bases ask for (`providers.Dependency`). `sft.py` is the shortest.

The settings, `config`, need the sections that the providers used read: `actor`, `ref`, `train`, `cluster`, `ds`, `data`
(its template), `ckpt`, `logger`.

The processes of a cluster make their parts of models from the same container (`cluster.rank_model`): `local_policy`,
`local_critic` and `local_reference` are made in each process; `shard` divides their weights while they load, `optimize`
and `divide` afterwards.
"""

from typing import Any

from attrs import asdict

from rollgrad.adapters.data.datasets.survey import rows_fingerprint
from rollgrad.adapters.data.examples.prepared import PreparedExamples
from rollgrad.adapters.models.torch.loading.loading import load_vocabulary_size
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer
from rollgrad.adapters.models.torch.references import AdapterlessReference, TorchReference
from rollgrad.adapters.system.clock import SystemClock
from rollgrad.adapters.system.usage import MemoryUsage
from rollgrad.application.pipelines.schedule import Schedule
from rollgrad.domain.control.best_model import ROWS
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.entrypoints.composition.chat import make_codec, make_image_renderer, make_tokenizer
from rollgrad.entrypoints.composition.cluster import Cluster, Role
from rollgrad.entrypoints.composition.injection import containers, providers
from rollgrad.entrypoints.composition.lifetimes import closed_at_end
from rollgrad.entrypoints.composition.models import (
    averaging,
    make_critic,
    make_optimizer,
    make_policy,
    make_reference_model,
    make_trained_actor,
    reference_model_kind,
)
from rollgrad.entrypoints.composition.outputs import (
    load_on_step,
    load_trackers,
    make_checkpoints,
    make_profiler,
    make_sinks,
)
from rollgrad.entrypoints.composition.own_optimizer import check_own_optimizers


def trainer_kind(config: Any) -> str:
    """Returns the kind of trainer: in this process, or in a cluster."""
    return "cluster" if config.cluster.enable else "process"


def make_schedule(config: Any, steps: int, held_out: object, *first: object) -> Schedule:
    """Returns the schedule of a run of `steps` steps. Objects in `first` are not read: that they are arguments has them
    made before, so that wrong data are refused before a model is loaded. So has `held_out`, whose rows are a part of
    what is measured."""
    ckpt, measured = config.ckpt, {name: value for name, value in asdict(config.eval).items() if name != "steps"}
    if isinstance(held_out, list) and held_out and isinstance(held_out[0], Prompt):
        measured[ROWS] = rows_fingerprint(held_out, named=False)
    elif isinstance(held_out, PreparedExamples):
        measured[ROWS] = held_out.origin
    return Schedule(
        steps=steps,
        eval_steps=config.eval.steps,
        save_steps=ckpt.save_steps,
        state_steps=ckpt.state_steps,
        state_minutes=ckpt.state_minutes,
        state_in_background=ckpt.async_save,
        best_metric=ckpt.best_metric,
        best_value=ckpt.best_value,
        measured=measured,
        patience=ckpt.early_stopping_patience,
    )


class BaseContainer(containers.DeclarativeContainer):
    """Objects of any run; `config` is its validated settings, `total_steps` its number of steps, and `actor_steps` the
    number of the actor's optimizer steps in them."""

    config: providers.Provider[Any] = providers.Dependency()
    make: providers.Provider[Any] = providers.Dependency()
    """The function that makes the run's container from its settings: the processes of a cluster call it, too."""
    total_steps: providers.Provider[int] = providers.Dependency(instance_of=int)
    actor_steps: providers.Provider[int] = providers.Dependency(instance_of=int)
    critic_steps: providers.Provider[int] = providers.Dependency(instance_of=int)
    temperature: providers.Provider[float] = providers.Object(1.0)
    """Temperature of the distribution whose log-probs the models compute."""
    correct: providers.Provider[bool] = providers.Object(False)
    """Whether the policy's scores say which tokens are the most likely ones."""
    mean: providers.Provider[bool] = providers.Object(False)
    """Whether they then have the mean log-prob over the vocabulary, too."""
    collision: providers.Provider[bool] = providers.Object(False)
    """Whether they then have the collision entropy, too."""
    neftune_alpha: providers.Provider[float] = providers.Object(0.0)
    """Size of the noise on the policy's embeddings while it is trained."""
    outcomes: providers.Provider[Any] = providers.Object(None)
    """Two tokens that the policy's scores compare as what follows a token; None compares none."""
    teacher: providers.Provider[Any] = providers.Object(None)
    """The model that the policy's scores give the divergence from."""
    centering: providers.Provider[Any] = providers.Object(None)
    """Finder of the mean score that is taken out of the policy's (score centering)."""
    masks: providers.Provider[Any] = providers.Object(None)
    """Follower of the forms of replies, for log-probs of the tokens that they allow; None where none is prescribed."""
    on_step: providers.Provider[Any] = providers.Singleton(load_on_step, config.provided.train.on_step_path)
    """The caller's function of each finished step; None where there is none."""
    own_optimizers: providers.Provider[None] = providers.Callable(check_own_optimizers, config)
    """Checks what a user's files of optimizers and schedules hold."""
    extension: providers.Provider[None] = providers.Object(None)
    """Loads a user's extension file, before anything else is made in a process."""

    clock = providers.Singleton(SystemClock)
    usage = providers.Singleton(MemoryUsage)
    checkpoints = providers.Singleton(make_checkpoints, config.provided.ckpt)
    trackers = providers.Singleton(load_trackers, config.provided.logger.report_to)
    """Classes of the user's own among the trackers."""
    sink = providers.Resource(closed_at_end, make_sinks, config, total_steps, trackers)
    tokenizer = providers.Singleton(make_tokenizer, config.provided.actor, config.provided.data)
    image_renderer = providers.Singleton(make_image_renderer, config.provided.actor, config.provided.data, tokenizer)
    codec = providers.Singleton(make_codec, config.provided.data, tokenizer, image_renderer)

    roles: providers.Provider[dict[str, Role]] = providers.Dependency(instance_of=dict)
    """Processes of each model and of the engines, in a cluster."""
    colocated: providers.Provider[list[set[str]]] = providers.Object([])
    """Roles that share the same GPUs."""
    cluster = providers.Resource(closed_at_end, Cluster, config, roles, colocated)

    average: providers.Provider[Any] = providers.Callable(averaging, config.provided.train)
    """Settings of the moving average of the actor's weights."""
    optimize: providers.Provider[Any] = providers.Object(MasterOptimizer)
    divide: providers.Provider[Any] = providers.Object(None)
    shard: providers.Provider[Any] = providers.Object(None)
    """Divides a model over processes while it loads."""
    actor_model = providers.Singleton(
        make_trained_actor, config.provided.actor, config.provided.train.seed, shard, image_renderer, masks
    )
    local_policy = providers.Singleton(
        make_policy,
        config.provided.actor,
        actor_model,
        tokenizer,
        providers.Callable(make_optimizer, config.provided.actor, actor_steps, average),
        optimize,
        temperature=temperature,
        correct=correct,
        mean=mean,
        collision=collision,
        neftune_alpha=neftune_alpha,
        teacher=teacher,
        outcomes=outcomes,
        centering=centering,
    )
    local_critic = providers.Singleton(
        make_critic,
        config.provided.actor,
        config.provided.critic,
        tokenizer,
        providers.Callable(make_optimizer, config.provided.critic, critic_steps),
        optimize,
        shard,
        image_renderer,
        seed=config.provided.train.seed,
    )
    local_reference = providers.Singleton(
        TorchReference,
        providers.Callable(
            make_reference_model, config.provided.actor, config.provided.ref, shard, image_renderer, masks
        ),
        temperature=temperature,
        divide=divide,
        size=providers.Callable(load_vocabulary_size, config.provided.actor.model_name_or_path),
    )
    used_cluster = providers.Selector(
        providers.Callable(trainer_kind, config), process=providers.Object(None), cluster=cluster
    )
    profile = providers.Singleton(make_profiler, config, used_cluster)
    remote_reference = providers.Singleton(lambda cluster, make: cluster.reference(make), cluster, make)
    policy = providers.Selector(
        providers.Callable(trainer_kind, config),
        process=local_policy,
        cluster=providers.Singleton(
            lambda cluster, make, steps: cluster.policy(make, steps), cluster, make, total_steps
        ),
    )
    loaded_critic = providers.Selector(
        providers.Callable(trainer_kind, config),
        process=local_critic,
        cluster=providers.Singleton(
            lambda cluster, make, steps: cluster.critic(make, steps), cluster, make, total_steps
        ),
    )
    loaded_reference = providers.Selector(
        providers.Callable(trainer_kind, config),
        process=providers.Selector(
            providers.Callable(reference_model_kind, config.provided.actor, config.provided.ref),
            own=local_reference,
            actor=providers.Singleton(AdapterlessReference, policy),  # also where the caller gave the policy
        ),
        cluster=remote_reference,
    )
