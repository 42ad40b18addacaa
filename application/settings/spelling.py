"""Other spellings of values: names of TRL, verl and OpenRLHF, any case, hyphens for underscores.

`choice` and `canonical_names` are the one place that understands them, for flags, YAML and the library alike.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import UnionType
from typing import Any, TypeVar, get_args

import attrs

from rollgrad.application.settings.presets import refuse_preset
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import Checkpointing, DType
from rollgrad.application.settings.sections.optimizer import LRScheduler, Optim
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.algorithms.catalogue import (
    ESTIMATORS,
    POLICY_LOSSES,
    canonical_estimator,
    canonical_kl_estimator,
    canonical_policy_loss,
    plain_name,
)
from rollgrad.domain.algorithms.settings import Aggregation
from rollgrad.domain.errors import ConfigurationError, raise_together

Kind = TypeVar("Kind", bound=StrEnum)

OTHER_SPELLINGS: Mapping[type[StrEnum], Mapping[str, str]] = {
    DType: {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"},
    Checkpointing: {"true": "full", "on": "full", "false": "off"},
    Engine: {"hf": "embedded", "transformers": "embedded"},
    Optim: {"adamw": "adam", "adamw_torch": "adam"},
    LRScheduler: {"wsd": "warmup_stable_decay"},
    Aggregation: {"seq_mean_token_mean": "sequence_mean"},  # verl's
}
"""Other tools' and torch's spellings of a setting's values, each with our value of the same meaning."""


def choice(kind: type[Kind], value: Any) -> Kind:
    """The member of an enum that a text names, in any spelling.

    >>> choice(DType, "BF16"), choice(Engine, "vLLM"), choice(Aggregation, "token-mean")
    (<DType.BFLOAT16: 'bfloat16'>, <Engine.VLLM: 'vllm'>, <Aggregation.TOKEN_MEAN: 'token_mean'>)

    Raises:
        ValueError: none.
    """
    if value is False and "off" in list(kind):  # YAML reads an unquoted off as false
        value = "off"
    name = plain_name(str(value)) if isinstance(value, str | bool) else value
    return kind(OTHER_SPELLINGS.get(kind, {}).get(name, name))


def choice_kind(annotation: Any) -> type[StrEnum] | None:
    """The enum of a setting's type, of `DType` and of `DType | None` alike; None for other types."""
    for part in get_args(annotation) if isinstance(annotation, UnionType) else (annotation,):
        if isinstance(part, type) and issubclass(part, StrEnum):
            return part
    return None


def canonical_names(config: RLConfig) -> None:
    """Replaces other spellings in a configuration by the canonical ones, in place. Estimators and losses of a user's
    own file (`algo.extension_path`) must be known before: their names come first.

    Raises:
        ConfigurationError: values are no members of their settings' enums, or names of presets; one sentence for each.
    """
    problems = [ConfigurationError(problem) for problem in choice_problems(config)]
    config.algo.advantage.estimator = canonical_estimator(config.algo.advantage.estimator)
    config.algo.kl.estimator = canonical_kl_estimator(config.algo.kl.estimator)
    config.actor.policy_loss_type = canonical_policy_loss(config.actor.policy_loss_type)
    for name, value, known in (
        ("algo.advantage.estimator", config.algo.advantage.estimator, ESTIMATORS),
        ("actor.policy_loss_type", config.actor.policy_loss_type, POLICY_LOSSES),
    ):
        if value not in known:
            try:
                refuse_preset(value, name)
            except ConfigurationError as error:
                problems.append(error)
    raise_together(problems)


def choice_problems(section: Any, prefix: str = "") -> Iterator[str]:
    """Replaces other spellings of the values of enums by the canonical ones, in any run, in place; yields a sentence
    for each value that is none of them."""
    for field in attrs.fields(type(section)):
        value, name = getattr(section, field.name), f"{prefix}{field.name}"
        kind = choice_kind(field.type)
        if attrs.has(type(value)):
            yield from choice_problems(value, f"{name}.")
        elif kind is not None and value is not None and not isinstance(value, kind):
            try:
                setattr(section, field.name, choice(kind, value))
            except ValueError:
                yield f"{name} is {value!r}, which is none of {', '.join(kind)}: change --{name}."
