"""The error of a row of a dataset that cannot be trained on, which has the reason that the report counts it under."""

from enum import StrEnum

from rollgrad.domain.errors import DataError


class Reason(StrEnum):
    """Reason why a row is not trained on."""

    BROKEN = "broken"
    """The row, or a value in it, is not what the format has there."""
    EMPTY = "empty"
    """The row has nothing to learn: no text, no messages, or a trained reply without content."""
    REFUSED = "refused_by_template"
    """The chat template cannot write the messages."""
    IMAGE = "refused_image"
    """An image cannot be read, or the model's processor refuses it."""
    UNTRAINED = "no_trained_token"
    """The row has no token with a weight in the loss."""
    STEPS = "steps_within_a_token"
    """Two labelled steps of the row end within one token, or one within the first, so that they have no place of their
    own to be judged at."""
    OVERLONG = "overlong"
    """It has more tokens than data.max_tokens."""
    EQUAL = "equal_replies"
    """The chosen and the rejected reply are the same tokens."""
    LONE = "no_other_reply"
    """A labelled reply has no reply of the other kind to the same prompt."""
    TIED = "equal_ranks"
    """All ranked replies of the row have one rank."""
    CUT = "reply_cut_off"
    """Cut to data.max_tokens nothing that is trained would be left."""


class RowError(DataError):
    """A row cannot be used.

    Args:
        reason: what the report counts it under.
        sentence: what is wrong with it.
    """

    def __init__(self, reason: Reason, sentence: str) -> None:
        sentence = sentence.encode(errors="replace").decode()  # halves of surrogate pairs can be neither shown nor kept
        super().__init__(reason, sentence)  # both, so that it can be pickled
        self.reason = reason
        self.sentence = sentence

    def __str__(self) -> str:
        return self.sentence
