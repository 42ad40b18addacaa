"""The composition root of `rollgrad train rl` and `rollgrad eval`, which chooses the class behind each port.

A flag's value is the key of its branch. Every provider can be overridden, by name, with any object that implements
its port, as the library face and the tests do. Models and processes are `base.py`'s, engines and
their weights `engines.py`'s.
"""

from typing import Any

from rollgrad.adapters.agents.command import CommandAgent
from rollgrad.adapters.openrlhf.loading import load_agent_file
from rollgrad.application.engines.observed import ObservedEngine
from rollgrad.application.episodes.single_turn import SingleTurnExecutor
from rollgrad.application.learning.experience import ExperienceService
from rollgrad.application.learning.moving import AveragedReference
from rollgrad.application.learning.update import UpdateService
from rollgrad.application.pipelines.alternating import Alternating
from rollgrad.application.pipelines.learner import RLLearner
from rollgrad.application.pipelines.overlapping import Overlapping
from rollgrad.application.pipelines.run import Run
from rollgrad.application.rollouts.evaluation import EvaluationService
from rollgrad.application.rollouts.groups import RolloutService
from rollgrad.application.rollouts.progress import Progress
from rollgrad.application.rollouts.sampler import GroupSampler
from rollgrad.application.rollouts.step_questions import StepQuestions
from rollgrad.application.rollouts.stream import GroupStream
from rollgrad.application.settings.derived import (
    longest_reply,
    optimizer_steps,
    optimizer_steps_of_actor,
    optimizer_steps_per_rollout,
    samples_per_rollout,
    shares_of_pass,
    tokens_per_pass,
    tokens_per_scoring_pass,
)
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import RouterReplay
from rollgrad.domain.algorithms.losses.objectives import ClippedValueObjective
from rollgrad.domain.control.admission import Admission
from rollgrad.entrypoints.composition.base import make_schedule
from rollgrad.entrypoints.composition.engines import resting
from rollgrad.entrypoints.composition.injection import providers
from rollgrad.entrypoints.composition.lifetimes import LoopResource, closed_at_end
from rollgrad.entrypoints.composition.outputs import make_sample_log, make_trajectories
from rollgrad.entrypoints.composition.rl.algorithm import (
    PAUSES,
    advantage_is_all,
    always_scores,
    critic_kind,
    finds_collisions,
    load_group_filter,
    make_aggregation,
    make_average,
    make_centering,
    make_curriculum,
    make_entropy_controller,
    make_eval_sampling,
    make_kl_controller,
    make_learned_tokens,
    make_learning_watch,
    make_objective,
    make_sampling,
    make_sampling_plan,
    make_staleness_bound,
    make_token_filter,
    make_token_selection,
    pipeline_kind,
    reference_kind,
)
from rollgrad.entrypoints.composition.rl.data import (
    dataset_kind,
    make_dataset_source,
    make_eval_dataset,
    make_eval_gym,
    make_gym_source,
    make_rollouts,
    make_rows_config,
)
from rollgrad.entrypoints.composition.rl.executors import (
    executor_kind,
    has_turns,
    make_command_executor,
    make_file_executor,
    make_multi_turn,
    make_tool_executor,
)
from rollgrad.entrypoints.composition.rl.extensions import load_extension
from rollgrad.entrypoints.composition.rl.forms import FOLLOWERS, make_masks, unprescribed
from rollgrad.entrypoints.composition.rl.reward_sources import RewardContainer
from rollgrad.entrypoints.composition.rl.rewards import reward_kinds
from rollgrad.entrypoints.composition.rl.roles import cluster_roles, colocated_roles
from rollgrad.entrypoints.composition.rl.teacher import make_policy_teacher, make_served_reference, make_tells_teacher
from rollgrad.entrypoints.composition.rl.tracing import Tracing
from rollgrad.entrypoints.composition.rl.training_server import TrainingServer
from rollgrad.entrypoints.composition.rl.vocabularies import check_vocabularies
from rollgrad.entrypoints.composition.tool_box import ToolBox
from rollgrad.entrypoints.description import describe

LESS_MEMORY = (
    "lower --train.max_tokens_per_micro_batch or --rollout.max_batch_size, turn on --actor.gradient_checkpointing (or "
    "--actor.offload_activations), or see --dry_run for what takes how much."
)
"""Advice in the error of a run that ran out of memory."""

base = RewardContainer


