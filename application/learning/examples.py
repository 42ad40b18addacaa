"""Learning from examples: a batch of them becomes one optimizer step, or is measured without one.

Does not own: the order in which examples come (`application/pipelines/epochs`), nor losses.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

from torch import Tensor

from rollgrad.application.learning.microbatch import split
from rollgrad.domain.batches.examples import ExampleBatch
from rollgrad.domain.batches.metrics import joined
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.ports.checkpoint_store import CheckpointStore
from rollgrad.domain.ports.models import PolicyModel, PolicyObjective, ValueModel, ValueObjective

Example = TypeVar("Example")

Pack = Callable[[Sequence[Example]], ExampleBatch]
"""Lays the examples of a whole optimizer step end to end, with their weights in it, which add up to 1."""


class ExampleLearner(Generic[Example]):
    """Trains a model on examples; the `TrainedModels` of a run.

    Args:
        model: a language model, or one with a scalar head (a reward model).
        pack: makes the batch of an optimizer step.
        objective: the loss, of the model's log-probs or of its values; its metrics say how they are combined.
        max_tokens: token budget of one micro-batch.
        shares: number of equal shares of it, one for each process or group of them that has a copy of the model.
    """

    under_way = False
    """An update is one optimizer step: it is never half done."""

    @overload
    def __init__(
        self,
        model: PolicyModel,
        *,
        pack: Pack[Example],
        objective: PolicyObjective[ExampleBatch],
        max_tokens: int,
        shares: int = 1,
    ) -> None: ...

    @overload
    def __init__(
        self,
        model: ValueModel,
        *,
        pack: Pack[Example],
        objective: ValueObjective[ExampleBatch],
        max_tokens: int,
        shares: int = 1,
    ) -> None: ...

    def __init__(self, model: Any, *, pack: Pack[Example], objective: Any, max_tokens: int, shares: int = 1) -> None:
        self._model = model
        self._scores = model.score if isinstance(model, PolicyModel) else model.values
        self._pack = pack
        self._objective = objective
        self._max_tokens = max_tokens
        self._shares = shares

    def learn(self, examples: Sequence[Example]) -> dict[str, float]:
        """Takes one optimizer step; returns its metrics, as `train/name`.

        Raises:
            NonFiniteUpdateError: the loss or the gradient is not finite; nothing has changed.
            ExplodedWeightsError: nothing can be computed with the weights that the step has made.
        """
        batch = self._pack(examples)
        metrics = self._model.update(self._passes(batch), self.objective_for(examples))
        counts = {"tokens": float(batch.token_count), "trained_tokens": float(batch.action_mask_N.sum())}
        return {f"train/{name}": float(value) for name, value in (metrics | counts).items()}

    def objective_for(self, examples: Sequence[Example]) -> Any:
        """Returns the loss of a batch of `examples`; here it is that of every batch."""
        return self._objective

    def parts(self, examples: Sequence[Example]) -> Sequence[ExampleBatch]:
        """Returns the micro-batches of `examples`, with the weights that they have in all of them together."""
        return self._passes(self._pack(examples))

    def portions(self, sets: Sequence[Sequence[Example]]) -> list[list[tuple[ExampleBatch, ExampleBatch]]]:
        """Returns the micro-batches of each of several sets of examples, twice: with the weights that its examples have
        in all sets together, and with those that they have in their own."""
        whole, start = self._pack([example for examples in sets for example in examples]), 0
        portions = []
        for examples in sets:
            alone = self._pack(examples)
            within = whole.select(range(start, start + len(alone)))
            portions.append(list(zip(self._passes(within), self._passes(alone), strict=True)))
            start += len(alone)
        return portions

    def measure_alike(self, parts: Sequence[ExampleBatch], objective: Any = None) -> list[Mapping[str, Tensor | float]]:
        """Returns the loss and the objective's metrics of each of several micro-batches that differ in weights alone;
        `objective` is that for all of the `parts`, by default the loss of every batch."""
        scores = self._scores(parts[0])
        outputs = [(objective or self._objective)(scores, part) for part in parts]
        return [{"loss": output.loss, **output.metrics} for output in outputs]

    def _passes(self, batch: ExampleBatch) -> Passes[ExampleBatch]:
        return split(batch, self._max_tokens, self._shares, padded=self._model.padded())

    def save(self, checkpoints: CheckpointStore, name: str) -> None:
        """Writes the model under `name`."""
        checkpoints.save_model(self._model, name)

    def state_dict(self) -> dict[str, Any]:
        """Returns the model's weights and its optimizer's state."""
        return {"policy": self._model.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        self._model.load_state_dict(state["policy"])


def together(parts: Sequence[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Returns the metrics of all micro-batches together."""
    return {name: float(value) for name, value in joined(parts).items()}
