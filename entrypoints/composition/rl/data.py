"""Makes prompts from the settings of `data` and `eval`."""

import math
from functools import partial
from typing import Any, TypeVar

import structlog
from attrs import evolve

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.datasets.loading import load_dataset
from rollgrad.adapters.data.datasets.prompt_builder import PromptBuilder
from rollgrad.adapters.data.datasets.source import DatasetPromptSource
from rollgrad.adapters.data.datasets.survey import Rows, Survey, repeated
from rollgrad.adapters.data.datasets.teacher_template import TeacherTemplate
from rollgrad.adapters.data.reasoning_gym.source import ReasoningGymPromptSource
from rollgrad.adapters.models.torch.loading.loading import load_positions
from rollgrad.adapters.rewards.rubric import criteria
from rollgrad.adapters.rewards.verifiers import label_problem
from rollgrad.application.settings.rules.inputs import REASONING_GYM
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.prompt_source import PromptSource
from rollgrad.entrypoints.composition.fetching import make_fetched_images
from rollgrad.entrypoints.composition.rl.executors import executor_kind
from rollgrad.entrypoints.composition.served import check_datasources

log = structlog.get_logger(__name__)
Source = TypeVar("Source", DatasetPromptSource, ReasoningGymPromptSource)


def dataset_kind(spec: str | None) -> str:
    """Returns the kind of prompt source."""
    if spec is None:
        return "none"
    return "reasoning_gym" if spec.startswith(REASONING_GYM) else "dataset"


def make_rows_config(config: RLConfig, reward_replaced: bool) -> RLConfig:
    """Returns the settings by which rows become prompts: without those of a reward that a caller's has replaced, for
    which the rows need no labels."""
    if not reward_replaced:
        return config
    unset: dict[str, Any] = dict.fromkeys(["judge_rubric_key", *dict(config.reward.sources)])
    return evolve(config, reward=evolve(config.reward, **unset))


def make_rollouts(config: RLConfig, prompts: PromptSource) -> int:
    """Returns the number of rollouts of the whole run. One of more prompts than there are is a warning."""
    if config.rollout.batch_size > len(prompts):
        log.warning(
            "prompts repeat within a rollout",
            prompts=len(prompts),
            batch_size=config.rollout.batch_size,
            flag="--rollout.batch_size",
        )
    if config.train.max_steps is not None:
        return config.train.max_steps
    return math.ceil(len(prompts) * config.train.num_episodes / config.rollout.batch_size)


def make_dataset_source(config: RLConfig, codec: TemplateCodec, environment: Any) -> DatasetPromptSource:
    """Returns the prompts of datasets; `environment` plays them, if it is not None."""
    data = config.data
    builder = _builder(config, codec, _teacher(config), unlabelled=config.reward.majority_vote)
    dataset = load_dataset(
        data.prompt_dataset,
        split=data.prompt_split,
        probs=data.prompt_probs,
        seed=config.train.seed,
        max_samples=data.max_samples,
        builder=builder,
    )
    source = DatasetPromptSource(dataset, builder, seed=config.train.seed)
    return _checked(config, codec, environment, source)


def make_row_source(rows: Rows, config: RLConfig, codec: TemplateCodec, environment: Any) -> DatasetPromptSource:
    """Returns the prompts of rows that the caller brings; `environment` plays them, if it is not None."""
    builder = _builder(config, codec, _teacher(config), unlabelled=config.reward.majority_vote)
    seed, most = config.train.seed, config.data.max_samples
    source = DatasetPromptSource(rows, builder, seed=seed, max_samples=most, setting="prompts")
    return _checked(config, codec, environment, source)


def make_gym_source(config: RLConfig, codec: TemplateCodec, environment: Any) -> ReasoningGymPromptSource:
    """Returns prompts that reasoning-gym generates; `environment` plays them, if it is not None."""
    data = config.data
    size = min(data.size, data.max_samples or data.size)
    seed, teacher = config.train.seed, _teacher(config)
    source = ReasoningGymPromptSource(data.prompt_dataset, codec, data, size=size, seed=seed, teacher=teacher)
    return _checked(config, codec, environment, source)


