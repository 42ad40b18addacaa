"""Makes tokens and their loss weights from the messages of a conversation, for any chat template.

The template itself says where a reply begins and ends: it writes the messages before a reply with the generation prompt
(what the model is asked with), and the conversation up to the reply (what it should have answered). The text between is
the reply, up to the control token that ends its turn.

Where the template writes a reply's context otherwise once the conversation goes on (it drops earlier thinking, say), no
single text holds all replies as the model will see them. The conversation then becomes several *branches*; each reply
is trained in one of them, in the context that it has at inference.

Invariants: a text that the template wrote is tokenised once, whole; the ids are those of `TemplateCodec.render`, so
that prompts are token for token those of a rollout. Does not own: which messages are trained
(`adapters/data/examples`).
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from itertools import accumulate

from attrs import evolve, field, frozen

from rollgrad.adapters.chat.pictures import image_count
from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.chat.special_text import Guarded, unused_character
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.errors import DataError
from rollgrad.domain.ports.chat_codec import ToolSchema


class Anomaly(StrEnum):
    """Something in the tokens of a row that is worth counting."""

    NO_STOP = "no_stop_token"
    """A trained reply has no control token at its end: the model does not learn to stop there."""
    MERGED = "merged_at_the_border"
    """The tokenizer joins the prompt's last characters with the reply's first; the joint token belongs to the
    prompt."""
    OTHER_PROMPT = "context_differs_from_inference"
    """The template writes the context of a reply differently from the prompt that asks for it."""
    DOUBLE_BOS = "double_bos"
    """The text begins with two begin-of-sequence tokens."""
    STOP_OUTSIDE_MARKS = "stop_token_outside_generation_marks"
    """The template's generation marks leave out the token that ends a turn; it is trained all the same."""
    NO_REASONING = "reasoning_left_out"
    """The template does not write the reasoning_content of a trained reply."""
    NO_TEXT = "reply_text_left_out"
    """The template does not write the content of a trained reply as it is."""


@frozen(kw_only=True)
class TokenBranch:
    """`weights` holds a number for each of `token_ids`: 0 is context only. The first token's is always 0, and so are
    those of the tokens that stand for `images`."""

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]
    images: PlacedImages = ()

    @property
    def trained(self) -> int:
        """Number of tokens with a weight above 0."""
        return sum(weight > 0 for weight in self.weights)


@frozen(kw_only=True)
class TrainingTokens:
    """The branches of one row, and what was noticed in them."""

    branches: tuple[TokenBranch, ...]
    anomalies: frozenset[Anomaly] = field(default=frozenset())


@frozen
class _Turn:
    """One reply: `text` is its context and itself, up to the token that ends it; `spans` are the trained characters;
    `images`, the files of the images in it, which stand in the place of marks."""

    text: str
    spans: tuple[tuple[int, int], ...]
    weight: float
    images: tuple[bytes, ...] = ()


