"""`Preparer`: one row to tokens and weights, or the reason why not.

Does not own: reading rows and keeping what they become (`preparation`), what rows say (`formats`), nor how templates
write (`adapters/chat/training_text`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import evolve, field, frozen

from rollgrad.adapters.chat.image_files import image_bytes
from rollgrad.adapters.chat.image_text import known_images
from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.chat.training_text import Anomaly, TokenBranch, TrainingText, TrainingTokens
from rollgrad.adapters.data.examples.formats import read_row
from rollgrad.adapters.data.examples.recognition import ReadingSettings
from rollgrad.adapters.data.examples.rows import Conversation, Labelled, Pair, PlainText, Pretokenised, Steps, broken
from rollgrad.application.settings.sections.examples import ExampleFormat, LongRows
from rollgrad.domain.errors import ConfigurationError, DataError, ImageError


@frozen(kw_only=True)
class PreparationSettings:
    """Settings of making tokens from rows: how rows are parsed, the longest branch, the treatment of longer ones, and
    the template's variables."""

    reading: ReadingSettings = field(factory=ReadingSettings)
    max_tokens: int = 4096
    overlong: LongRows = LongRows.DROP
    template_kwargs: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class PreparedRow:
    """A row that can be trained on: its branches (of a pair the chosen and the rejected reply), the anomalies that were
    noticed, its weight, a pair's margin, the labels of its replies where rows have some, and whether the row was over
    the limit."""

    branches: tuple[TokenBranch, ...]
    anomalies: frozenset[Anomaly]
    weight: float
    margin: float
    labels: tuple[bool, ...]
    overlong: bool = False


@frozen
class Refusal:
    """A row that cannot be trained on, and why; `overlong`: for its length."""

    reason: Reason
    sentence: str
    overlong: bool


