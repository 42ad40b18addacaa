"""The composition root: which class stands behind each port for a given configuration.

A flag's value is the key of its branch. Every provider can be overridden, by name, with any object that implements
its port: that is how the library face and the tests swap a piece.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dependency_injector import containers, providers
from torch import Tensor

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.datasets.loading import load_dataset
from rollgrad.adapters.datasets.prompt_builder import PromptBuilder
from rollgrad.adapters.datasets.source import DatasetPromptSource
from rollgrad.adapters.http.reward import HttpReward
from rollgrad.adapters.openrlhf.environment import AgentInstanceEnvironment
from rollgrad.adapters.openrlhf.executor import CustomAgentExecutor
from rollgrad.adapters.openrlhf.loading import load_agent_file
from rollgrad.adapters.reasoning_gym.source import ReasoningGymPromptSource, ReasoningGymReward
from rollgrad.adapters.rewards.function import FunctionReward, load_reward_function
from rollgrad.adapters.rewards.none import NoReward
from rollgrad.adapters.rewards.verifiers import VerifierReward
from rollgrad.adapters.system.clock import SystemClock
from rollgrad.adapters.torch.loading import default_device, load_causal_lm, load_critic, load_tokenizer, resolve_dtype
from rollgrad.adapters.torch.models import TorchPolicy, TorchReference, TorchValue
from rollgrad.adapters.torch.optimizer import OptimizerSettings
from rollgrad.adapters.tracking.console import ConsoleSink
from rollgrad.adapters.tracking.jsonl import JsonlSink
from rollgrad.adapters.tracking.multi import MultiSink
from rollgrad.adapters.tracking.samples import SampleWriter
from rollgrad.adapters.tracking.tensorboard import TensorBoardSink
from rollgrad.adapters.transformers.engine import EmbeddedEngine, SharedWeights
from rollgrad.application.config import ActorConfig, CorrectionLevel, CriticConfig, KLAgainst, OldLogprobs, RLConfig
from rollgrad.application.evaluation import EvaluationService
from rollgrad.application.executors.multi_turn import EnvironmentFactory, MultiTurnExecutor
from rollgrad.application.executors.single_turn import SingleTurnExecutor
from rollgrad.application.experience import ExperienceService
from rollgrad.application.rollout import RolloutService
from rollgrad.application.sampling import GroupSampler, SamplingPlan
from rollgrad.application.sync_pipeline import Schedule, SyncPipeline
from rollgrad.application.update import UpdateService
from rollgrad.application.validation import REASONING_GYM, optimizer_steps_per_rollout
from rollgrad.domain.batch import PackedBatch
from rollgrad.domain.catalogue import estimator_traits, policy_loss_traits
from rollgrad.domain.curriculum import Curriculum
from rollgrad.domain.entropy_control import EntropyController
from rollgrad.domain.filtering import GroupFilter
from rollgrad.domain.kl_control import KLController
from rollgrad.domain.losses.corrections import Correction
from rollgrad.domain.losses.objectives import ClippedValueObjective, PolicyLossObjective
from rollgrad.domain.losses.registry import PolicyLossParams
from rollgrad.domain.losses.selection import clip_cov_tokens, kl_cov_tokens, token_keys
from rollgrad.domain.ports.agent_executor import AgentExecutor
from rollgrad.domain.ports.environment import Environment
from rollgrad.domain.ports.models import PolicyObjective
from rollgrad.domain.ports.prompt_source import PromptSource
from rollgrad.domain.ports.rollout_engine import RolloutEngine
from rollgrad.domain.prompts import Prompt
from rollgrad.domain.sampling import SamplingParams

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


def _dataset_kind(spec: str | None) -> str:
    if spec is None:
        return "none"
    return "reasoning_gym" if spec.startswith(REASONING_GYM) else "dataset"


def _reward_kind(config: RLConfig, spec: str) -> str:
    if config.train.agent_func_path is not None:
        return "none"
    if config.reward.function_path is not None:
        return "function"
    if config.reward.remote_url is not None:
        return "remote"
    if config.reward.verifier is not None:
        return "verifier"
    kind = _dataset_kind(spec)
    return kind if kind == "reasoning_gym" else "none"


def _remote_reward(config: RLConfig) -> HttpReward:
    reward = config.reward
    return HttpReward(
        [url.strip() for url in (reward.remote_url or "").split(",") if url.strip()],
        timeout=reward.timeout,
        batch_size=reward.remote_batch_size,
        weights=reward.weights,
        failure_value=reward.failure_value,
    )


def _rollouts(config: RLConfig, prompts: PromptSource) -> int:
    """Rollouts of the whole run."""
    if config.train.max_steps is not None:
        return config.train.max_steps
    return math.ceil(len(prompts) * config.train.num_episodes / config.rollout.batch_size)


def _optimizer(section: ActorConfig | CriticConfig, config: RLConfig, rollouts: int) -> OptimizerSettings:
    trained = rollouts - (config.critic.freezing_steps if section is config.actor else 0)
    return OptimizerSettings(
        lr=section.adam.lr,
        betas=section.adam.betas,
        eps=section.adam.eps,
        weight_decay=section.adam.weight_decay,
        scheduler=section.lr_scheduler,
        warmup_ratio=section.lr_warmup_ratio,
        min_lr_ratio=section.min_lr_ratio,
        max_norm=section.max_norm,
        total_steps=trained * optimizer_steps_per_rollout(config),
    )


def _actor_model(config: RLConfig, name: str | None, flag: str) -> Any:
    device = default_device()
    return load_causal_lm(
        name or config.actor.model_name_or_path,
        dtype=resolve_dtype(config.actor.dtype, device),
        device=device,
        flag=flag,
    )


def _critic(config: RLConfig, tokenizer: Any, settings: OptimizerSettings) -> TorchValue:
    device = default_device()
    model, head = load_critic(
        config.critic.model_name_or_path or config.actor.model_name_or_path,
        dtype=resolve_dtype(config.actor.dtype, device),
        device=device,
        flag="--critic.model-name-or-path",
    )
    return TorchValue(model, tokenizer, settings, head=head)


def _dataset_source(config: RLConfig, codec: TemplateCodec) -> DatasetPromptSource:
    data = config.data
    dataset = load_dataset(
        data.prompt_dataset,
        split=data.prompt_split,
        probs=data.prompt_probs,
        seed=config.train.seed,
        max_samples=data.max_samples,
    )
    return DatasetPromptSource(dataset, PromptBuilder(codec, data), seed=config.train.seed)


def _gym_source(config: RLConfig, codec: TemplateCodec) -> ReasoningGymPromptSource:
    data = config.data
    size = min(data.size, data.max_samples or data.size)
    return ReasoningGymPromptSource(data.prompt_dataset, codec, data, size=size, seed=config.train.seed)


def _eval_dataset(config: RLConfig, codec: TemplateCodec) -> list[Prompt]:
    assert config.eval.dataset is not None
    dataset = load_dataset(
        config.eval.dataset,
        split=config.eval.split,
        probs=None,
        seed=config.train.seed,
        max_samples=config.eval.max_samples,
    )
    return DatasetPromptSource(dataset, PromptBuilder(codec, config.data), seed=config.train.seed).prompts()


HELD_OUT_SEED_OFFSET = 1_000_003
"""Added to the run's seed for held-out reasoning_gym tasks, so that they differ from the training ones."""