class RLContainer(RewardContainer):
    """All objects of a run; `config` is the validated `RLConfig`."""

    environment: providers.Object[Any] = providers.Object(None)
    reward_replaced: providers.Object[bool] = providers.Object(False)
    rows_config = providers.Callable(make_rows_config, base.config, reward_replaced)
    prompts = providers.Selector(
        providers.Callable(dataset_kind, base.config.provided.data.prompt_dataset),
        dataset=providers.Singleton(make_dataset_source, rows_config, base.codec, environment),
        reasoning_gym=providers.Singleton(make_gym_source, base.config, base.codec, environment),
    )
    eval_prompts = providers.Selector(
        providers.Callable(dataset_kind, base.config.provided.eval.dataset),
        dataset=providers.Singleton(make_eval_dataset, rows_config, base.codec, environment),
        reasoning_gym=providers.Singleton(make_eval_gym, base.config, base.codec, environment),
        none=providers.List(),
    )
    suits = providers.Callable(check_vocabularies, base.config, base.tokenizer)
    """Checks the models, before they are loaded."""
    description = providers.Singleton(describe, base.config, prompts)
    rollouts = providers.Singleton(make_rollouts, base.config, prompts)
    critic = providers.Selector(
        providers.Callable(critic_kind, base.config), loaded=base.loaded_critic, none=providers.Object(None)
    )
    reference = providers.Selector(
        providers.Callable(reference_kind, base.config),
        loaded=base.loaded_reference,
        averaged=providers.Singleton(AveragedReference, base.policy),
        served=providers.Singleton(make_served_reference, base.config, base.tokenizer),
        compared=providers.Object(None),
        none=providers.Object(None),
    )

    tracing = providers.Resource(closed_at_end, Tracing, base.config.provided.actor.model_name_or_path)
    admission = providers.Singleton(
        Admission, base.config.provided.rollout.max_concurrent, base.config.provided.rollout.adaptive_concurrency
    )
    traced_engine = providers.Singleton(
        ObservedEngine, providers.Singleton(Tracing.engine, tracing, base.engine), admission
    )
    traced_reward = providers.Singleton(Tracing.rewards, tracing, base.reward)
    judged: providers.Provider[bool] = providers.Object(True)
    """Whether replies are judged, by the run's reward or one that the caller brought."""
    brought: providers.Provider[list[str]] = providers.Object([])
    """Names of adapters that the caller brought."""
    server = LoopResource(
        TrainingServer,
        traced_engine,
        base.codec,
        providers.Callable(unprescribed, base.config, brought),
        sees_images=providers.Callable(bool, base.config.provided.data.image_key),
    )
    tool_box = LoopResource(ToolBox, base.config.provided.agent.tools, base.config.provided.agent.python_isolation)
    agent_file = providers.Singleton(load_agent_file, base.config.provided.train.agent_func_path)
    agent_command = providers.Singleton(CommandAgent, base.config.provided.agent.command)
    executor = providers.Selector(
        providers.Callable(executor_kind, base.config, environment),
        single_turn=providers.Singleton(
            SingleTurnExecutor, traced_engine, base.codec, traced_reward, max_tokens=base.config.provided.data.max_len
        ),
        environment=providers.Singleton(
            make_multi_turn, base.config, traced_engine, base.codec, traced_reward, environment, tracing
        ),
        tools=providers.Singleton(
            make_tool_executor, base.config, traced_engine, base.codec, traced_reward, tool_box, tracing
        ),
        command=providers.Singleton(
            make_command_executor, base.config, agent_command, server, base.codec, traced_reward
        ),
        agent_file=providers.Singleton(
            make_file_executor,
            base.config,
            agent_file,
            traced_engine,
            base.codec,
            base.tokenizer,
            server,
            traced_reward,
            tracing,
        ),
    )
    traced_executor = providers.Singleton(Tracing.executor, tracing, executor)
    progress = providers.Singleton(Progress)
    rollout = providers.Singleton(
        RolloutService,
        traced_executor,
        max_concurrent=admission,
        max_failures=base.config.provided.rollout.max_failures,
        seed=base.config.provided.train.seed,
        progress=progress,
    )
    trajectories = providers.Resource(closed_at_end, make_trajectories, base.config, base.codec)
    evaluation = providers.Singleton(
        EvaluationService,
        rollout,
        eval_prompts,
        providers.Callable(make_eval_sampling, base.config),
        samples=base.config.provided.eval.n_samples_per_prompt,
        threshold=base.config.provided.reward.pass_threshold,
        trajectories=trajectories,
        part_weights=base.config.provided.reward.weights,
    )
    experience = providers.Singleton(
        ExperienceService,
        base.policy,
        reference=reference,
        critic=critic,
        algo=base.config.provided.algo,
        reward=base.config.provided.reward,
        max_length=providers.Callable(longest_reply, base.config, plays=base.plays),
        max_tokens=providers.Callable(tokens_per_scoring_pass, base.config),
        shares=providers.Callable(shares_of_pass, base.config),
        steps_per_rollout=providers.Callable(optimizer_steps_per_rollout, base.config),
        always_scores=providers.Callable(always_scores, base.config),
        replays=providers.Callable(RouterReplay.ENGINE.__eq__, base.config.provided.actor.router_replay),
    )
    update = providers.Singleton(
        UpdateService,
        base.policy,
        critic,
        aggregation=providers.Callable(make_aggregation, base.config),
        max_length=base.config.provided.rollout.max_new_tokens,
        batch_size=base.config.provided.train.batch_size,
        planned=providers.Callable(samples_per_rollout, base.config),
        epochs=base.config.provided.train.max_epochs,
        max_tokens=providers.Callable(tokens_per_pass, base.config),
        shares=providers.Callable(shares_of_pass, base.config),
        seed=base.config.provided.train.seed,
        skip_idle=providers.Callable(advantage_is_all, base.config),
        select=providers.Callable(make_token_selection, base.config),
        keep=providers.Callable(make_token_filter, base.config),
        learn=providers.Callable(make_learned_tokens, base.config),
        mask_truncated=base.config.provided.algo.mask_truncated,
        mask_repetition=base.config.provided.algo.mask_repetition,
        pass_threshold=base.config.provided.reward.pass_threshold,
    )
    sampling = providers.Callable(make_sampling, base.config)
    group_filter = providers.Singleton(load_group_filter, base.config)
    sampler = providers.Singleton(
        GroupSampler,
        rollout,
        prompts,
        sampling,
        providers.Callable(make_sampling_plan, base.config, group_filter),
        curriculum=providers.Callable(make_curriculum, base.config),
    )
    stream = providers.Singleton(
        GroupStream,
        rollout,
        prompts,
        sampling,
        providers.Callable(make_sampling_plan, base.config, group_filter),
        providers.Callable(make_staleness_bound, base.config, rollouts),
        base.clock,
        curriculum=providers.Callable(make_curriculum, base.config),
    )
    sample_log = providers.Resource(closed_at_end, make_sample_log, base.config, base.codec, base.sink)
    schedule = providers.Callable(make_schedule, base.config, rollouts, eval_prompts)
    tells_teacher = providers.Singleton(make_tells_teacher, base.config, base.codec, judged)
    learner = providers.Singleton(
        RLLearner,
        experience=experience,
        update=update,
        policy=base.policy,
        channel=base.channel,
        objective=providers.Callable(make_objective, base.config).provider,
        tells_teacher=tells_teacher,
        value_objective=providers.Callable(ClippedValueObjective, clip=base.config.provided.critic.value_clip),
        kl=providers.Callable(make_kl_controller, base.config),
        entropy=providers.Callable(make_entropy_controller, base.config),
        clock=base.clock,
        freezing_steps=base.config.provided.critic.freezing_steps,
        pass_threshold=base.config.provided.reward.pass_threshold,
        trajectories=trajectories,
        progress=progress,
    )
    steps = providers.Selector(
        providers.Callable(pipeline_kind, base.config),
        alternating=providers.Singleton(
            Alternating,
            learner=learner,
            sampler=sampler,
            sleeper=base.sleeper,
            steps=rollouts,
            clock=base.clock,
            resting=providers.Callable(resting, base.config, base.policy, critic),
        ),
        overlapping=providers.Singleton(
            Overlapping,
            learner=learner,
            stream=stream,
            engine=base.engine,
            pause=providers.Callable(PAUSES.__getitem__, base.config.provided.train.partial_rollout),
            clock=base.clock,
        ),
    )
    run = providers.Singleton(  # the schedule first: it counts the prompts, before models are loaded
        Run,
        schedule=schedule,
        steps=steps,
        models=update,
        evaluation=providers.Selector(
            providers.Callable(dataset_kind, base.config.provided.eval.dataset),
            dataset=evaluation,
            reasoning_gym=evaluation,
            none=providers.Object(None),
        ),
        sink=providers.Callable(Progress.to, progress, base.sink),
        sample_log=sample_log,
        on_step=base.on_step,
        ask=providers.Singleton(StepQuestions, base.engine, base.codec, sampling),
        checkpoints=base.checkpoints,
        clock=base.clock,
        watch=providers.Callable(make_learning_watch, base.config, rollouts),
        description=description,
        less_memory=LESS_MEMORY,
        usage=base.usage,
        profile=base.profile,
    )