class Preparer:
    """Turns rows into tokens with `tokenizer` (a transformers tokenizer) as `settings` say; `images` renders those of
    rows, without which rows with images are refused."""

    def __init__(self, tokenizer: Any, settings: PreparationSettings, images: ImageRenderer | None = None) -> None:
        self._codec = TemplateCodec(tokenizer, settings.template_kwargs, images)
        self._images = images
        self._vocabulary = len(tokenizer)
        self._settings = evolve(settings, reading=evolve(settings.reading, known_role=self._codec.mentions))
        self._texts: dict[str, TrainingText] = {"{}": TrainingText(self._codec)}

    def prepare(self, row: Mapping[str, Any], kind: ExampleFormat) -> PreparedRow:
        """The tokens of a row of format `kind`.

        Raises:
            RowError: it cannot be trained on.
            ConfigurationError: no row can, as the settings are.
        """
        sample, weight = read_row(row, kind, self._settings.reading)
        if weight == 0:
            raise RowError(Reason.UNTRAINED, "The row has the weight 0.")
        margin, labels = 0.0, tuple[bool, ...]()
        match sample:
            case Pair():
                made, margin, labels = self._pair(sample), sample.margin, (True, False)
            case Labelled():
                made, labels = self._reply(sample.reply), (sample.desirable,)
            case Steps():
                made = self._steps(sample)
            case _:
                made = self._tokens(sample)
        limit = self._settings.max_tokens
        longest = max(len(branch.token_ids) for branch in made.branches)
        if longest <= limit:
            return PreparedRow(
                branches=made.branches, anomalies=made.anomalies, weight=weight, margin=margin, labels=labels
            )
        pictured = any(branch.images for branch in made.branches)
        if self._settings.overlong is not LongRows.CUT or pictured:
            why = ", and no image is cut" if pictured else ""
            raise RowError(Reason.OVERLONG, f"It has {longest} tokens, more than --data.max_tokens {limit}{why}.")
        cut = [TokenBranch(token_ids=b.token_ids[:limit], weights=b.weights[:limit]) for b in made.branches]
        left = tuple(branch for branch in cut if branch.trained)
        if not left or (isinstance(sample, Pair) and len(left) < len(cut)):
            raise RowError(Reason.CUT, f"Nothing that is trained is within its first {limit} of {longest} tokens.")
        if isinstance(sample, Pair):
            _refuse_equal(left)
        return PreparedRow(
            branches=left, anomalies=made.anomalies, weight=weight, margin=margin, labels=labels, overlong=True
        )

    def _pair(self, pair: Pair) -> TrainingTokens:
        """Both replies, each with the prompt before it."""
        made = [self._reply(sample) for sample in (pair.chosen, pair.rejected)]
        branches = tuple(reply.branches[0] for reply in made)
        _refuse_equal(branches)
        if isinstance(pair.chosen, PlainText) and isinstance(pair.rejected, PlainText):
            branches = _from_first_difference(branches, common_prompt=pair.chosen.whole)
        return TrainingTokens(branches=branches, anomalies=made[0].anomalies | made[1].anomalies)

    def _steps(self, sample: Steps) -> TrainingTokens:
        """A solution; at the last token of each labelled step the weight is 1 + the label."""
        solution = sample.solution
        with _template_code():
            if isinstance(solution, Conversation):
                text = self._text(solution.template_kwargs)
                return text.judged(solution.messages, solution.tools, sample.ends, sample.labels)
            return self._text({}).judged_plain(solution.prompt, solution.completion, sample.ends, sample.labels)

    def _reply(self, sample: Conversation | PlainText) -> TrainingTokens:
        """A reply that is judged whole."""
        made = self._tokens(sample)
        if len(made.branches) > 1:
            raise RowError(Reason.REFUSED, "The chat template rewrites the history within a reply that is judged.")
        return made

    def _tokens(self, sample: Conversation | PlainText | Pretokenised) -> TrainingTokens:
        with _template_code():
            match sample:
                case Conversation():
                    text = self._text(sample.template_kwargs)
                    if sample.whole:
                        return text.everything(sample.messages, sample.tools)
                    return text.replies(sample.messages, sample.weights, sample.tools)
                case PlainText():
                    return self._text({}).plain(sample.prompt, sample.completion, train_prompt=sample.whole)
                case Pretokenised():
                    return self._given(sample)

    def _text(self, template_kwargs: Mapping[str, Any]) -> TrainingText:
        key = json.dumps(template_kwargs, sort_keys=True, default=repr)
        if key not in self._texts:
            self._texts[key] = TrainingText(self._codec.with_template_kwargs(template_kwargs))
        return self._texts[key]

    def _given(self, sample: Pretokenised) -> TrainingTokens:
        wrong = next((token for token in sample.token_ids if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            raise broken(f"The row has the token {wrong}, but the tokenizer's tokens are 0 to {self._vocabulary - 1}.")
        if sample.says is not None and self._codec.decode(sample.token_ids[sample.reply :]) != sample.says:
            raise broken(
                "Its tokens are not those of its completion: a model with another tokenizer sampled it; learn from its "
                "text, with --data.input_key messages --data.output_key completion."
            )
        weights = (0.0, *sample.weights[1:])  # nothing predicts the first token
        if not any(weights):
            raise RowError(Reason.UNTRAINED, "None of input_ids is trained.")
        branch = TokenBranch(token_ids=sample.token_ids, weights=weights)
        return TrainingTokens(branches=(self._seeing(branch, sample) if sample.images else branch,))

    def _seeing(self, branch: TokenBranch, sample: Pretokenised) -> TokenBranch:
        """Returns tokens with their images, which are not trained."""
        assert self._images is not None  # rows with images are refused otherwise
        images = known_images(self._images, branch.token_ids, [*map(image_bytes, sample.images)], sample.places)
        weights = list(branch.weights)
        for placed in images:
            weights[placed.start : placed.stop] = [0.0] * (placed.stop - placed.start)
        return evolve(branch, weights=tuple(weights), images=images)


@contextmanager
def _template_code() -> Iterator[None]:
    """Makes the error of a row of any of the block, in which an image or the chat template cannot make tokens."""
    try:
        yield
    except (ConfigurationError, RowError):
        raise
    except DataError as error:
        reason = Reason.IMAGE if isinstance(error, ImageError) else Reason.REFUSED
        raise RowError(reason, " ".join(str(error).split())[:500]) from error
    except Exception as error:  # a template is a program of the model's authors: it fails in every way
        raise RowError(Reason.REFUSED, f"The chat template fails: {type(error).__name__}: {error}"[:500]) from error


def _refuse_equal(branches: Sequence[TokenBranch]) -> None:
    if branches[0].token_ids == branches[1].token_ids:
        raise RowError(Reason.EQUAL, "The chosen and the rejected reply are the same tokens.")


def _from_first_difference(branches: Sequence[TokenBranch], *, common_prompt: bool) -> tuple[TokenBranch, ...]:
    """Two texts, each trained from the first token that they do not share; or, without a `common_prompt`, from where it
    is trained already, if that is earlier. A token may begin before the first character that differs."""
    first, second = (branch.token_ids for branch in branches)
    pairs = enumerate(zip(first, second, strict=False))
    start = next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
    if start == 0:
        raise broken("The two texts have no prompt in common: not even their first tokens are the same.")
    if not common_prompt:
        start = min(start, *(next(place for place, weight in enumerate(b.weights) if weight > 0) for b in branches))
    if start >= min(len(first), len(second)):
        raise RowError(Reason.UNTRAINED, "One of the two texts is the beginning of the other, and has no end token.")
    return tuple(
        TokenBranch(token_ids=b.token_ids, weights=(0.0,) * start + (1.0,) * (len(b.token_ids) - start))
        for b in branches
    )
