"""From the settings of `data` and `eval` to prompts, and to the tokenizer and template that write them."""

import re
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.datasets.loading import load_dataset
from rollgrad.adapters.data.datasets.prompt_builder import PromptBuilder
from rollgrad.adapters.data.datasets.source import DatasetPromptSource
from rollgrad.adapters.data.reasoning_gym.source import ReasoningGymPromptSource
from rollgrad.adapters.models.torch.loading import load_positions, load_tokenizer
from rollgrad.adapters.rewards.verifiers import label_problem
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.reward import Verifier
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.composition.factories import executor_kind

Source = TypeVar("Source", DatasetPromptSource, ReasoningGymPromptSource)

_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""Tags around a reply, which transformers adds to Jinja."""
BOOLEANS = {"true": True, "false": False}
"""Values on a command line that are booleans of a template, for `false` as a text would count as true there."""


def make_tokenizer(config: RLConfig) -> Any:
    """The actor's tokenizer, with the chat template of the run.

    Raises:
        CheckpointError: there is none.
        ConfigurationError: `data.chat_template` is no file and no template.
    """
    tokenizer = load_tokenizer(config.actor.model_name_or_path, flag="--actor.model_name_or_path")
    if config.data.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.data.chat_template)
    return tokenizer


def read_chat_template(value: str) -> str:
    """The template that `data.chat_template` is, or names.

    Raises:
        ConfigurationError: it is no file that can be read, or no Jinja template.
    """
    from jinja2 import Environment, TemplateSyntaxError

    text, where = value, "data.chat_template"
    if "{{" not in value and "{%" not in value:
        where = f"data.chat_template {value}"
        try:
            text = Path(value).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ConfigurationError(
                f"data.chat_template is {value!r}, which is no Jinja template and no file that can be read ({reason}): "
                "check --data.chat_template."
            ) from error
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", text))
    except TemplateSyntaxError as error:
        raise ConfigurationError(
            f"{where} is no Jinja template (line {error.lineno}: {error.message}): check --data.chat_template."
        ) from error
    return text


def make_codec(config: RLConfig, tokenizer: Any) -> TemplateCodec:
    """Writes and reads the conversations of the run.

    Raises:
        ConfigurationError: the template has no variable of a name in `data.chat_template_kwargs`.
    """
    given = config.data.chat_template_kwargs or {}
    unknown = [name for name in given if name not in str(tokenizer.chat_template)]
    if unknown:
        raise ConfigurationError(
            f"data.chat_template_kwargs sets {', '.join(unknown)}, which the chat template does not read: check the "
            "name, or leave it out of --data.chat_template_kwargs."
        )
    values = {
        name: BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value for name, value in given.items()
    }
    return TemplateCodec(tokenizer, values)


def make_dataset_source(config: RLConfig, codec: TemplateCodec, environment: Any) -> DatasetPromptSource:
    """Prompts from datasets; `environment` plays them, if it is not None."""
    data = config.data
    dataset = load_dataset(
        data.prompt_dataset,
        split=data.prompt_split,
        probs=data.prompt_probs,
        seed=config.train.seed,
        max_samples=data.max_samples,
    )
    source = DatasetPromptSource(dataset, _builder(config, codec), seed=config.train.seed)
    return _within_positions(config, environment, source, "rollout")


def make_gym_source(config: RLConfig, codec: TemplateCodec, environment: Any) -> ReasoningGymPromptSource:
    """Prompts that reasoning-gym generates; `environment` plays them, if it is not None."""
    data = config.data
    size = min(data.size, data.max_samples or data.size)
    source = ReasoningGymPromptSource(data.prompt_dataset, codec, data, size=size, seed=config.train.seed)
    return _within_positions(config, environment, source, "rollout")


def make_eval_dataset(config: RLConfig, codec: TemplateCodec, environment: Any) -> list[Prompt]:
    """Held-out prompts from datasets; `environment` plays them, if it is not None."""
    assert config.eval.dataset is not None
    dataset = load_dataset(
        config.eval.dataset,
        split=config.eval.split,
        probs=None,
        seed=config.train.seed,
        max_samples=config.eval.max_samples,
    )
    source = DatasetPromptSource(dataset, _builder(config, codec), seed=config.train.seed, setting="eval.dataset")
    return _within_positions(config, environment, source, "eval").prompts()


HELD_OUT_SEED_OFFSET = 1_000_003
"""Added to the run's seed for held-out reasoning_gym tasks, so that they differ from the training ones."""


def make_eval_gym(config: RLConfig, codec: TemplateCodec, environment: Any) -> list[Prompt]:
    """Held-out prompts that reasoning-gym generates; `environment` plays them, if it is not None."""
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
    """`source`, if the model has positions for its longest prompt and the longest reply, which `section` sets.

    Episodes of several turns are ended by the number of positions. Other engines than the embedded one know their own.

    Raises:
        ConfigurationError: a step would fail when the prompt is drawn.
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


def _builder(config: RLConfig, codec: TemplateCodec) -> PromptBuilder:
    verifier = config.reward.verifier
    if verifier is None:
        # A reward model reads the reply alone; functions, servers, environments and agents are given the label.
        return PromptBuilder(codec, config.data, labels_are_read=config.reward.model_name_or_path is None)
    return PromptBuilder(
        codec,
        config.data,
        labels_are_read=verifier is not Verifier.FORMAT,
        label_problem=partial(label_problem, verifier),
    )
