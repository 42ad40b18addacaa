"""Preference pairs as losses see them: log-probs of whole replies, from those of their tokens.

Does not own: the losses (`preference`), nor the weights of tokens.
"""

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import logsigmoid

from rollgrad.domain.algorithms.preference_settings import FDivergence, PreferenceSettings
from rollgrad.domain.batches.examples import ExampleBatch

PAIRED, UNPAIRED = 0, 1
"""Columns of `opposites_S2`: those of `aot`, and of `aot_unpaired`."""

LARGEST_EXPONENT = 80.0
"""Exponents are held below this, whose power float32 has: a reply that is e^-80 times as likely as under the reference
has no gradient by a forward KL."""


@frozen(kw_only=True, eq=False)
class Pairs:
    """P pairs of replies; the last axis is (chosen, rejected)."""

    logprobs_P2: Tensor
    """Sums of the trained tokens' log-probs."""
    ref_logprobs_P2: Tensor | None
    """Sums of log-probs under the reference; None without one."""
    lengths_P2: Tensor
    """Numbers of trained tokens."""
    opposites_P22: Tensor | None = None
    """`opposites_S2` of both replies; None where they are not known."""
    divergence: FDivergence = FDivergence.REVERSE_KL
    """Divergence of h."""
    alpha: float = 1.0
    """Parameter of the divergence of h."""

    @property
    def log_ratios_P2(self) -> Tensor:
        """r, the log-prob against the reference.

        Raises:
            ValueError: there is no reference.
        """
        if self.ref_logprobs_P2 is None:
            raise ValueError("This loss compares with a reference, but the batch has no ref_logprobs_N.")
        return self.logprobs_P2 - self.ref_logprobs_P2

    @property
    def log_ratio_gap_P(self) -> Tensor:
        """h."""
        return gap(divergence_slope(self.log_ratios_P2, self.divergence, self.alpha))

    @property
    def mean_log_ratio_gap_P(self) -> Tensor:
        """h_bar."""
        return gap(self.log_ratios_P2 / self.lengths_P2)

    def opposite(self, column: int) -> Tensor:
        """Returns opposites_P2 of the loss with this column.

        Raises:
            ValueError: the pairs of the step have not been sorted.
        """
        if self.opposites_P22 is None:
            raise ValueError("This loss sorts the pairs of a step, but the batch has no opposites_S2.")
        return self.opposites_P22[..., column]

    @property
    def mean_logprobs_P2(self) -> Tensor:
        """s_bar."""
        return self.logprobs_P2 / self.lengths_P2


def divergence_slope(log_ratios: Tensor, divergence: FDivergence, alpha: float) -> Tensor:
    """Returns f'(u) of a divergence at u = e^log_ratios, up to a constant: log u for the reverse KL, -1 / u for the
    forward KL, log(u / (1 + u)) for the Jensen-Shannon divergence, (1 - u^-alpha) / alpha for the alpha-divergence."""
    match divergence:
        case FDivergence.REVERSE_KL:
            return log_ratios
        case FDivergence.JS:
            return logsigmoid(log_ratios)
        case FDivergence.FORWARD_KL:
            alpha = 1.0  # the forward KL is the alpha-divergence at 1
    return -torch.expm1((-alpha * log_ratios).clamp(max=LARGEST_EXPONENT)) / alpha


def pairs_of(logprobs_N: Tensor, batch: ExampleBatch, settings: PreferenceSettings) -> tuple[Pairs, Tensor]:
    """Returns the pairs of a batch, which holds them whole, and their weights_P; `logprobs_N` is 0 at what is not
    trained."""
    mask_N, ref_N, pair_S = batch.action_mask_N, batch.ref_logprobs_N, batch.units_S
    trained_N = torch.where(mask_N, 1.0, 0.0).to(logprobs_N.dtype)
    lengths_P2 = by_reply(trained_N, batch)
    shares_N = trained_N
    if settings.ld_alpha != 1.0:
        before_N = trained_N.cumsum(0) - trained_N
        place_N = before_N - before_N[batch.starts_S][batch.sequence_ids_N]
        shorter_N = lengths_P2.amin(1)[pair_S][batch.sequence_ids_N]
        shares_N = torch.where(place_N < shorter_N, trained_N, settings.ld_alpha * trained_N)
    pairs = Pairs(
        logprobs_P2=by_reply(logprobs_N * shares_N, batch),
        ref_logprobs_P2=None
        if ref_N is None
        else by_reply(torch.where(mask_N, ref_N, 0.0).to(logprobs_N) * shares_N, batch),
        lengths_P2=lengths_P2.clamp(min=1),
        opposites_P22=_opposites(batch),
        divergence=settings.f_divergence,
        alpha=settings.f_alpha,
    )
    weights_N = torch.where(mask_N, batch.filled("loss_weights_N"), 0.0)
    weights_C = weights_N.new_zeros(2 * batch.unit_count)
    weights_C = weights_C.scatter_reduce(0, _reply_cells(batch)[batch.sequence_ids_N], weights_N, "amax")
    return pairs, weights_C.view(-1, 2).amax(1)


def _reply_cells(batch: ExampleBatch) -> Tensor:
    """Returns the place of each sequence in a table of pairs with two columns, chosen and rejected."""
    return 2 * batch.units_S + batch.sample_ids_S


def by_reply(values_N: Tensor, batch: ExampleBatch) -> Tensor:
    """Returns the sums over the tokens of each pair's chosen and rejected reply, [P, 2]."""
    cells_N = _reply_cells(batch)[batch.sequence_ids_N]
    return values_N.new_zeros(2 * batch.unit_count).index_add(0, cells_N, values_N).view(-1, 2)


def _opposites(batch: ExampleBatch) -> Tensor | None:
    if batch.opposites_S2 is None:
        return None
    cells_C2 = torch.zeros_like(batch.opposites_S2).index_copy(0, _reply_cells(batch), batch.opposites_S2)
    return cells_C2.view(-1, 2, 2)


def gap(values_P2: Tensor) -> Tensor:
    """Returns by how much the chosen reply's value is above the rejected one's."""
    return values_P2[:, 0] - values_P2[:, 1]
