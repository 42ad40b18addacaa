"""Functions of packed columns by sequence: numbering, spreading over tokens, counting."""

import torch
from torch import Tensor

LONG = 1024
"""Mean length above which sequences are counted one by one on a CPU: a running sum then takes twice the time."""


def first_appearances(*keys_S: Tensor) -> Tensor:
    """Returns numbers from 0, in order of first appearance, that are equal where all keys are."""
    numbers: dict[tuple[int, ...], int] = {}
    keys = zip(*(key_S.tolist() for key_S in keys_S), strict=True)
    found = [numbers.setdefault(key, len(numbers)) for key in keys]
    return torch.tensor(found, dtype=torch.int64, device=keys_S[0].device)


def rollout_ids(group_ids_S: Tensor, sample_ids_S: Tensor) -> Tensor:
    """Returns the rollout (0..R-1, in order of first appearance) of each sequence; a sample's branches share one."""
    return first_appearances(group_ids_S, sample_ids_S)


def spread(values_S: Tensor, lengths_S: Tensor, mask_N: Tensor) -> Tensor:
    """Returns the value of each sequence at those of its tokens that the mask has, and 0 at all others."""
    if values_S.device.type == "cpu":  # where numpy takes a third of the time
        values_N = torch.from_numpy(values_S.numpy().repeat(lengths_S.numpy()))
    else:
        values_N = torch.repeat_interleave(values_S, lengths_S, output_size=len(mask_N))
    return values_N.masked_fill_(~mask_N, 0)


def counts(mask_N: Tensor, lengths_S: Tensor) -> Tensor:
    """Returns how many tokens of each sequence the mask has, int64."""
    if mask_N.device.type == "cpu" and len(mask_N) > LONG * len(lengths_S) > 0:
        return torch.stack([part.count_nonzero() for part in torch.split(mask_N, lengths_S.tolist())])
    before_N = torch.zeros(len(mask_N) + 1, dtype=torch.int64, device=mask_N.device)
    torch.cumsum(mask_N, 0, out=before_N[1:])
    return before_N[lengths_S.cumsum(0)].diff(prepend=before_N[:1])


def nonzero(values_N: Tensor, lengths_S: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the indices of the tokens of the mask whose value is not 0, such as the ends of turns that were rewarded,
    and the sequence of each. It costs little where these are few."""
    if values_N.device.type == "cpu":  # where numpy takes a quarter of the time
        index = torch.from_numpy((values_N.numpy() != 0).nonzero()[0])
    else:
        index = values_N.nonzero()[:, 0]
    index = index[mask_N[index]]
    return index, torch.searchsorted(lengths_S.cumsum(0), index, right=True)