class TrainingText:
    """Turns conversations into tokens and weights with the template and the tokenizer of `codec`."""

    def __init__(self, codec: TemplateCodec) -> None:
        self._codec = codec
        specials = sorted(filter(None, codec.special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self._marked = re.search(r"\{%-?\s*generation\s*-?%\}", codec.template or "") is not None

    def replies(
        self, messages: Sequence[Message], weights: Sequence[float], tools: Sequence[ToolSchema] = ()
    ) -> TrainingTokens:
        """Returns the tokens of a conversation in which the replies with a weight above 0 are trained.

        Args:
            messages: the conversation.
            weights: one for each message; above 0 for assistant messages only.
            tools: schemas of the tools that the model is told of.

        Raises:
            RowError: no reply is trained, or no token of them.
            DataError: the template refuses the messages.
        """
        anomalies: set[Anomaly] = set()
        seen = [*accumulate(map(image_count, messages))]
        messages, files = self._codec.separated(messages)
        guarded = self._codec.guarded(messages, tools)
        turns = [
            evolve(self._turn(guarded, index, weight, anomalies), images=tuple(files[: seen[index]]))
            for index, weight in enumerate(weights)
            if weight > 0
        ]
        if not turns:
            raise RowError(Reason.UNTRAINED, "No reply of the conversation is trained.")
        branches = [self._branch(guarded, chain, anomalies) for chain in chains(turns)]
        return TrainingTokens(branches=tuple(branches), anomalies=frozenset(anomalies))

    def everything(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> TrainingTokens:
        """Returns the tokens of a conversation that is trained as a whole, as the template writes it at its end.

        Raises:
            DataError: the template refuses the messages.
        """
        messages, files = self._codec.separated(messages)
        guarded = self._codec.guarded(messages, tools)
        text = self._codec.apply(guarded, len(messages), generation_prompt=False)
        anomalies: set[Anomaly] = set()
        branch = self._branch(guarded, [_Turn(text, ((0, len(text)),), 1.0, tuple(files))], anomalies)
        return TrainingTokens(branches=(branch,), anomalies=frozenset(anomalies))

    def plain(self, prompt: str, completion: str, *, train_prompt: bool = False) -> TrainingTokens:
        """Returns the tokens of a text without a template, which begins and ends as the tokenizer begins and ends one.

        Args:
            prompt: its beginning, which is context; may be empty.
            completion: the rest.
            train_prompt: whether the prompt is trained as well.
        """
        token_ids, borders = self._codec.encode_ended(prompt + completion)
        anomalies: set[Anomaly] = set()
        start = 0 if train_prompt else len(prompt)
        weights = [1.0 if left >= start else 0.0 for left, _ in borders]
        if any(left < start < right for left, right in borders):
            anomalies.add(Anomaly.MERGED)
        branch = self._closed(token_ids, weights, anomalies)
        return TrainingTokens(branches=(branch,), anomalies=frozenset(anomalies))

    def judged(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], ends: Sequence[int], labels: Sequence[float]
    ) -> TrainingTokens:
        """Returns the tokens of a conversation up to the end of the last labelled step of its last message; the weight
        is 1 + the label at the last token of each step, else 0.

        Args:
            messages: the conversation.
            tools: schemas of the tools that the model is told of.
            ends: characters of the last message up to the end of each step.
            labels: one for each step.

        Raises:
            RowError: two steps end within one token, or one within the first.
            DataError: the template refuses the messages or rewrites the last one, or it spells a special token.
        """
        messages, files = self._codec.separated(messages)
        guarded = self._codec.guarded(messages, tools)
        text = self._codec.apply(guarded, len(messages), generation_prompt=False)
        content = messages[-1]["content"]
        written = content.rstrip()  # some templates leave out the line break at the end
        start = text.rfind(written)
        if guarded.messages[-1]["content"] != content or start < 0:
            raise DataError("The template does not write the steps as they are, or they spell a special token.")
        whole = len(content) if text.startswith(content, start) else len(written)
        token_ids, borders, pictured = self._codec.locate_images(guarded, text, files)
        places = [pictured.moved(start + min(end, whole)) for end in ends]
        made = self._at_ends(token_ids, borders, places, labels)
        return evolve(made, branches=(evolve(made.branches[0], images=pictured.placed(borders)),))

    def judged_plain(
        self, prompt: str, completion: str, ends: Sequence[int], labels: Sequence[float]
    ) -> TrainingTokens:
        """Returns what `judged` does, of a text without a template; `ends` are characters of the completion."""
        token_ids, borders = self._codec.encode_ended(prompt + completion)
        return self._at_ends(token_ids, borders, [len(prompt) + end for end in ends], labels)

    def _at_ends(
        self,
        token_ids: Sequence[int],
        borders: Sequence[tuple[int, int]],
        ends: Sequence[int],
        labels: Sequence[float],
    ) -> TrainingTokens:
        places = [bisect_left(borders, end, key=lambda border: border[0]) - 1 for end in ends]
        if len(set(places)) < len(places) or places[0] < 1:
            raise RowError(Reason.STEPS, "Two steps end within one token, or one within the first.")
        weights = [0.0] * (places[-1] + 1)
        for place, label in zip(places, labels, strict=True):
            weights[place] = 1.0 + label
        return TrainingTokens(
            branches=(TokenBranch(token_ids=tuple(token_ids[: len(weights)]), weights=tuple(weights)),)
        )

    def _turn(self, guarded: Guarded, index: int, weight: float, anomalies: set[Anomaly]) -> _Turn:
        text = self._codec.apply(guarded, index + 1, generation_prompt=False)
        start = self._start(guarded, index, text, anomalies)
        text, end = self._closing(guarded, index, text, start)
        if not any(match.end() == end for match in self._special.finditer(text, start)):
            anomalies.add(Anomaly.NO_STOP)
        thought = guarded.messages[index].get("reasoning_content")
        if isinstance(thought, str) and thought.strip() not in text[start:]:
            anomalies.add(Anomaly.NO_REASONING)
        content = guarded.messages[index].get("content")  # a thought in it may stand in the generation prompt
        if isinstance(content, str) and content.rpartition("</think>")[2].strip() not in text[start:end]:
            anomalies.add(Anomaly.NO_TEXT)
        spans: tuple[tuple[int, int], ...] = ((start, end),)
        if self._marked:
            spans = self._within_marks(guarded, index, (start, end), text, anomalies)
        return _Turn(text[:end], spans, weight)

    def _start(self, guarded: Guarded, index: int, text: str, anomalies: set[Anomaly]) -> int:
        """The character at which reply `index` begins in `text`, which ends with it."""
        if index > 0:
            prompt = self._codec.apply(guarded, index, generation_prompt=True)
            if text.startswith(prompt):
                return len(prompt)
            anomalies.add(Anomaly.OTHER_PROMPT)
            # The reply begins after the last mark or line that both have: `<think>` and `<tool_call>` share letters.
            shared = common_prefix(prompt, text)
            marks = [match.end() for match in self._special.finditer(text, 0, shared)]
            return max([text.rfind("\n", 0, shared) + 1, *marks])
        anomalies.add(Anomaly.OTHER_PROMPT)
        # A conversation that begins with a reply has no prompt: the reply's own text is looked for.
        mark = unused_character([guarded.messages, guarded.tools, guarded.mark or ""])
        probe = Guarded([{**guarded.messages[0], "content": mark}], guarded.tools, guarded.mark, guarded.texts)
        written = self._codec.apply(probe, 1, generation_prompt=False)
        return common_prefix(written, text)

    def _closing(self, guarded: Guarded, index: int, text: str, start: int) -> tuple[str, int]:
        """`text`, which the template ends with reply `index`, with the token that closes the turn, and its end."""
        ending, length = self._ending
        if length and text.endswith(ending) and len(text) - len(ending) >= start:
            return text, len(text) - len(ending) + length
        found = [match.end() for match in self._special.finditer(text, start)]
        if found and not text[found[-1] :].strip():
            return text, found[-1]
        # Some templates (GLM) end a turn with the token that begins the next one, which is what the model samples.
        following = self._following(guarded, index, text)
        return text + following, len(text + following)

    def _following(self, guarded: Guarded, index: int, text: str) -> str:
        """The control token that the template writes directly after reply `index`; empty without one."""
        following = guarded.messages[index + 1 : index + 2]
        if following:
            whole = self._codec.apply(guarded, index + 2, generation_prompt=False)
            match = self._special.match(whole, len(text)) if whole.startswith(text) else None
            if match or following[0]["role"] != "user":
                return match.group() if match else ""
        match = self._special.match(self._turns[1])
        return match.group() if match else ""

    @cached_property
    def _ending(self) -> tuple[str, int]:
        """Returns the text of the template after a last reply, and how much of it ends the turn.

        A model does not sample the text that some templates write only at the end of a conversation (Phi-3's eos): the
        token that ends the turn is the last one that stands there as well when the user goes on.
        """
        last, between = self._turns
        shared = [match.end() for match in self._special.finditer(last, 0, common_prefix(last, between))]
        if shared:
            return last, shared[-1]
        match = self._special.search(last)  # gpt-oss ends another turn with another token
        return last, match.end() if match else 0

    @cached_property
    def _turns(self) -> tuple[str, str]:
        """Returns the text of the template after a last reply, and between a reply and the user's next message."""
        mark = unused_character([])
        user, reply = {"role": "user", "content": mark}, {"role": "assistant", "content": mark}
        try:
            last = self._codec.apply(Guarded([user, reply], []), 2, generation_prompt=False)
            whole = self._codec.apply(Guarded([user, reply, user], []), 3, generation_prompt=False)
        except DataError:  # the template wants other roles
            return "", ""
        return last.rpartition(mark)[2], whole.split(mark)[2]

    def _within_marks(
        self, guarded: Guarded, index: int, turn: tuple[int, int], text: str, anomalies: set[Anomaly]
    ) -> tuple[tuple[int, int], ...]:
        """The part of a turn between the template's `{% generation %}` marks, and the token that ends the turn."""
        start, end = turn
        marked = self._codec.generation_spans(guarded, index + 1)
        spans = [(max(start, left), min(end, right)) for left, right in marked if right > start and left < end]
        stops = [match for match in self._special.finditer(text, start, end) if match.end() == end]
        if stops and not any(left < end <= right for left, right in spans):
            anomalies.add(Anomaly.STOP_OUTSIDE_MARKS)
            spans.append((stops[-1].start(), end))
        return tuple(spans)

    def _branch(self, guarded: Guarded, turns: Sequence[_Turn], anomalies: set[Anomaly]) -> TokenBranch:
        """The tokens of the longest of `turns`, which holds the others."""
        token_ids, borders, whole = self._codec.locate_images(guarded, turns[0].text, turns[0].images)
        images = whole.placed(borders)
        weights = [0.0] * len(token_ids)
        for turn in turns:
            for left, right in (tuple(map(whole.moved, span)) for span in turn.spans):
                first = bisect_left(borders, left, key=lambda border: border[0])
                if first and borders[first - 1][1] > left:
                    anomalies.add(Anomaly.MERGED)
                for place in range(first, len(borders)):
                    if borders[place][1] > right:
                        break
                    weights[place] = turn.weight
        for placed in images:
            weights[placed.start : placed.stop] = [0.0] * (placed.stop - placed.start)
        return evolve(self._closed(token_ids, weights, anomalies), images=images)

    def _closed(self, token_ids: Sequence[int], weights: list[float], anomalies: set[Anomaly]) -> TokenBranch:
        bos = self._codec.bos_token_id
        if bos is not None:
            if list(token_ids[:2]) == [bos, bos]:
                anomalies.add(Anomaly.DOUBLE_BOS)
            for place in range(len(weights)):
                if token_ids[place] != bos:
                    break
                weights[place] = 0.0  # nothing samples the beginning of a sequence
        if weights:
            weights[0] = 0.0  # nothing predicts the first token
        if not any(weights):
            raise RowError(Reason.UNTRAINED, "No token of it is trained.")
        return TokenBranch(token_ids=tuple(token_ids), weights=tuple(weights))


def chains(turns: Sequence[_Turn]) -> list[list[_Turn]]:
    """Divides turns, given in the order of the conversation, into as few lists as possible in each of which the first
    turn's text begins with those of all others; each turn is in one of them."""
    waiting = list(reversed(turns))
    divided: list[list[_Turn]] = []
    while waiting:
        head = waiting[0].text
        divided.append([turn for turn in waiting if head.startswith(turn.text)])
        waiting = [turn for turn in waiting if not head.startswith(turn.text)]
    return divided[::-1]


def common_prefix(first: str, second: str) -> int:
    """Characters that both texts begin with."""
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)


def shared_prompt(branches: Sequence[TokenBranch]) -> int:
    """Tokens that all branches begin with and none trains, at least 1: what a forward pass computes once."""
    untrained = min(next(place for place, weight in enumerate(b.weights) if weight > 0) for b in branches)
    first = branches[0].token_ids
    for place in range(untrained):
        if any(branch.token_ids[place] != first[place] for branch in branches):
            return max(1, place)
    return untrained
