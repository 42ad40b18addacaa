"""Decides whether clients may prescribe the form of replies in a training run, which models then follow when they
compute log-probs."""

from collections.abc import Callable, Sequence

from rollgrad.adapters.engines.embedded.grammars import Grammars
from rollgrad.adapters.models.torch.heads.allowed_tokens import Masks
from rollgrad.application.episodes.chat_service import UNPRESCRIBED
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.train import PartialRollout
from rollgrad.entrypoints.composition.rl.algorithm import reference_kind, teacher_kind

FOLLOWERS = ("engine", "policy", "reference")
"""Adapters that must follow a form alike, which those of the caller need not do."""


def unprescribed(config: RLConfig, brought: Sequence[str]) -> str | None:
    """Returns the refusal of forms of replies; None where clients may prescribe them. `brought` are adapters of the
    caller."""
    reasons = {
        # vLLM would follow the form from its beginning, wherever the reply that goes on is in it.
        "train.partial_rollout recompute": config.rollout.engine is not Engine.EMBEDDED
        and config.train.partial_rollout is PartialRollout.RECOMPUTE,
        "algo.kl.estimator full": teacher_kind(config) != "none",
        "ref.url or ref.urls": reference_kind(config) == "served",
        **{f"an adapter of one's own ({name})": name in brought for name in FOLLOWERS},
    }
    found = [reason for reason, applies in reasons.items() if applies]
    return UNPRESCRIBED.format(f" with {' and '.join(found)}") if found else None


def make_masks(config: RLConfig, brought: Sequence[str], grammars: Callable[[], Grammars]) -> Masks | None:
    """Returns what follows the forms of replies for the models that are trained; None where there are none."""
    return None if unprescribed(config, brought) is not None else grammars().masks
