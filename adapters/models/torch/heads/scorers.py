"""Scorers read hidden states by the head of a vocabulary: log-probs, the most likely tokens, or two tokens alone."""

from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from rollgrad.adapters.models.torch.heads.allowed_tokens import AllowedTokens
from rollgrad.adapters.models.torch.heads.chunked_logprobs import token_logprobs
from rollgrad.adapters.models.torch.heads.distillation import (
    DistillationSettings,
    Targets,
    distilled_logprobs,
    likely_tokens,
)
from rollgrad.adapters.models.torch.heads.logits import PLAIN_LOGITS, WHOLE_VOCABULARY, LogitForm
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.domain.algorithms.losses.centering import SamplerHead, ScoreCentering


class Scorer(nn.Module):
    """Computes log-probs from the vocabulary's head. The head remains a child of the model alone: torch would count the
    parameters of a module with two parents twice."""

    def __init__(
        self,
        head: Any,
        temperature: float,
        form: LogitForm = PLAIN_LOGITS,
        *,
        correct: bool = False,
        mean: bool = True,
        collision: bool = False,
        centering: ScoreCentering | None = None,
    ) -> None:
        super().__init__()
        self._correct, self._mean, self._collision = correct, mean, collision
        self._centering = centering
        self._head = (head,)
        self._form = form
        self._temperature = temperature
        self.vocabulary = WHOLE_VOCABULARY
        """The rows of the head that this process has."""

    @property
    def head(self) -> Any:
        """Output embedding of the model."""
        return self._head[0]

    def forward(
        self,
        hidden_AH: Tensor,
        targets_A: Tensor,
        teacher: Targets | None = None,
        settings: DistillationSettings | None = None,
        *,
        allowed: AllowedTokens | None = None,
        sampler: SamplerHead | None = None,
        collision: bool = True,
    ) -> tuple[Tensor, ...]:
        """Returns (logprobs_A, entropy_A), and correct_A, mean_A and, unless it is left out here, collision_A if they
        were asked for; with a `teacher` the columns of `distilled_logprobs`. Where only some tokens were `allowed`, the
        first two are of these. The last ones are those of `CentredScores`, if the scores are centred and the `sampler`
        is known."""
        head = self.head
        if teacher is not None and settings is not None:
            return distilled_logprobs(
                hidden_AH,
                head.weight,
                head.bias,
                targets_A,
                teacher,
                settings,
                self._form,
                self._temperature,
                self.vocabulary,
            )
        centering = None if sampler is None else self._centering
        columns = token_logprobs(
            hidden_AH,
            head.weight,
            head.bias,
            targets_A,
            self._temperature,
            self.vocabulary,
            self._form,
            correct=self._correct,
            mean=self._mean,
            collision=self._collision and collision,
            allowed=allowed,
            also_AK=None if centering is None or sampler is None else sampler.ids_AK,
        )
        if centering is None or sampler is None:
            return columns
        *columns_A, also_AK = columns
        centred = centering(also_AK, sampler)
        return *columns_A, centred.term_A, centred.policy_mass_A, centred.residual_A

    def likely(self, hidden_AH: Tensor, top_k: int, size: int | None) -> tuple[Tensor, Tensor]:
        """Returns what `likely_tokens` does of hidden states."""
        settings = DistillationSettings(temperature=self._temperature, top_k=top_k)
        head = self.head
        return likely_tokens(hidden_AH, head.weight, head.bias, settings, self._form, self.vocabulary, size)


class OutcomeScorer(Scorer):
    """Compares two tokens, `outcomes`, as what the model says next: a process reward model's judgement of a step."""

    def __init__(self, head: Any, outcomes: tuple[int, int], form: LogitForm = PLAIN_LOGITS) -> None:
        super().__init__(head, 1.0, form)
        self._outcomes = outcomes

    def forward(self, hidden_AH: Tensor, targets_A: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        """Returns (logprobs_A, entropy_A, odds_A) of the softmax of the two logits: the log-prob of the first, the
        entropy, and the difference of the logits, in float32."""
        odds_A = self._odds(hidden_AH) if self.vocabulary.group is None else self._odds_of_shares(hidden_AH)
        first_A, second_A = logsigmoid(odds_A), logsigmoid(-odds_A)
        return first_A, -(first_A.exp() * first_A + second_A.exp() * second_A), odds_A

    def _odds(self, hidden_AH: Tensor) -> Tensor:
        index = to_device(torch.tensor(self._outcomes), hidden_AH.device)
        rows, bias = self.head.weight[index].float(), self.head.bias
        logits_A2 = self._form.logits(hidden_AH.float(), rows, None if bias is None else bias[index].float())
        return logits_A2[:, 0] - logits_A2[:, 1]

    def _odds_of_shares(self, hidden_AH: Tensor) -> Tensor:
        """Returns the odds where processes divide the vocabulary: the difference of two log-probs, whose normaliser is
        the same."""
        count, form = len(hidden_AH), evolve(self._form, float32=True)
        targets = to_device(torch.tensor(self._outcomes), hidden_AH.device).repeat_interleave(count)
        logprobs, _ = token_logprobs(
            hidden_AH.repeat(2, 1), self.head.weight, self.head.bias, targets, 1.0, self.vocabulary, form
        )
        return logprobs[:count] - logprobs[count:]
