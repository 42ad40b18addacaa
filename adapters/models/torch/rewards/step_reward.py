"""A process reward model: the probability that each step of a reply is right, from what the model says after it.

Invariant: a step is judged as it was trained: its text and the separator stand after the prompt and the steps before
it, and the model compares its two reward tokens at the last token. Does not own: training.
"""

import math
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.adapters.models.torch.loading.compatibility import usable_positions
from rollgrad.adapters.models.torch.rewards.reward_text import needs_bos, special_tokens
from rollgrad.adapters.models.torch.rewards.together import Divide, PassesTogether
from rollgrad.application.foreign import shown
from rollgrad.application.learning.microbatch import split
from rollgrad.application.settings.sections.reward import REWARD_TOKENS, StepReward
from rollgrad.domain.batches.examples import pack_sequences
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.examples import WeightedTokens
from rollgrad.domain.episodes.rewards import RewardInput
from rollgrad.domain.errors import RewardError

OF_STEPS: Mapping[StepReward, Callable[[Sequence[float]], float]] = {
    StepReward.MIN: min,
    StepReward.PRODUCT: math.prod,
    StepReward.LAST: lambda steps: steps[-1],
    StepReward.MEAN: lambda steps: math.fsum(steps) / len(steps),
}


@frozen
class _Steps:
    """Tokens of a reply and what stands before it, and the place of the last one of each step."""

    tokens: list[int]
    places: list[int]
    truncated: bool

    def row(self) -> WeightedTokens:
        """Returns the sequence whose steps are judged."""
        weights_T = torch.zeros(len(self.tokens))
        weights_T[self.places] = 1.0
        return WeightedTokens(token_ids_T=torch.tensor(self.tokens), weights_T=weights_T, prompt_length=self.places[0])

    def of_each(self, judged: Sequence[float]) -> tuple[float, ...]:
        """Returns the number of each step, of those of the places; a token may end two steps."""
        found = dict(zip(sorted(set(self.places)), judged, strict=True))
        return tuple(found[place] for place in self.places)


def _packed(rows: Sequence[WeightedTokens]) -> PackedBatch:
    return pack_sequences(rows, group_ids=range(len(rows)), sample_ids=[0] * len(rows))


class StepRewardModel:
    """Judges the steps of replies with a causal language model.

    Args:
        model: a model in eval mode, with packed attention installed.
        tokenizer: fast tokenizer of the model.
        outcomes: ids of the tokens for a step that is right, and for one that is wrong.
        separator: text that ends a step.
        reward: how the steps become one reward; a reply without steps has 0.
        batch_tokens: tokens of a forward pass; a longer text has one of its own.
        divide: divides the model over processes, all of which then judge at the same time.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        outcomes: tuple[int, int],
        *,
        separator: str = "\n",
        reward: StepReward = StepReward.MIN,
        batch_tokens: int = REWARD_TOKENS,
        divide: Divide | None = None,
    ) -> None:
        self._passes = PassesTogether(PackedLM(model.requires_grad_(False), outcomes=outcomes), divide)
        self._tokenizer = tokenizer
        self._special = re.compile("|".join(map(re.escape, special_tokens(tokenizer))))
        self._separator = separator
        self._reward = OF_STEPS[reward]
        self._batch_tokens = batch_tokens
        self._positions = usable_positions(model.config) or sys.maxsize

    @torch.no_grad()
    def judge(self, replies: Sequence[RewardInput]) -> list[tuple[float, bool, tuple[float, ...]]]:
        """Returns for each reply its reward, whether the beginning of its text was left out because it is longer than
        the model's positions, and the probabilities of the steps that were read."""
        with self._passes.made_by_all(_packed([_Steps(tokens=[0, 0], places=[1], truncated=False).row()])):
            texts = [self._encoded(reply) for reply in replies]
            rows = [text.row() for text in texts if text.places]
            passes = split(_packed(rows), self._batch_tokens) if rows else ()
            odds = [self._passes(part)[2].float().cpu() for part in passes]
        odds_A = torch.cat([*odds, torch.empty(0)])
        judged = iter(odds_A.sigmoid().split_with_sizes([row.trained_length for row in rows]))
        found = []
        for text in texts:
            steps = text.of_each(next(judged).tolist()) if text.places else ()
            found.append((self._reward(steps) if steps else 0.0, text.truncated, steps))
        return found

    def _encoded(self, reply: RewardInput) -> _Steps:
        pieces = [piece for piece in reply.reply.split(self._separator) if piece.strip()]
        text = self._before(reply)
        ends = []
        for piece in pieces:
            text += piece + self._separator
            ends.append(len(text))
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens, starts = list(encoded["input_ids"]), [start for start, _ in encoded["offset_mapping"]]
        if needs_bos(tokens, self._tokenizer):
            tokens, starts = [self._tokenizer.bos_token_id, *tokens], [0, *starts]
        cut = max(0, len(tokens) - self._positions)
        places = [bisect_left(starts, end) - 1 - cut for end in ends]
        # A step is judged after something that was read.
        return _Steps(tokens=tokens[cut:], places=[place for place in places if place > 0], truncated=cut > 0)

    def _before(self, reply: RewardInput) -> str:
        """Returns the text before the reply. Special tokens are in the text alone: one that was sampled would part the
        reply, and a short reply may be a part of the name of the one that ends it."""
        ends = [0, *(match.end() for match in self._special.finditer(reply.text))]
        starts = [*(match.start() for match in self._special.finditer(reply.text)), len(reply.text)]
        places = [place for end, start in zip(ends, starts, strict=True) for place in range(end, start)]
        found = "".join(reply.text[place] for place in places).rfind(reply.reply)
        if found < 0:
            raise RewardError(f"The text does not have the reply whose steps are to be judged ({shown(reply.reply)}).")
        return reply.text[: places[found]] if found < len(places) else reply.text
