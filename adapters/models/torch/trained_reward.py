"""A reward model under an optimizer, and its files: those of a sequence classifier with one label.

Invariant: the score that is trained is the one that `AutoModelForSequenceClassification` reads from the saved model, at
the last token of a text. Does not own: scoring texts with a saved model (`reward_model.py`), nor losses.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.models.torch.forward import PackedReward
from rollgrad.adapters.models.torch.lora import plain_buffers, plain_weights
from rollgrad.adapters.models.torch.models import (
    Optimize,
    TorchValue,
    check_same_weights,
    copied_weights,
    save_averaged,
    train_without_dropout,
    weight_values,
)
from rollgrad.adapters.models.torch.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.models.torch.saving import save_pretrained
from rollgrad.domain.batches.packed import Batch
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import TrainedReward, ValueObjective

HEAD = "score.weight"
"""Name of the head's weight in the files of sequence classifiers."""


class TorchReward(TorchValue, TrainedReward):
    """A language model whose vocabulary head is replaced by one score, read at a token itself.

    Args:
        model: a causal language model with packed attention installed, with adapters or without.
        tokenizer: saved beside it; its padding token ends no text.
        settings: of the optimizer.
        head: `weight` [1, H] to start from; without one all scores start at 0.
        gradient_checkpointing: recompute activations in the backward pass.
        optimize: puts the model under an optimizer.

    Raises:
        ConfigurationError: transformers has no sequence classifier with the model's weights.
    """

    packed = PackedReward

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: OptimizerSettings,
        *,
        head: Mapping[str, Tensor] | None = None,
        gradient_checkpointing: bool = False,
        optimize: Optimize = MasterOptimizer,
    ) -> None:
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        super().__init__(model, tokenizer, settings, head=head, optimize=optimize)
        self._checkpointing = gradient_checkpointing
        self._averages = settings.ema_beta is not None
        self._moments: tuple[float, float] | None = None
        self._parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        self._check_names()

    def set_moments(self, moments: tuple[float, float] | None) -> None:
        """Implements `TrainedReward.set_moments`."""
        self._moments = moments

    def update(self, micro_batches: Sequence[Batch], objective: ValueObjective[Batch]) -> dict[str, float]:
        """Implements `ValueModel.update`."""
        if self._checkpointing:
            train_without_dropout(self._module)
        try:
            return super().update(micro_batches, objective)
        finally:
            self._module.eval()

    def save(self, path: Path) -> None:
        """Implements `TrainedReward.save`, with adapters merged; the model of averaged weights, if they are kept, is in
        `ema` below it, without mean and standard deviation."""

        def write(place: Path) -> None:
            self._save(place, self._moments if place == path else None)  # nobody measured the averages

        save_averaged(write, path, self._trained if self._averages else None)

    def _save(self, path: Path, moments: tuple[float, float] | None) -> None:
        trained = self._trained
        weights = copied_weights(weight_values(plain_weights(self._module), trained), keep=trained.first)
        if trained.first:
            classifier = self._classifier(moments)
            save_pretrained(classifier, self._tokenizer, path, self._named(weights, classifier))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Implements `ValueModel.load_state_dict`.

        Raises:
            CheckpointError: the state belongs to other weights; nothing has changed.
        """
        check_same_weights(state, self._parameters, self._trained)
        super().load_state_dict(state)

    def _classifier(self, moments: tuple[float, float] | None = None) -> Any:
        """Returns the sequence classifier that has the model's weights, without memory for them."""
        from transformers import AutoModelForSequenceClassification

        config = copy.deepcopy(self._module.model.config)
        config.num_labels = 1
        config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        for name, number in zip(("mean", "std"), moments or (None, None), strict=True):
            if number is not None:
                setattr(config, name, number)
            elif hasattr(config, name):  # that of the reward model which training began with
                delattr(config, name)
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config, dtype=self._module.model.dtype)

    def _named(self, weights: Mapping[str, Tensor], classifier: Any) -> dict[str, Tensor]:
        """Returns weights, and what else a checkpoint has, by their names in the classifier's files."""
        prefix = classifier.base_model_prefix
        named = {
            f"{prefix}.{name.removeprefix('model.')}": tensor
            for name, tensor in {**weights, **plain_buffers(self._module)}.items()
            if name.startswith("model.")
        }
        return named | {HEAD: weights["value_head.weight"]}

    def _check_names(self) -> None:
        """Raises `ConfigurationError` if the model cannot be saved as a sequence classifier."""
        kind = type(self._module.model).__name__
        try:
            classifier = self._classifier()
        except ValueError as error:  # transformers knows no such class
            raise _no_classifier(kind, "transformers has no sequence classifier of it") from error
        ours = {weight.name: weight.parameter for weight in plain_weights(self._module)}
        if self._named(ours, classifier).keys() != classifier.state_dict().keys():
            raise _no_classifier(kind, f"{type(classifier).__name__} has other weights")


def _no_classifier(kind: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"actor.model_name_or_path is a {kind}, of which no reward model can be saved ({reason}): choose another "
        "--actor.model_name_or_path."
    )
