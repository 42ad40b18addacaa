"""Models that recompute activations, as training has them do it."""

from typing import Any

from rollgrad.adapters.models.torch.adapter_dropout import AdapterDropout
from rollgrad.adapters.models.torch.recomputation import Recomputation, recompute_layers
from rollgrad.application.settings.sections.actor import Checkpointing


def recompute(model: Any) -> None:
    """Has `model` compute its layers again for gradients, from now on."""
    Recomputation(model, AdapterDropout(model), Checkpointing.FULL)
    recompute_layers(model)
