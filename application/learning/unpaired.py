"""Learning from labelled replies: the distance from the reference that KTO compares with, for each optimizer step.

It is measured on mismatched replies: each prompt of the step with a completion to another (`mismatches`). Their
log-probs under the reference are computed once for all coming steps, and kept; of streamed replies in each step.
Invariant: the distance is that of the whole step, over all processes, however the step is divided.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import structlog
import torch
from attrs import evolve
from torch import Tensor

from rollgrad.application.learning.examples import ExampleLearner, Pack
from rollgrad.application.learning.reference import LiveReference, trained_logprobs
from rollgrad.application.learning.scores import CHUNK
from rollgrad.domain.algorithms.losses.unpaired import UnpairedObjective, reference_point
from rollgrad.domain.batches.examples import mismatched, mismatches, other_completion, pack_labels
from rollgrad.domain.episodes.examples import Label
from rollgrad.domain.errors import DataError
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.domain.ports.models import PolicyModel, ReferenceModel
from rollgrad.domain.ports.score_store import ScoreStore

log = structlog.get_logger(__name__)

Places = tuple[int, int]
"""Places of two labels: of the prompt, and of the completion put after it."""


class PromptedLabels(ExampleSource[Label], Protocol):
    """Labels, each with its index as its `place`, whose prompts can be compared without reading images."""

    def prompt_key(self, index: int) -> bytes:
        """Returns the `prompt_key` of the reply of label `index`."""
        ...


class PlacedLabels(PromptedLabels):
    """A caller's own labels, whatever the caller wrote as their `place`."""

    def __init__(self, labels: ExampleSource[Label]) -> None:
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Label:
        return evolve(self._labels[index], place=index)

    def prompt_key(self, index: int) -> bytes:
        """Implements `PromptedLabels.prompt_key`."""
        return self._labels[index].reply.prompt_key


def mismatched_references(
    labels: PromptedLabels,
    steps: Iterable[Sequence[int]],
    make_reference: Callable[[], ReferenceModel],
    store: ScoreStore,
    *,
    key: str,
    max_tokens: int,
    longest: int | None = None,
    shares: int = 1,
    name: str = "the labels",
) -> dict[Places, float]:
    """Returns the log-prob under a reference of each mismatched completion of the coming steps.

    Args:
        labels: labels by index.
        steps: indices of the labels of each step, in their order.
        make_reference: loads the reference; not called if all log-probs are kept.
        store: where they are kept, each as (prompt, completion, log-prob), whatever the steps that asked for it.
        key: key of the reference, the labels and `longest`.
        max_tokens: token budget of one forward pass.
        longest: largest number of tokens of a mismatched reply, as in `mismatched`.
        shares: number of equal shares of the budget, as in `split`.
        name: says in the log which labels they are.
    """
    kept = store.load(key)
    known = {(int(prompt), int(completion)): logprob for prompt, completion, logprob in (row.tolist() for row in kept)}
    needed = dict.fromkeys(
        places for indices in steps for places in _places(indices, [labels.prompt_key(index) for index in indices])
    )
    missing = [places for places in needed if places not in known]
    if missing:
        log.info(f"computing the reference's log-probs of {name} mismatched", replies=len(missing), kept=len(known))
        reference = make_reference()
        for start in range(0, len(missing), CHUNK):
            chunk = missing[start : start + CHUNK]
            replies = [
                other_completion(labels[prompt].reply, labels[completion].reply, longest=longest)
                for prompt, completion in chunk
            ]
            found = trained_logprobs(reference, [(reply,) for reply in replies], max_tokens, shares)
            sums = _sums(found)
            rows = [
                torch.tensor([*places, logprob], dtype=torch.float64)
                for places, logprob in zip(chunk, sums, strict=True)
            ]
            store.append(key, len(kept) + start, rows)
            known.update(zip(chunk, sums, strict=True))
    return {places: known[places] for places in needed}


def _places(places: Sequence[int], prompts: Sequence[bytes]) -> list[Places]:
    """Returns the places of each prompt of a step and of the completion put after it."""
    return [(place, places[other]) for place, other in zip(places, mismatches(prompts), strict=True)]


def _sums(logprobs: Iterable[Tensor]) -> list[float]:
    return [float(logprobs_A.double().sum()) for logprobs_A in logprobs]


class UnpairedLearner(ExampleLearner[Label]):
    """Trains a language model on labelled replies, each step with its own distance from the reference.

    Args:
        model: a language model.
        objective: the loss, whose `kl` is set for each step.
        references: log-probs of mismatched completions under the reference, or the reference itself; None if the loss
            has no such distance.
        max_tokens: token budget of one micro-batch.
        shares: number of equal shares of it, as in `split`.
        longest: largest number of tokens of a mismatched reply, as in `mismatched_references`.
        pack: makes the batch of an optimizer step.
    """

    def __init__(
        self,
        model: PolicyModel,
        *,
        objective: UnpairedObjective,
        references: Mapping[Places, float] | LiveReference | None,
        max_tokens: int,
        shares: int = 1,
        longest: int | None = None,
        pack: Pack[Label] = pack_labels,
    ) -> None:
        super().__init__(model, pack=pack, objective=objective, max_tokens=max_tokens, shares=shares)
        self._policy = model
        self._unpaired = objective
        self._references = references
        self._longest = longest

    def objective_for(self, examples: Sequence[Label]) -> UnpairedObjective:
        """Returns the loss of a batch, with the distance from the reference that its mismatched replies have.

        Raises:
            DataError: a stream had one reply alone for it, which no other prompt takes.
        """
        references = self._references
        if references is None:
            return self._unpaired
        replies = [(reply,) for reply in mismatched(examples, longest=self._longest)]
        if isinstance(references, LiveReference):
            if len(examples) < 2:
                raise DataError(
                    "Of the rows of a step one alone can be used, but kto puts each reply behind another's prompt: the "
                    "warnings say why; mend the rows, or raise --train.batch_size."
                )
            expected = _sums(references.logprobs(replies))
        else:
            prompts = [label.reply.prompt_key for label in examples]
            expected = [references[places] for places in _places([label.place for label in examples], prompts)]
        found = _sums(trained_logprobs(self._policy, replies, self._max_tokens, self._shares))
        ratios_S = torch.tensor(found, dtype=torch.float64) - torch.tensor(expected, dtype=torch.float64)
        return evolve(self._unpaired, kl=reference_point(ratios_S))
