"""Models that recompute activations, as training has them do it."""

from typing import Any

from rollgrad.adapters.models.torch.adapter_dropout import AdapterDropout
from rollgrad.adapters.models.torch.recomputation import Recomputation, train_without_dropout
from rollgrad.application.settings.sections.actor import Checkpointing


def recompute(model: Any) -> None:
    """Has `model` compute its layers again for gradients, from now on."""
    Recomputation(model, AdapterDropout(model), Checkpointing.FULL)
    train_without_dropout(model)