def rl_container(config: RLConfig) -> RLContainer:
    """Returns the container of a validated run."""
    container = RLContainer(config=config, make=providers.Object(rl_container))
    steps = container.rollouts
    container.override_providers(
        brought=providers.Callable(lambda: [name for name in FOLLOWERS if container.providers[name].overridden]),
        judged=providers.Callable(
            lambda config, spec: bool(container.reward.overridden) or reward_kinds(config, spec) != ["teacher"],
            container.config,
            container.reward_spec,
        ),
        masks=providers.Callable(make_masks, container.config, container.brought, container.grammars.provider),
        total_steps=steps,
        # A process of a cluster is told the number of steps, and reads no prompts.
        actor_steps=providers.Callable(optimizer_steps_of_actor, container.config, container.total_steps),
        critic_steps=providers.Callable(optimizer_steps, container.config, container.total_steps),
        temperature=container.config.provided.rollout.temperature,
        teacher=providers.Singleton(
            make_policy_teacher, container.config, container.tokenizer, container.image_renderer
        ),
        average=providers.Callable(make_average, container.config),
        centering=providers.Callable(make_centering, container.config),
        correct=providers.Callable(finds_collisions, container.config),
        collision=providers.Callable(finds_collisions, container.config),
        extension=providers.Callable(load_extension, container.config),
        roles=providers.Callable(cluster_roles, container.config),
        colocated=providers.Callable(colocated_roles, container.config.provided.train),
        plays=providers.Callable(has_turns, container.config, container.environment),
    )
    return container
