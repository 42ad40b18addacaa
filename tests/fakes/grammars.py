"""Grammars without a tokenizer: chance decides which tokens they allow. Importable in processes of a cluster."""

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from rollgrad.adapters.models.torch.heads.allowed_tokens import Masks
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.trajectory import Segment, SegmentKind


def chance_masks(vocabulary: int) -> Masks:
    """Allows the reply's token in each place, and about a quarter of the others."""

    def masks(grammar: str, token_ids: list[int]) -> Tensor:
        generator = torch.Generator().manual_seed(len(grammar) + sum(token_ids))
        allowed_TV = torch.rand(len(token_ids), vocabulary, generator=generator) < 0.25
        allowed_TV[range(len(token_ids)), token_ids] = True
        return torch.from_numpy(np.packbits(allowed_TV.numpy(), axis=1, bitorder="little"))

    return masks


def prescribed(batch: PackedBatch) -> PackedBatch:
    """Gives the last action of every second sequence a grammar."""
    found: list[tuple[Segment, ...]] = []
    for place, own_T in enumerate(torch.split(batch.action_mask_N, batch.lengths_S.tolist())):
        start = len(own_T) - int(own_T.flip(0).long().cumprod(0).sum())
        action = Segment(kind=SegmentKind.ACTION, start=start, stop=len(own_T), grammar="start: /a/")
        found.append((action,) if place % 2 == 0 else ())
    return evolve(batch, prescribed_S=tuple(found))
