"""The composition root: which class stands behind each port for a given configuration.

A flag's value is the key of its branch. Every provider can be overridden, by name, with any object that implements
its port: that is how the library face and the tests swap a piece.
"""

from typing import Any

from dependency_injector import containers, providers

from rollgrad.adapters.data.reasoning_gym.source import ReasoningGymReward
from rollgrad.adapters.engines.embedded.weights import CopiedWeights, SharedWeights
from rollgrad.adapters.models.torch.models import AdapterlessReference, TorchPolicy, TorchReference
from rollgrad.adapters.rewards.function import FunctionReward
from rollgrad.adapters.rewards.none import NoReward
from rollgrad.adapters.rewards.verifiers import VerifierReward
from rollgrad.adapters.system.clock import SystemClock
from rollgrad.adapters.weights.channel import EngineWeights, FleetWeights
from rollgrad.adapters.weights.cuda_ipc import cuda_ipc
from rollgrad.adapters.weights.disk import Disk
from rollgrad.adapters.weights.nccl import NCCLBackend
from rollgrad.adapters.weights.shared_memory import shared_memory, shared_memory_adapter
from rollgrad.application.engines.resuming import ContinuingEngine
from rollgrad.application.episodes.single_turn import SingleTurnExecutor
from rollgrad.application.learning.experience import ExperienceService
from rollgrad.application.learning.update import UpdateService
from rollgrad.application.pipelines.alternating import Alternating
from rollgrad.application.pipelines.learner import RLLearner
from rollgrad.application.pipelines.overlapping import Overlapping
from rollgrad.application.pipelines.run import Run, Schedule
from rollgrad.application.rollouts.evaluation import EvaluationService
from rollgrad.application.rollouts.groups import RolloutService
from rollgrad.application.rollouts.sampler import GroupSampler
from rollgrad.application.rollouts.stream import GroupStream
from rollgrad.application.settings.derived import (
    longest_reply,
    optimizer_steps_per_rollout,
    samples_per_rollout,
    tokens_per_pass,
)
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.algorithms.losses.objectives import ClippedValueObjective
from rollgrad.entrypoints.composition.algorithm import (
    PAUSES,
    advantage_is_all,
    continuation_kind,
    critic_kind,
    make_aggregation,
    make_curriculum,
    make_entropy_controller,
    make_eval_sampling,
    make_kl_controller,
    make_learning_watch,
    make_objective,
    make_sampling,
    make_sampling_plan,
    make_staleness_bound,
    make_token_selection,
    pipeline_kind,
    reference_kind,
)
from rollgrad.entrypoints.composition.cluster import Cluster
from rollgrad.entrypoints.composition.data import (
    make_codec,
    make_dataset_source,
    make_eval_dataset,
    make_eval_gym,
    make_gym_source,
    make_tokenizer,
)
from rollgrad.entrypoints.composition.factories import (
    channel_kind,
    dataset_kind,
    engine_kind,
    engine_model_kind,
    executor_kind,
    has_gpu,
    has_turns,
    make_actor_model,
    make_agent_file,
    make_checkpoints,
    make_command_executor,
    make_critic,
    make_engine,
    make_multi_turn,
    make_optimizer,
    make_reference_model,
    make_rollouts,
    make_sample_log,
    make_sinks,
    make_tool_executor,
    make_trained_actor,
    make_vllm_engine,
    reference_model_kind,
    sleeper_kind,
    trainer_kind,
    weight_backend_kind,
    weights_directory,
)
from rollgrad.entrypoints.composition.remote_engines import make_served_engines, make_served_fleet, make_served_weights
from rollgrad.entrypoints.composition.rewards import make_judge, make_model_reward, make_remote_reward, reward_kind
from rollgrad.entrypoints.composition.tool_box import ToolBox
from rollgrad.entrypoints.composition.training_server import TrainingServer
from rollgrad.entrypoints.description import describe