def make_eval_dataset(config: RLConfig, codec: TemplateCodec, environment: Any) -> list[Prompt]:
    """Returns the held-out prompts of datasets; `environment` plays them, if it is not None."""
    assert config.eval.dataset is not None
    builder = _builder(config, codec)
    dataset = load_dataset(
        config.eval.dataset,
        split=config.eval.split,
        probs=None,
        seed=config.train.seed,
        max_samples=config.eval.max_samples,
        evenly=True,
        builder=builder,
    )
    source = DatasetPromptSource(dataset, builder, seed=config.train.seed, setting="eval.dataset")
    return _within_positions(config, environment, source, "eval").prompts()


def make_eval_rows(rows: Rows, config: RLConfig, codec: TemplateCodec, environment: Any) -> list[Prompt]:
    """Returns the held-out prompts of rows that the caller brings; `environment` plays them, if it is not None."""
    seed, most = config.train.seed, config.eval.max_samples
    source = DatasetPromptSource(rows, _builder(config, codec), seed=seed, max_samples=most, setting="prompts")
    return _within_positions(config, environment, source, "eval").prompts()


def note_repeated_prompts(config: RLConfig, environment: Any, learned: Any, held_out: Any) -> None:
    """Logs how many prompts a dataset has twice, and warns of held-out prompts that are also trained on, unless votes
    judge them, which need no labels. Prompts that are generated, or come from a caller's own source, are not compared.
    Where an environment or an agent plays, rows of one text are other games if another column (a seed) differs."""
    whole = executor_kind(config, environment) in ("environment", "agent_file", "command")
    if isinstance(held_out, list) and (twice := repeated(held_out, whole=whole)):
        log.info(
            f"{twice} of {len(held_out)} held-out prompts of eval.dataset repeat an earlier one, which counts again"
        )
    if not isinstance(learned, DatasetPromptSource):
        return
    if config.data.prompt_probs is None and (twice := learned.survey.repeated(whole=whole)):
        size, setting = len(learned.survey.lengths), learned.survey.setting
        log.info(f"{twice} of {size} rows of {setting} repeat an earlier prompt, which is trained on more often")
    if config.reward.majority_vote or not isinstance(held_out, list):
        return
    shared = sum(learned.survey.has(prompt, whole=whole) for prompt in held_out)
    if shared:
        log.warning(
            f"{shared} of {len(held_out)} held-out prompts of eval.dataset are in data.prompt_dataset, too, and tell "
            "nothing of new ones: leave them out of one of the two"
        )


HELD_OUT_SEED_OFFSET = 1_000_003
"""Number added to the run's seed for held-out reasoning_gym tasks, so that they differ from those of training."""


def make_eval_gym(config: RLConfig, codec: TemplateCodec, environment: Any) -> list[Prompt]:
    """Returns held-out prompts that reasoning-gym generates; `environment` plays them, if it is not None."""
    assert config.eval.dataset is not None
    source = ReasoningGymPromptSource(
        config.eval.dataset,
        codec,
        config.data,
        size=config.eval.max_samples or config.data.size,
        seed=config.train.seed + HELD_OUT_SEED_OFFSET,
        setting="eval.dataset",
    )
    return _within_positions(config, environment, source, "eval").prompts()


def _within_positions(config: RLConfig, environment: Any, source: Source, section: str) -> Source:
    """Returns `source`, if the model has positions for its longest prompt and the longest reply, which `section` sets.

    Episodes of several turns end at the last position. Engines other than the embedded one check this themselves.

    Raises:
        ConfigurationError: a step with the longest prompt would fail.
    """
    if executor_kind(config, environment) != "single_turn" or config.rollout.engine is not Engine.EMBEDDED:
        return source
    evaluates = section == "eval" and config.eval.max_new_tokens is not None
    key = "eval.max_new_tokens" if evaluates else "rollout.max_new_tokens"
    reply = (config.eval.max_new_tokens if evaluates else None) or config.rollout.max_new_tokens
    longest = source.survey.longest
    total = min(longest + reply, config.data.max_len or longest + reply)
    positions = load_positions(config.actor.model_name_or_path)
    if positions is None or total <= positions:
        return source
    raise ConfigurationError(
        f"The longest prompt of {source.survey.setting} has {longest} tokens and a reply up to {reply} ({key}), "
        f"{total} together, but the model has {positions} positions: set --data.max_len {positions}, or lower --{key}."
    )


