"""Checks of models that read the actor's tokens, before any model is loaded."""

from functools import partial
from typing import Any

from rollgrad.adapters.models.torch.loading.loading import refuse_classifier
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import RollgradError, raise_together
from rollgrad.entrypoints.composition.rl.algorithm import critic_kind, reference_kind, teacher_kind
from rollgrad.entrypoints.composition.rl.teacher import REFERENCE_FLAG, check_compared
from rollgrad.entrypoints.composition.vocabulary import check_tokens


def check_vocabularies(config: RLConfig, tokenizer: Any) -> None:
    """Checks that reference and critic of a run, where they are models of their own, know the actor's tokens, and that
    the reference writes texts.

    Raises:
        RollgradError: they do not; all problems together.
    """
    problems: list[RollgradError] = []

    def writes_texts(name: str, tokenizer: Any) -> None:
        refuse_classifier(name, REFERENCE_FLAG)

    reference = check_compared if teacher_kind(config) != "none" else partial(check_tokens, "ref")
    for check, name, used in (
        (writes_texts, config.ref.model_name_or_path, reference_kind(config) != "none"),
        (reference, config.ref.model_name_or_path, reference_kind(config) != "none"),
        (partial(check_tokens, "critic"), config.critic.model_name_or_path, critic_kind(config) != "none"),
    ):
        try:
            if used and name:
                check(name, tokenizer)
        except RollgradError as error:
            problems.append(error)
    raise_together(problems)