LESS_MEMORY = (
    "lower --train.max_tokens_per_micro_batch or --rollout.max_batch_size, turn on --actor.gradient_checkpointing, or "
    "see --dry_run for what takes how much."
)
"""What a run says that ran out of memory."""


class Container(containers.DeclarativeContainer):
    """All objects of a run; `config` is the validated `RLConfig`."""

    config: providers.Provider[RLConfig] = providers.Dependency(instance_of=RLConfig)

    clock = providers.Singleton(SystemClock)
    checkpoints = providers.Singleton(make_checkpoints, config)
    tokenizer = providers.Singleton(make_tokenizer, config)
    codec = providers.Singleton(make_codec, config, tokenizer)

    environment: providers.Object[Any] = providers.Object(None)
    prompts = providers.Selector(
        providers.Callable(dataset_kind, config.provided.data.prompt_dataset),
        dataset=providers.Singleton(make_dataset_source, config, codec, environment),
        reasoning_gym=providers.Singleton(make_gym_source, config, codec, environment),
    )
    eval_prompts = providers.Selector(
        providers.Callable(dataset_kind, config.provided.eval.dataset),
        dataset=providers.Singleton(make_eval_dataset, config, codec, environment),
        reasoning_gym=providers.Singleton(make_eval_gym, config, codec, environment),
        none=providers.List(),
    )
    cluster = providers.Singleton(Cluster, config)
    description = providers.Singleton(describe, config, prompts)
    reward_spec = config.provided.data.prompt_dataset
    reward = providers.Selector(
        providers.Callable(reward_kind, config, reward_spec),
        function=providers.Singleton(
            FunctionReward.load,
            config.provided.reward.function_path,
            timeout=config.provided.reward.timeout,
            weights=config.provided.reward.weights,
        ),
        verifier=providers.Singleton(
            VerifierReward,
            config.provided.reward.verifier,
            timeout=config.provided.reward.timeout,
            format_pattern=config.provided.reward.format_pattern,
            isolation=config.provided.reward.isolation,
        ),
        reasoning_gym=providers.Singleton(
            ReasoningGymReward,
            reward_spec,
            timeout=config.provided.reward.timeout,
            isolation=config.provided.reward.isolation,
        ),
        model=providers.Selector(
            providers.Callable(trainer_kind, config),
            process=providers.Singleton(make_model_reward, config),
            cluster=providers.Singleton(lambda cluster: cluster.reward(), cluster),
        ),
        remote=providers.Singleton(make_remote_reward, config),
        judge=providers.Singleton(make_judge, config),
        teacher=providers.Singleton(NoReward),
        none=providers.Object(None),
    )

    rollouts = providers.Singleton(make_rollouts, config, prompts)
    actor_model = providers.Singleton(make_trained_actor, config)
    policy = providers.Selector(
        providers.Callable(trainer_kind, config),
        process=providers.Singleton(
            TorchPolicy,
            actor_model,
            tokenizer,
            providers.Callable(make_optimizer, config.provided.actor, config, rollouts),
            temperature=config.provided.rollout.temperature,
            gradient_checkpointing=config.provided.actor.gradient_checkpointing,
            aux_loss_coef=config.provided.actor.aux_loss_coef,
        ),
        cluster=providers.Singleton(lambda cluster, rollouts: cluster.policy(rollouts), cluster, rollouts),
    )
    critic = providers.Selector(
        providers.Callable(critic_kind, config),
        loaded=providers.Selector(
            providers.Callable(trainer_kind, config),
            process=providers.Singleton(
                make_critic,
                config,
                tokenizer,
                providers.Callable(make_optimizer, config.provided.critic, config, rollouts),
            ),
            cluster=providers.Singleton(lambda cluster, rollouts: cluster.critic(rollouts), cluster, rollouts),
        ),
        none=providers.Object(None),
    )
    reference = providers.Selector(
        providers.Callable(reference_kind, config),
        loaded=providers.Selector(
            providers.Callable(trainer_kind, config),
            process=providers.Selector(
                providers.Callable(reference_model_kind, config),
                own=providers.Singleton(
                    TorchReference,
                    providers.Callable(make_reference_model, config),
                    temperature=config.provided.rollout.temperature,
                ),
                actor=providers.Singleton(AdapterlessReference, policy),
            ),
            cluster=providers.Singleton(lambda cluster: cluster.reference(), cluster),
        ),
        none=providers.Object(None),
    )

    plays = providers.Callable(has_turns, config, environment)
    engine_model = providers.Selector(
        providers.Callable(engine_model_kind, config),
        shared=actor_model,
        own=providers.Singleton(make_actor_model, config, None, "--actor.model_name_or_path"),
    )
    embedded_engine = providers.Singleton(make_engine, config, engine_model, tokenizer, codec)
    vllm_engine = providers.Singleton(make_vllm_engine, config, tokenizer, plays)
    fleet = providers.Singleton(
        lambda cluster, tokenizer, plays: cluster.engines(tokenizer, plays), cluster, tokenizer, plays
    )
    served_engines = providers.Singleton(make_served_engines, config, tokenizer)
    served_fleet = providers.Singleton(make_served_fleet, served_engines)
    sampling_engine = providers.Selector(
        providers.Callable(engine_kind, config),
        embedded=embedded_engine,
        vllm=vllm_engine,
        fleet=fleet,
        server=served_fleet,
    )
    engine = providers.Selector(
        providers.Callable(continuation_kind, config),
        plain=sampling_engine,
        continued=providers.Singleton(ContinuingEngine, sampling_engine),
    )
    gpus = providers.Selector(
        providers.Callable(trainer_kind, config),
        process=providers.Callable(has_gpu),
        cluster=providers.Callable(lambda cluster: cluster.gpus, cluster),
    )
    weight_backend = providers.Selector(
        providers.Callable(weight_backend_kind, config, gpus=gpus),
        adapter=providers.Object(shared_memory_adapter),
        shared_memory=providers.Object(shared_memory),
        nccl=providers.Singleton(NCCLBackend, config.provided.vllm.gpus_per_engine),
        cuda_ipc=providers.Object(cuda_ipc),
        disk=providers.Singleton(Disk, providers.Callable(weights_directory, config)),
    )
    channel = providers.Selector(
        providers.Callable(channel_kind, config),
        shared=providers.Singleton(SharedWeights, engine),
        own=providers.Singleton(CopiedWeights, embedded_engine),
        vllm=providers.Singleton(
            EngineWeights,
            vllm_engine,
            backend=weight_backend,
            temperature=config.provided.rollout.temperature,
        ),
        fleet=providers.Singleton(
            FleetWeights,
            fleet,
            backend=weight_backend,
            temperature=config.provided.rollout.temperature,
        ),
        server=providers.Singleton(
            make_served_weights, served_engines, served_fleet, temperature=config.provided.rollout.temperature
        ),
    )
    server = providers.Singleton(TrainingServer, engine, codec)
    tool_box = providers.Singleton(ToolBox, config.provided.agent.tools, config.provided.agent.python_isolation)
    executor = providers.Selector(
        providers.Callable(executor_kind, config, environment),
        single_turn=providers.Singleton(
            SingleTurnExecutor, engine, codec, reward, max_tokens=config.provided.data.max_len
        ),
        environment=providers.Singleton(make_multi_turn, config, engine, codec, reward, environment),
        tools=providers.Singleton(make_tool_executor, config, engine, codec, reward, tool_box),
        command=providers.Singleton(make_command_executor, config, server, codec, reward),
        agent_file=providers.Singleton(make_agent_file, config, engine, codec, tokenizer, server, reward),
    )
    rollout = providers.Singleton(
        RolloutService,
        executor,
        max_concurrent=config.provided.rollout.max_concurrent,
        max_failures=config.provided.rollout.max_failures,
        seed=config.provided.train.seed,
    )
    evaluation = providers.Singleton(
        EvaluationService,
        rollout,
        eval_prompts,
        providers.Callable(make_eval_sampling, config),
        samples=config.provided.eval.n_samples_per_prompt,
        threshold=config.provided.reward.pass_threshold,
    )
    experience = providers.Singleton(
        ExperienceService,
        policy,
        reference=reference,
        critic=critic,
        algo=config.provided.algo,
        reward=config.provided.reward,
        max_length=providers.Callable(longest_reply, config, plays=plays),
        max_tokens=providers.Callable(tokens_per_pass, config),
        steps_per_rollout=providers.Callable(optimizer_steps_per_rollout, config),
    )
    update = providers.Singleton(
        UpdateService,
        policy,
        critic,
        aggregation=providers.Callable(make_aggregation, config),
        max_length=config.provided.rollout.max_new_tokens,
        batch_size=config.provided.train.batch_size,
        planned=providers.Callable(samples_per_rollout, config),
        epochs=config.provided.train.max_epochs,
        max_tokens=providers.Callable(tokens_per_pass, config),
        seed=config.provided.train.seed,
        skip_idle=providers.Callable(advantage_is_all, config),
        select=providers.Callable(make_token_selection, config),
        pass_threshold=config.provided.reward.pass_threshold,
    )
    sampling = providers.Callable(make_sampling, config)
    sampler = providers.Singleton(
        GroupSampler,
        rollout,
        prompts,
        sampling,
        providers.Callable(make_sampling_plan, config),
        curriculum=providers.Callable(make_curriculum, config),
    )
    stream = providers.Singleton(
        GroupStream,
        rollout,
        prompts,
        sampling,
        providers.Callable(make_sampling_plan, config),
        providers.Callable(make_staleness_bound, config, rollouts),
        clock,
        curriculum=providers.Callable(make_curriculum, config),
    )
    sink = providers.Singleton(make_sinks, config, rollouts)
    sample_log = providers.Singleton(make_sample_log, config, codec)
    schedule = providers.Callable(
        Schedule,
        steps=rollouts,
        eval_steps=config.provided.eval.steps,
        save_steps=config.provided.ckpt.save_steps,
        state_steps=config.provided.ckpt.state_steps,
        state_minutes=config.provided.ckpt.state_minutes,
    )
    learner = providers.Singleton(
        RLLearner,
        experience=experience,
        update=update,
        policy=policy,
        channel=channel,
        objective=providers.Callable(make_objective, config).provider,
        value_objective=providers.Callable(ClippedValueObjective, clip=config.provided.critic.value_clip),
        kl=providers.Callable(make_kl_controller, config),
        entropy=providers.Callable(make_entropy_controller, config),
        clock=clock,
        freezing_steps=config.provided.critic.freezing_steps,
        pass_threshold=config.provided.reward.pass_threshold,
    )
    steps = providers.Selector(
        providers.Callable(pipeline_kind, config),
        alternating=providers.Singleton(
            Alternating,
            learner=learner,
            sampler=sampler,
            sleeper=providers.Selector(
                providers.Callable(sleeper_kind, config), engine=engine, none=providers.Object(None)
            ),
            steps=rollouts,
            clock=clock,
        ),
        overlapping=providers.Singleton(
            Overlapping,
            learner=learner,
            stream=stream,
            engine=engine,
            pause=providers.Callable(PAUSES.__getitem__, config.provided.train.partial_rollout),
            clock=clock,
        ),
    )
    run = providers.Singleton(  # the schedule first: it counts the prompts, before models are loaded
        Run,
        schedule=schedule,
        steps=steps,
        models=update,
        evaluation=providers.Selector(
            providers.Callable(dataset_kind, config.provided.eval.dataset),
            dataset=evaluation,
            reasoning_gym=evaluation,
            none=providers.Object(None),
        ),
        sink=sink,
        sample_log=sample_log,
        checkpoints=checkpoints,
        clock=clock,
        watch=providers.Callable(make_learning_watch, config, rollouts),
        description=description,
        less_memory=LESS_MEMORY,
    )
