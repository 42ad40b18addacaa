"""Checks of the vocabularies of models that read the actor's tokens, before any model is loaded."""

from contextlib import suppress
from functools import partial
from typing import Any

from rollgrad.adapters.models.torch.loading.loading import load_tokenizer
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import CheckpointError, ConfigurationError, RollgradError, raise_together
from rollgrad.entrypoints.composition.algorithm import critic_kind, reference_kind, teacher_kind
from rollgrad.entrypoints.composition.teacher import check_compared


def check_vocabularies(config: RLConfig, tokenizer: Any) -> None:
    """Checks that reference and critic of a run, where they are models of their own, know the actor's tokens.

    Raises:
        ConfigurationError, ManyProblemsError: they do not.
    """
    problems: list[RollgradError] = []
    reference = check_compared if teacher_kind(config) != "none" else partial(check_tokens, "ref")
    for check, name, used in (
        (reference, config.ref.model_name_or_path, reference_kind(config) != "none"),
        (partial(check_tokens, "critic"), config.critic.model_name_or_path, critic_kind(config) != "none"),
    ):
        try:
            if used and name:
                check(name, tokenizer)
        except RollgradError as error:
            problems.append(error)
    raise_together(problems)


def check_tokens(section: str, name: str, tokenizer: Any) -> None:
    """Checks that no token id stands for another token in the model `name`, of a section of settings, than in
    `tokenizer`, the actor's. Either may have tokens that the other lacks, such as one for padding, and other names of
    special tokens, which fine-tuning gives to reserved ones. A model without a tokenizer is not checked.

    Raises:
        ConfigurationError: one does.
    """
    flag = f"--{section}.model_name_or_path"
    with suppress(CheckpointError):  # a critic needs no tokenizer; a model that is not there is named when it is loaded
        its, own = _words(load_tokenizer(name, flag=flag)), _words(tokenizer)
        differing = [index for index in sorted(its.keys() & own.keys()) if its[index] != own[index]]
        if differing:
            first = differing[0]
            raise ConfigurationError(
                f"{section}.model_name_or_path is {name!r}, which has another vocabulary than the actor: "
                f"{len(differing)} tokens differ, such as token {first} ({its[first]!r}, of the actor {own[first]!r}), "
                f"so that it would read other texts than the actor writes: set {flag} to a model with the actor's "
                "tokenizer."
            )


def _words(tokenizer: Any) -> dict[int, str]:
    """Returns the tokens of texts, by their ids."""
    special = tokenizer.added_tokens_decoder
    return {index: token for token, index in tokenizer.get_vocab().items() if index not in special}