def _eval_gym(config: RLConfig, codec: TemplateCodec) -> list[Prompt]:
    assert config.eval.dataset is not None
    size = config.eval.max_samples or config.data.size
    seed = config.train.seed + HELD_OUT_SEED_OFFSET
    return ReasoningGymPromptSource(config.eval.dataset, codec, config.data, size=size, seed=seed).prompts()


def _eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a reply: the tokenizer's and those the model's generation settings list."""
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*listed, tokenizer.eos_token_id) if token is not None})


def _engine(config: RLConfig, model: Any, tokenizer: Any, codec: TemplateCodec) -> EmbeddedEngine:
    return EmbeddedEngine(
        model,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        max_batch_size=config.rollout.max_batch_size,
        decode=codec.decode,
    )


def _sampling(config: RLConfig) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        stop_strings=rollout.stop_strings,
    )


def _eval_sampling(config: RLConfig) -> SamplingParams:
    return SamplingParams(
        temperature=config.eval.temperature,
        max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
        stop_strings=config.rollout.stop_strings,
    )


def _aggregation(config: RLConfig) -> str:
    return config.actor.loss_aggregation or policy_loss_traits(config.actor.policy_loss_type).aggregation


def _loss_params(config: RLConfig) -> PolicyLossParams:
    actor = config.actor
    default = policy_loss_traits(actor.policy_loss_type).clip or (0.0, 0.0)
    same = None if actor.eps_clip is None else (actor.eps_clip, actor.eps_clip)
    low, high = actor.eps_clip_low_high or same or default
    return PolicyLossParams(
        clip_low=low,
        clip_high=high,
        dual_clip=actor.dual_clip,
        sapo_tau=actor.sapo_tau,
        cov_kl_coef=actor.cov_kl_coef,
    )


def _correction(config: RLConfig) -> Correction | None:
    settings = config.algo.correction
    if settings.level is CorrectionLevel.OFF:
        return None
    return Correction(
        level=settings.level,
        mode=settings.mode,
        gate=settings.gate,
        low=settings.low,
        high=settings.high,
        threshold=settings.threshold,
        bypass=config.algo.old_logprobs is OldLogprobs.ROLLOUT,
    )


def _objective(config: RLConfig, *, kl_coef: float, entropy_coef: float, version: int) -> PolicyObjective:
    return PolicyLossObjective(
        loss=config.actor.policy_loss_type,
        params=_loss_params(config),
        correction=_correction(config),
        kl_coef=kl_coef if config.algo.kl.use_loss else 0.0,
        kl_estimator=config.algo.kl.estimator,
        kl_against=config.algo.kl.against,
        entropy_coef=entropy_coef,
        positive_nll_coef=config.actor.positive_nll_coef,
        version=version if config.algo.old_logprobs is OldLogprobs.INTERPOLATE else None,
    )


def _token_selection(config: RLConfig) -> Callable[[PackedBatch], Tensor] | None:
    """What chooses the tokens that clip_cov and kl_cov treat apart."""
    actor = config.actor

    def clip_cov(batch: PackedBatch) -> Tensor:
        return clip_cov_tokens(
            batch.start_logprobs_N,
            batch.filled("advantages_N"),
            batch.action_mask_N,
            share=actor.cov_share,
            limits=actor.cov_range,
            keys_N=token_keys(batch.sample_ids_S, batch.positions_N, batch.lengths_S),
        )

    def kl_cov(batch: PackedBatch) -> Tensor:
        return kl_cov_tokens(
            batch.start_logprobs_N, batch.filled("advantages_N"), batch.action_mask_N, share=actor.cov_share
        )

    return {"clip_cov": clip_cov, "kl_cov": kl_cov}.get(actor.policy_loss_type)


def _advantage_is_all(config: RLConfig) -> bool:
    """Whether a sample without an advantage has no gradient: the loss has no other term, and is in proportion."""
    actor = config.actor
    return (
        actor.entropy_coef == 0
        and actor.entropy_target is None
        and actor.positive_nll_coef == 0
        and not config.algo.kl.use_loss
        and policy_loss_traits(actor.policy_loss_type).proportional
    )


def _sampling_plan(config: RLConfig) -> SamplingPlan:
    algo, rollout = config.algo, config.rollout
    return SamplingPlan(
        groups=rollout.batch_size,
        samples=rollout.n_samples_per_prompt,
        in_flight=rollout.generate_batch_size or rollout.batch_size,
        budget=algo.dynamic_filtering_budget,
        group_filter=GroupFilter(
            score_range=algo.dynamic_filtering_range if algo.dynamic_filtering_enable else None,
            need_spread=algo.dynamic_filtering_spread,
        ),
        greedy_baseline="greedy_baseline" in estimator_traits(algo.advantage.estimator).needs,
    )


def _curriculum(config: RLConfig) -> Curriculum | None:
    limits = config.data.curriculum_range
    return None if limits is None else Curriculum(limits=limits)


def _reference_kind(config: RLConfig) -> str:
    needed = config.algo.kl.init_coef > 0 and config.algo.kl.against is KLAgainst.REFERENCE
    return "loaded" if needed else "none"


def _critic_kind(config: RLConfig) -> str:
    return "loaded" if "critic" in estimator_traits(config.algo.advantage.estimator).needs else "none"


def _executor_kind(config: RLConfig, environment: Any) -> str:
    if environment is not None:
        return "environment"
    return "single_turn" if config.train.agent_func_path is None else "agent_file"


def _multi_turn(
    config: RLConfig, engine: RolloutEngine, codec: TemplateCodec, environment: Callable[[], Environment]
) -> MultiTurnExecutor:
    return _turns(config, engine, codec, lambda params: environment())


def _agent_file(config: RLConfig, engine: RolloutEngine, codec: TemplateCodec, tokenizer: Any) -> AgentExecutor:
    """What plays the episodes that the file of `train.agent_func_path` describes."""
    assert config.train.agent_func_path is not None
    file = load_agent_file(config.train.agent_func_path)
    if file.environment is not None:
        return _multi_turn(config, engine, codec, file.environment)
    if file.instance is not None:
        make = file.instance
        return _turns(config, engine, codec, lambda params: AgentInstanceEnvironment(make(), params))
    limit = config.rollout.max_episode_tokens or config.data.max_prompt_tokens + config.rollout.max_new_tokens
    return CustomAgentExecutor(file.executor, engine, codec, tokenizer, max_length=limit)


def _turns(
    config: RLConfig, engine: RolloutEngine, codec: TemplateCodec, environment: EnvironmentFactory
) -> MultiTurnExecutor:
    rollout = config.rollout
    return MultiTurnExecutor(
        engine,
        codec,
        environment,
        max_turns=rollout.max_turns,
        max_tokens=rollout.max_episode_tokens,
        max_seconds=rollout.max_episode_seconds,
    )


def _sinks(config: RLConfig, rollouts: int) -> MultiSink:
    output = Path(config.ckpt.output_dir)
    sinks: list[Any] = [JsonlSink(output / METRICS_FILE)]
    if config.logger.console:
        sinks.append(ConsoleSink(rollouts))
    if config.logger.tensorboard_dir is not None:
        sinks.append(TensorBoardSink(Path(config.logger.tensorboard_dir)))
    return MultiSink(sinks)


class Container(containers.DeclarativeContainer):
    """All objects of a run; `config` is the validated `RLConfig`."""

    config: providers.Provider[RLConfig] = providers.Dependency(instance_of=RLConfig)

    clock = providers.Singleton(SystemClock)
    checkpoints = providers.Singleton(LocalCheckpointStore, providers.Callable(Path, config.provided.ckpt.output_dir))
    tokenizer = providers.Singleton(
        load_tokenizer, config.provided.actor.model_name_or_path, flag="--actor.model-name-or-path"
    )
    codec = providers.Singleton(TemplateCodec, tokenizer)

    prompts = providers.Selector(
        providers.Callable(_dataset_kind, config.provided.data.prompt_dataset),
        dataset=providers.Singleton(_dataset_source, config, codec),
        reasoning_gym=providers.Singleton(_gym_source, config, codec),
    )
    eval_prompts = providers.Selector(
        providers.Callable(_dataset_kind, config.provided.eval.dataset),
        dataset=providers.Singleton(_eval_dataset, config, codec),
        reasoning_gym=providers.Singleton(_eval_gym, config, codec),
        none=providers.List(),
    )
    reward_spec = config.provided.data.prompt_dataset
    reward = providers.Selector(
        providers.Callable(_reward_kind, config, reward_spec),
        function=providers.Singleton(
            FunctionReward,
            providers.Callable(load_reward_function, config.provided.reward.function_path),
            timeout=config.provided.reward.timeout,
            weights=config.provided.reward.weights,
        ),
        verifier=providers.Singleton(
            VerifierReward,
            config.provided.reward.verifier,
            timeout=config.provided.reward.timeout,
            format_pattern=config.provided.reward.format_pattern,
        ),
        reasoning_gym=providers.Singleton(ReasoningGymReward, reward_spec, timeout=config.provided.reward.timeout),
        remote=providers.Singleton(_remote_reward, config),
        none=providers.Singleton(NoReward),
    )

    rollouts = providers.Singleton(_rollouts, config, prompts)
    actor_model = providers.Singleton(_actor_model, config, None, "--actor.model-name-or-path")
    policy = providers.Singleton(
        TorchPolicy,
        actor_model,
        tokenizer,
        providers.Callable(_optimizer, config.provided.actor, config, rollouts),
        temperature=config.provided.rollout.temperature,
        gradient_checkpointing=config.provided.actor.gradient_checkpointing,
    )
    critic = providers.Selector(
        providers.Callable(_critic_kind, config),
        loaded=providers.Singleton(
            _critic, config, tokenizer, providers.Callable(_optimizer, config.provided.critic, config, rollouts)
        ),
        none=providers.Object(None),
    )
    reference = providers.Selector(
        providers.Callable(_reference_kind, config),
        loaded=providers.Singleton(
            TorchReference,
            providers.Callable(
                _actor_model, config, config.provided.ref.model_name_or_path, "--ref.model-name-or-path"
            ),
            temperature=config.provided.rollout.temperature,
        ),
        none=providers.Object(None),
    )

    engine = providers.Singleton(_engine, config, actor_model, tokenizer, codec)
    channel = providers.Singleton(SharedWeights, engine)
    environment: providers.Object[Any] = providers.Object(None)
    executor = providers.Selector(
        providers.Callable(_executor_kind, config, environment),
        single_turn=providers.Singleton(SingleTurnExecutor, engine, codec, reward),
        environment=providers.Singleton(_multi_turn, config, engine, codec, environment),
        agent_file=providers.Singleton(_agent_file, config, engine, codec, tokenizer),
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
        providers.Callable(_eval_sampling, config),
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
        max_length=config.provided.rollout.max_new_tokens,
        max_tokens=config.provided.train.max_tokens_per_micro_batch,
        steps_per_rollout=providers.Callable(optimizer_steps_per_rollout, config),
    )
    update = providers.Singleton(
        UpdateService,
        policy,
        critic,
        aggregation=providers.Callable(_aggregation, config),
        max_length=config.provided.rollout.max_new_tokens,
        batch_size=config.provided.train.batch_size,
        epochs=config.provided.train.max_epochs,
        max_tokens=config.provided.train.max_tokens_per_micro_batch,
        seed=config.provided.train.seed,
        skip_idle=providers.Callable(_advantage_is_all, config),
        select=providers.Callable(_token_selection, config),
        pass_threshold=config.provided.reward.pass_threshold,
    )
    sampler = providers.Singleton(
        GroupSampler,
        rollout,
        prompts,
        providers.Callable(_sampling, config),
        providers.Callable(_sampling_plan, config),
        curriculum=providers.Callable(_curriculum, config),
    )
    sink = providers.Singleton(_sinks, config, rollouts)
    sample_log = providers.Singleton(
        SampleWriter,
        providers.Callable(lambda output: Path(output) / SAMPLES_FILE, config.provided.ckpt.output_dir),
        codec.provided.decode,
        config.provided.logger.log_samples,
    )
    pipeline = providers.Singleton(
        SyncPipeline,
        schedule=providers.Callable(
            Schedule,
            steps=rollouts,
            eval_steps=config.provided.eval.steps,
            save_steps=config.provided.ckpt.save_steps,
            state_steps=config.provided.ckpt.state_steps,
            freezing_steps=config.provided.critic.freezing_steps,
            pass_threshold=config.provided.reward.pass_threshold,
        ),
        sampler=sampler,
        experience=experience,
        update=update,
        policy=policy,
        channel=channel,
        objective=providers.Callable(_objective, config).provider,
        value_objective=providers.Callable(ClippedValueObjective, clip=config.provided.critic.value_clip),
        kl=providers.Callable(
            KLController,
            coef=config.provided.algo.kl.init_coef,
            target=config.provided.algo.kl.target,
            horizon=config.provided.algo.kl.horizon,
        ),
        entropy=providers.Callable(
            EntropyController,
            coef=config.provided.actor.entropy_coef,
            target=config.provided.actor.entropy_target,
            step=config.provided.actor.entropy_coef_step,
        ),
        evaluation=providers.Selector(
            providers.Callable(_dataset_kind, config.provided.eval.dataset),
            dataset=evaluation,
            reasoning_gym=evaluation,
            none=providers.Object(None),
        ),
        sink=sink,
        checkpoints=checkpoints,
        clock=clock,
        sample_log=sample_log,
    )
