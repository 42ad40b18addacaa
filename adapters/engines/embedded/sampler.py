"""Draws one token a row from logits, with the exact log-prob of each draw.

A draw depends on the row's logits and its own uniform number alone, so neighbours in the batch cannot change it. It
inverts the cumulative distribution: with probabilities (0.2, 0.5, 0.3) and the uniform number 0.6, sums are (0.2, 0.7,
1.0), and the first above 0.6 is that of token 1, whose log-prob is log 0.5.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.top_logprobs import TopLogprobs

BLOCK = 256
"""Vocabulary entries summed together before the search for the drawn token: two short searches instead of a
cumulative sum over the whole vocabulary."""

COLDEST = 1e-30
"""Least temperature above 0 that logits are divided by, so that float32 holds the quotients."""


def sample(logits_AV: Tensor, params: Sequence[SamplingParams], uniforms_A: Tensor) -> tuple[Tensor, Tensor]:
    """Samples one token for each row.

    Args:
        logits_AV: float32; overwritten with those of the distributions that the tokens are drawn from.
        params: one a row; `temperature` 0 takes the most likely token.
        uniforms_A: float64 in [0, 1), one a row.

    Returns:
        (tokens_A int64, logprobs_A float32): the log-prob of each token under the distribution it was drawn from
        (after temperature, top-k and top-p; greedy rows: at temperature 1).
    """
    device = logits_AV.device
    temperatures = [max(p.temperature, COLDEST) if p.temperature else 1.0 for p in params]
    if any(t != 1.0 for t in temperatures):
        logits_AV.div_(to_device(torch.tensor(temperatures), device)[:, None])
    limited = [row for row, p in enumerate(params) if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0)]
    if limited:
        index = to_device(torch.tensor(limited), device)
        logits_AV[index] = _truncate(logits_AV[index], [params[row] for row in limited])
    normaliser_A = torch.logsumexp(logits_AV, dim=-1)
    greedy = [p.temperature == 0 for p in params]
    if all(greedy):
        tokens_A = logits_AV.argmax(-1)
    else:
        tokens_A = _inverse_cdf((logits_AV - normaliser_A[:, None]).exp_(), to_device(uniforms_A, device))
        if any(greedy):
            tokens_A = torch.where(to_device(torch.tensor(greedy), device), logits_AV.argmax(-1), tokens_A)
    logprobs_A = logits_AV.gather(1, tokens_A[:, None])[:, 0] - normaliser_A
    return tokens_A, logprobs_A.clamp_(max=0.0)


def read(tokens: Tensor, logprobs: Tensor) -> tuple[list[Any], list[Any]]:
    """Returns tokens and log-probs of equal shapes as lists, by one copy: float64 holds both as they are."""
    ids, numbers = torch.stack([tokens.double(), logprobs.double()]).tolist()
    return ids, numbers


def forbid(logits_AV: Tensor, tokens_A: Sequence[Iterable[int]]) -> None:
    """Makes tokens of each row impossible."""
    places = [(row, token) for row, tokens in enumerate(tokens_A) for token in tokens]
    if places:
        row_F, token_F = to_device(torch.tensor(places), logits_AV.device).unbind(1)
        logits_AV[row_F, token_F] = float("-inf")


def top_logprobs(logits_AV: Tensor, counts_A: Sequence[int]) -> dict[int, TopLogprobs]:
    """Returns the most likely tokens with their log-probs, as those of one place, of each row that asks for any.

    Args:
        logits_AV: as `sample` leaves them.
        counts_A: how many tokens of each row; it gets fewer if fewer are possible.
    """
    found: dict[int, TopLogprobs] = {}
    for count in {*counts_A} - {0}:
        rows = [row for row, asked in enumerate(counts_A) if asked == count]
        logits = logits_AV.index_select(0, to_device(torch.tensor(rows), logits_AV.device))
        best, tokens = logits.topk(min(count, logits.shape[1]))
        # One copy brings both, as in `read`.
        ids, logprobs = torch.stack([tokens.double(), (best - logits.logsumexp(-1, keepdim=True)).double()]).cpu()
        each = TopLogprobs(ids.int(), logprobs.float().clamp_(max=0.0))
        found |= {row: each[place : place + 1] for place, row in enumerate(rows)}
    return found


def _truncate(logits_AV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Keeps the top-k tokens, and of those the smallest set whose mass reaches top-p (Holtzman et al. 2020)."""
    vocabulary = logits_AV.shape[1]
    sorted_AV, order_AV = logits_AV.sort(dim=-1, descending=True)
    rank = torch.arange(vocabulary, device=logits_AV.device)[None]
    top_k = to_device(torch.tensor([p.top_k or vocabulary for p in params]), logits_AV.device)[:, None]
    top_p = to_device(torch.tensor([p.top_p for p in params]), logits_AV.device)[:, None]
    sorted_AV = sorted_AV.masked_fill(rank >= top_k, float("-inf"))
    probs_AV = sorted_AV.softmax(-1)
    before_AV = probs_AV.cumsum(-1) - probs_AV
    sorted_AV = sorted_AV.masked_fill((before_AV >= top_p) & (rank > 0), float("-inf"))
    return torch.empty_like(logits_AV).scatter_(1, order_AV, sorted_AV)


def _inverse_cdf(probs_AV: Tensor, uniforms_A: Tensor) -> Tensor:
    """Returns the token at which the running sum of `probs` passes the uniform number, in float64."""
    rows, vocabulary = probs_AV.shape
    if vocabulary % BLOCK:
        probs_AV = torch.nn.functional.pad(probs_AV, (0, BLOCK - vocabulary % BLOCK))
    blocks = probs_AV.view(rows, -1, BLOCK)
    mass = blocks.sum(-1).double().cumsum(-1)
    target = uniforms_A[:, None] * mass[:, -1:]
    block = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[1] - 1)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]
    before = torch.where(block > 0, mass.gather(1, (block - 1).clamp_(min=0)), 0.0)
    offset = torch.searchsorted(inside.double().cumsum(-1), target - before, right=True)[:, 0]
    # Rounding at a block's edge may point past its last possible token; the block's most likely one stands in.
    safe = offset.clamp(max=BLOCK - 1)
    possible = (offset < BLOCK) & (inside.gather(1, safe[:, None])[:, 0] > 0)
    return block[:, 0] * BLOCK + torch.where(possible, safe, inside.argmax(-1))
