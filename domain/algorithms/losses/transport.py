"""Ranks of an optimizer step's pairs, by which losses of optimal transport compare replies (Melnyk et al. 2024, "AOT",
arXiv:2406.05882): the cost of moving one distribution of numbers to another is least where equal ranks go together.

Invariant: ranks are those of the whole step, over all processes, before it is split. What a reply is compared with is a
constant from then on, so that any split gives the same gradient.
"""

import torch
from attrs import evolve
from torch import Tensor

from rollgrad.domain.algorithms.losses.pairs import gap, pairs_of
from rollgrad.domain.algorithms.preference_settings import PreferenceSettings
from rollgrad.domain.batches.examples import ExampleBatch
from rollgrad.domain.errors import DataError

ROUNDING = 1e-6
"""Relative difference of float32 weights that are equal."""
UNEQUAL = (
    "The pairs have different weights, but aot and aot_unpaired compare pairs of the same rank, in which all weigh the "
    "same: leave the column weight out, or change --dpo.loss."
)
"""The sentence about pairs that cannot be ranked."""


def with_opposites(batch: ExampleBatch, logprobs_N: Tensor, settings: PreferenceSettings) -> ExampleBatch:
    """Returns the batch of a whole optimizer step with its `opposites_S2`.

    Args:
        batch: the pairs, with the reference's log-probs.
        logprobs_N: log-probs under the policy before the step.
        settings: settings of the losses.

    Raises:
        DataError: some pairs weigh more than others, whose ranks then do not correspond.
        ValueError: the batch has no reference log-probs.
    """
    pairs, weights_P = pairs_of(torch.where(batch.action_mask_N, logprobs_N, 0.0), batch, settings)
    if float(weights_P.max() - weights_P.min()) > ROUNDING * float(weights_P.max()):
        raise DataError(UNEQUAL)
    chosen_P, rejected_P = pairs.log_ratios_P2.unbind(1)
    own_P = gap(pairs.logprobs_P2)
    of_reference_P = _of_same_rank(own_P, own_P - (chosen_P - rejected_P))
    paired_P2 = torch.stack([of_reference_P, of_reference_P], dim=1)
    unpaired_P2 = torch.stack([_of_same_rank(chosen_P, rejected_P), _of_same_rank(rejected_P, chosen_P)], dim=1)
    table_P22 = torch.stack([paired_P2, unpaired_P2], dim=2)  # in the order of PAIRED, UNPAIRED
    return evolve(batch, opposites_S2=table_P22[batch.units_S, batch.sample_ids_S])


def _of_same_rank(values_P: Tensor, others_P: Tensor) -> Tensor:
    """Returns for each of `values_P` the one of `others_P` that has the same rank among them.

    >>> _of_same_rank(torch.tensor([5.0, 1.0, 3.0]), torch.tensor([20.0, 30.0, 10.0])).tolist()
    [30.0, 10.0, 20.0]
    """
    ranks_P = values_P.argsort(stable=True).argsort()
    return others_P.sort().values[ranks_P]
