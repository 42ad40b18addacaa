"""The composition root: which class stands behind each port for a given configuration.

A flag's value is the key of its branch. Every provider can be overridden, by name, with any object that implements
its port: that is how the library face and the tests swap a piece.
"""

import math
from pathlib import Path
from typing import Any

from dependency_injector import containers, providers

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.datasets.loading import load_dataset
from rollgrad.adapters.datasets.prompt_builder import PromptBuilder
from rollgrad.adapters.datasets.source import DatasetPromptSource
from rollgrad.adapters.reasoning_gym.source import ReasoningGymPromptSource, ReasoningGymReward
from rollgrad.adapters.rewards.function import FunctionReward, load_reward_function
from rollgrad.adapters.rewards.verifiers import VerifierReward
from rollgrad.adapters.system.clock import SystemClock
from rollgrad.adapters.torch.loading import default_device, load_causal_lm, load_tokenizer, resolve_dtype
from rollgrad.adapters.torch.models import TorchPolicy, TorchReference, TorchValue
from rollgrad.adapters.torch.optimizer import OptimizerSettings
from rollgrad.adapters.tracking.console import ConsoleSink
from rollgrad.adapters.tracking.jsonl import JsonlSink
from rollgrad.adapters.tracking.multi import MultiSink
from rollgrad.adapters.tracking.samples import SampleWriter
from rollgrad.adapters.tracking.tensorboard import TensorBoardSink
from rollgrad.adapters.transformers.engine import EmbeddedEngine, SharedWeights
from rollgrad.application.config import ActorConfig, CriticConfig, Estimator, RLConfig
from rollgrad.application.evaluation import EvaluationService
from rollgrad.application.executors.multi_turn import MultiTurnExecutor
from rollgrad.application.executors.single_turn import SingleTurnExecutor
from rollgrad.application.experience import ExperienceService
from rollgrad.application.rollout import RolloutService
from rollgrad.application.sync_pipeline import Schedule, SyncPipeline
from rollgrad.application.update import UpdateService
from rollgrad.application.validation import REASONING_GYM, optimizer_steps_per_rollout
from rollgrad.domain.kl_control import KLController
from rollgrad.domain.losses.objectives import ClippedPolicyObjective, ClippedValueObjective
from rollgrad.domain.ports.models import PolicyObjective
from rollgrad.domain.ports.prompt_source import PromptSource
from rollgrad.domain.prompts import Prompt
from rollgrad.domain.sampling import SamplingParams

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


def _dataset_kind(spec: str | None) -> str:
    if spec is None:
        return "none"
    return "reasoning_gym" if spec.startswith(REASONING_GYM) else "dataset"


def _reward_kind(config: RLConfig, spec: str) -> str:
    if config.reward.function_path is not None:
        return "function"
    return "verifier" if config.reward.verifier is not None else _dataset_kind(spec)


def _rollouts(config: RLConfig, prompts: PromptSource) -> int:
    """Rollouts of the whole run."""
    if config.train.max_steps is not None:
        return config.train.max_steps
    return math.ceil(len(prompts) * config.train.num_episodes / config.rollout.batch_size)


def _optimizer(section: ActorConfig | CriticConfig, config: RLConfig, rollouts: int) -> OptimizerSettings:
    return OptimizerSettings(
        lr=section.adam.lr,
        betas=section.adam.betas,
        eps=section.adam.eps,
        weight_decay=section.adam.weight_decay,
        scheduler=section.lr_scheduler,
        warmup_ratio=section.lr_warmup_ratio,
        min_lr_ratio=section.min_lr_ratio,
        max_norm=section.max_norm,
        total_steps=rollouts * optimizer_steps_per_rollout(config),
    )


def _actor_model(config: RLConfig, name: str | None, flag: str) -> Any:
    device = default_device()
    return load_causal_lm(
        name or config.actor.model_name_or_path,
        dtype=resolve_dtype(config.actor.dtype, device),
        device=device,
        flag=flag,
    )


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


def _objective(config: RLConfig, kl_coef: float) -> PolicyObjective:
    actor = config.actor
    low, high = actor.eps_clip_low_high or (actor.eps_clip, actor.eps_clip)
    return ClippedPolicyObjective(
        clip_low=low,
        clip_high=high,
        dual_clip=actor.dual_clip,
        kl_coef=kl_coef if config.algo.kl.use_loss else 0.0,
        kl_estimator=config.algo.kl.estimator,
        entropy_coef=actor.entropy_coef,
    )


def _advantage_is_all(config: RLConfig) -> bool:
    """Whether the policy's loss has no term besides the advantage's."""
    return config.actor.entropy_coef == 0 and not config.algo.kl.use_loss


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
        ),
        verifier=providers.Singleton(
            VerifierReward,
            config.provided.reward.verifier,
            timeout=config.provided.reward.timeout,
            format_pattern=config.provided.reward.format_pattern,
        ),
        reasoning_gym=providers.Singleton(ReasoningGymReward, reward_spec, timeout=config.provided.reward.timeout),
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
        config.provided.algo.advantage.estimator,
        **{
            **{estimator.value: providers.Object(None) for estimator in Estimator},
            Estimator.GAE.value: providers.Singleton(
                TorchValue,
                providers.Callable(
                    _actor_model, config, config.provided.critic.model_name_or_path, "--critic.model-name-or-path"
                ),
                tokenizer,
                providers.Callable(_optimizer, config.provided.critic, config, rollouts),
            ),
        },
    )
    reference = providers.Selector(
        providers.Callable(lambda coef: "loaded" if coef > 0 else "none", config.provided.algo.kl.init_coef),
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
        providers.Callable(lambda made: "single_turn" if made is None else "multi_turn", environment),
        single_turn=providers.Singleton(SingleTurnExecutor, engine, codec, reward),
        multi_turn=providers.Singleton(
            MultiTurnExecutor, engine, codec, environment, max_turns=config.provided.rollout.max_turns
        ),
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
        threshold=config.provided.eval.pass_threshold,
    )
    experience = providers.Singleton(
        ExperienceService,
        policy,
        reference=reference,
        critic=critic,
        algo=config.provided.algo,
        reward_clip=config.provided.reward.clip_range,
        max_tokens=config.provided.train.max_tokens_per_micro_batch,
        steps_per_rollout=providers.Callable(optimizer_steps_per_rollout, config),
    )
    update = providers.Singleton(
        UpdateService,
        policy,
        critic,
        aggregation=config.provided.actor.loss_aggregation,
        max_length=config.provided.rollout.max_new_tokens,
        batch_size=config.provided.train.batch_size,
        epochs=config.provided.train.max_epochs,
        max_tokens=config.provided.train.max_tokens_per_micro_batch,
        seed=config.provided.train.seed,
        skip_idle=providers.Callable(_advantage_is_all, config),
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
            prompts_per_step=config.provided.rollout.batch_size,
            samples_per_prompt=config.provided.rollout.n_samples_per_prompt,
            eval_steps=config.provided.eval.steps,
            save_steps=config.provided.ckpt.save_steps,
        ),
        params=providers.Callable(_sampling, config),
        prompts=prompts,
        rollout=rollout,
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
