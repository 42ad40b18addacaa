"""Preference pairs for losses that compare replies by their rank in the optimizer step (`aot`, `aot_unpaired`): a pass
over the whole step without gradient, before the one that learns, finds the ranks."""

from collections.abc import Sequence

from rollgrad.application.learning.examples import Pack
from rollgrad.application.learning.microbatch import split
from rollgrad.domain.algorithms.losses.transport import with_opposites
from rollgrad.domain.algorithms.preference_settings import PreferenceSettings
from rollgrad.domain.batches.examples import ExampleBatch
from rollgrad.domain.episodes.examples import Preference
from rollgrad.domain.ports.models import PolicyModel


def ranked(
    pack: Pack[Preference], policy: PolicyModel, settings: PreferenceSettings, *, max_tokens: int, shares: int = 1
) -> Pack[Preference]:
    """Returns what packs the pairs of a step as `pack` does, and fills in what each reply is compared with.

    Args:
        pack: fills in the reference's log-probs.
        policy: the model as it is before the step.
        settings: settings of the losses.
        max_tokens: token budget of one forward pass.
        shares: number of equal shares of it, as in `split`.
    """

    def packed(pairs: Sequence[Preference]) -> ExampleBatch:
        batch = pack(pairs)
        passes = split(batch, max_tokens, shares, padded=policy.padded())
        return with_opposites(batch, policy.logprobs(passes), settings)

    return packed
