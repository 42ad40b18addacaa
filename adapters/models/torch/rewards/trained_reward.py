"""A reward model under an optimizer, and its files: those of a sequence classifier with one label.

Invariant: the score that is trained is the one that transformers' sequence classifier (`classifier.py`) reads from the
saved model, at the last token of a text. Does not own: scoring texts by a saved model (`reward_model.py`), losses.
"""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.models.torch.forward import PackedReward
from rollgrad.adapters.models.torch.layers.classifier import sequence_classifier
from rollgrad.adapters.models.torch.loading.lora import plain_buffers, plain_weights
from rollgrad.adapters.models.torch.loading.saving import PROCESSOR_FILES, save_in_files
from rollgrad.adapters.models.torch.models import Optimize, save_averaged
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.models.torch.optimizers.optimizer_state import check_same_weights
from rollgrad.adapters.models.torch.optimizers.stored_state import opened
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import TrainedReward

HEAD = "score.weight"
"""Name of the head's weight in the files of sequence classifiers."""


class TorchReward(TorchValue, TrainedReward):
    """A language model whose vocabulary head is replaced by one score, read at a token itself.

    Args:
        model: a causal language model with packed attention installed, with adapters or without.
        tokenizer: saved beside it; its padding token ends no text.
        settings: settings of the optimizer.
        head: `weight` [1, H] to start from; without one all scores start at 0.
        gradient_checkpointing: which activations the backward pass computes again.
        offload_activations: keep what it computes them from in the machine's memory.
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
        gradient_checkpointing: Checkpointing = Checkpointing.OFF,
        offload_activations: bool = False,
        optimize: Optimize = MasterOptimizer,
    ) -> None:
        super().__init__(
            model,
            tokenizer,
            settings,
            head=head,
            gradient_checkpointing=gradient_checkpointing,
            offload_activations=offload_activations,
            optimize=optimize,
        )
        self._averages = settings.ema_beta is not None
        self._moments: tuple[float, float] | None = None
        self._parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        self._check_names()

    def set_moments(self, moments: tuple[float, float] | None) -> None:
        """Implements `TrainedReward.set_moments`."""
        self._moments = moments

    def save(self, path: Path) -> None:
        """Implements `TrainedReward.save`, with adapters merged; the model of averaged weights, if they are kept, is in
        `ema` below it, without mean and standard deviation."""

        def write(place: Path) -> None:
            self._save(place, self._moments if place == path else None)  # nobody measured the averages

        save_averaged(write, path, self._trained if self._averages else None)

    def _save(self, path: Path, moments: tuple[float, float] | None) -> None:
        head, body = self._parts()
        classifier = self._classifier(moments)

        def named() -> Iterator[dict[str, Tensor]]:
            others = {**plain_buffers(self._module), **head}
            for weights in body:
                yield self._named(weights | others, classifier)
                others = {}

        save_in_files(classifier, self._tokenizer, path, named(), writes=self._trained.first)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Implements `ValueModel.load_state_dict`.

        Raises:
            CheckpointError: the state belongs to other weights; nothing has changed.
        """
        state = opened(state)
        check_same_weights(state, self._parameters, self._trained)
        super().load_state_dict(state)

    def _classifier(self, moments: tuple[float, float] | None = None) -> Any:
        """Returns the sequence classifier that has the model's weights, without memory for them."""
        body = self._module.model
        config = copy.deepcopy(body.config)
        config.num_labels = 1
        config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        for name, number in zip(("mean", "std"), moments or (None, None), strict=True):
            if number is not None:
                setattr(config, name, number)
            elif hasattr(config, name):  # it is of the reward model from which training began
                delattr(config, name)
        with torch.device("meta"):
            classifier = sequence_classifier(config, body.dtype)
        setattr(classifier, PROCESSOR_FILES, getattr(body, PROCESSOR_FILES, {}))
        return classifier

    def _named(self, weights: Mapping[str, Tensor], classifier: Any) -> dict[str, Tensor]:
        """Returns weights and buffers by their names in the classifier's files."""
        prefix = classifier.base_model_prefix
        return {
            HEAD if name == "value_head.weight" else f"{prefix}.{name.removeprefix('model.')}": tensor
            for name, tensor in weights.items()
            if name.startswith(("model.", "value_head."))
        }

    def _check_names(self) -> None:
        """Raises `ConfigurationError` if the model cannot be saved as a sequence classifier."""
        kind = type(self._module.model).__name__
        try:
            classifier = self._classifier()
        except ValueError as error:  # transformers knows no such class
            raise _no_classifier(kind, "transformers has no sequence classifier of it") from error
        ours = {weight.name: weight.parameter for weight in plain_weights(self._module)}
        if self._named(ours | plain_buffers(self._module), classifier).keys() != classifier.state_dict().keys():
            raise _no_classifier(kind, f"{type(classifier).__name__} has other weights")


def _no_classifier(kind: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"actor.model_name_or_path is a {kind}, of which no reward model can be saved ({reason}): choose another "
        "--actor.model_name_or_path."
    )
