"""Checks of what tokens mean to the tokenizers of a run's models."""

from contextlib import suppress
from typing import Any

from rollgrad.adapters.models.torch.loading.loading import load_tokenizer
from rollgrad.domain.errors import CheckpointError, ConfigurationError


def check_vocabulary(teacher: Any, student: Any, name: str, *, flag: str, otherwise: str = "") -> None:
    """Checks that a token means the same to both tokenizers. `flag` names the teacher; `otherwise` is what else there
    is to do.

    Raises:
        ConfigurationError: their vocabularies differ.
    """
    its, own = teacher.get_vocab(), student.get_vocab()
    if its == own:
        return
    differing = sorted(token for token in its.keys() | own.keys() if its.get(token) != own.get(token))
    example = differing[0]
    raise ConfigurationError(
        f"The teacher {name!r} has another vocabulary than the actor: {len(differing)} tokens differ, such as "
        f"{example!r} (token {its.get(example, 'none')} of the teacher, {own.get(example, 'none')} of the actor), so "
        f"that their predictions cannot be compared: set {flag} to a model with the actor's tokenizer{otherwise}."
    )


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


def reward_token_ids(
    reward_tokens: tuple[str, str], tokenizer: Any, *, setting: str = "prm.reward_tokens"
) -> tuple[int, int]:
    """Returns the ids of the tokens for right and wrong, which `setting` names.

    Raises:
        ConfigurationError: one of them is not a token of its own, or both are the same.
    """
    found = [tokenizer(token, add_special_tokens=False)["input_ids"] for token in reward_tokens]
    for token, ids in zip(reward_tokens, found, strict=True):
        if len(ids) != 1:
            raise ConfigurationError(
                f"{setting} has {token!r}, which the tokenizer writes as {len(ids)} tokens: set --prm.reward_tokens of "
                "`train prm` to texts that are one token each."
            )
    (right,), (wrong,) = found
    if right == wrong:
        raise ConfigurationError(
            f"{setting} {reward_tokens} are one token for the tokenizer: set --prm.reward_tokens of `train prm` to two."
        )
    return right, wrong


def _words(tokenizer: Any) -> dict[int, str]:
    """Returns the tokens of texts, by their ids."""
    special = tokenizer.added_tokens_decoder
    return {index: token for token, index in tokenizer.get_vocab().items() if index not in special}