def _checked(config: RLConfig, codec: TemplateCodec, environment: Any, source: Source) -> Source:
    """Returns `source`, if the model has positions for its prompts, each of them has a teacher where several are named,
    and all teachers have prompts.

    Raises:
        ConfigurationError: this is not so, or a teacher has too few positions.
    """
    _note_end(config, codec)
    _within_positions(config, environment, source, "rollout")
    check_datasources(config.ref, source.survey.datasources, source.survey.setting)
    return _taught_within_positions(config, source)


def _taught_within_positions(config: RLConfig, source: Source) -> Source:
    """Returns `source`, if the reference has positions for what it reads in the place of the longest prompt, and the
    longest reply.

    Raises:
        ConfigurationError: it has not.
    """
    told, reply = longest_told(config, source.survey), config.rollout.max_new_tokens
    name = config.ref.model_name_or_path or config.actor.model_name_or_path
    positions = load_positions(name) if told else None
    if positions is None or told + reply <= positions:
        return source
    raise ConfigurationError(
        f"With algo.kl.teacher_template the longest prompt of {source.survey.setting} has {told} tokens and a reply up "
        f"to {reply} (rollout.max_new_tokens), {told + reply} together, but the reference {name!r} has {positions} "
        "positions: shorten --algo.kl.teacher_template or the columns that it names, or lower --rollout.max_new_tokens."
    )


def longest_told(config: RLConfig, survey: Survey) -> int:
    """Returns the number of tokens that the reference reads in the place of the longest prompt, with what is known once
    replies were judged; 0 if it reads the prompts."""
    template = _teacher(config)
    return survey.longest_told + (0 if template is None else config.rollout.max_new_tokens * len(template.judged))


def _teacher(config: RLConfig) -> TeacherTemplate | None:
    template = config.algo.kl.teacher_template
    return None if template is None else TeacherTemplate.read(template)


def _note_end(config: RLConfig, codec: TemplateCodec) -> None:
    """Warns of a chat template that ends replies with a text in which no token of the tokenizer's own is, as one of
    another family of models does."""
    end = codec.unknown_end
    if config.data.apply_chat_template and end and not any(stop in end for stop in config.rollout.stop_strings):
        log.warning(
            f"the chat template ends a reply with {end!r}, which the tokenizer does not have as a token, so that the "
            "model will hardly end one there: set --data.chat_template to the template that it was trained with, or, "
            "if it writes this text, --rollout.stop_strings to it"
        )


def _builder(
    config: RLConfig, codec: TemplateCodec, teacher: TeacherTemplate | None = None, *, unlabelled: bool = False
) -> PromptBuilder:
    """Returns what makes prompts from rows, which need no labels if they are `unlabelled`."""
    verifier, fetched = config.reward.verifier, make_fetched_images(config.data)
    rubric = config.reward.judge_rubric_key
    # A reward model and a pattern read the reply alone; functions, servers, environments and agents get the label, too.
    blind = {("model_name_or_path", "model"), ("verifier", "format"), *([("verifier", verifier)] if unlabelled else [])}
    return PromptBuilder(
        codec,
        config.data,
        labels_are_read=not config.reward.sources or not blind.issuperset(config.reward.sources),
        label_problem=(lambda label, key: None) if verifier is None or unlabelled else partial(label_problem, verifier),
        fetched=fetched,
        teacher=teacher,
        check=(lambda row: None) if rubric is None else partial(criteria, key=rubric),
    )
