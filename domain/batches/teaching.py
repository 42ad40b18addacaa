"""Batches as a teacher reads them that is told more than the policy: another prompt before the same replies."""

import torch

from rollgrad.domain.batches.packed import PackedBatch


def as_taught(batch: PackedBatch) -> PackedBatch:
    """Returns the sequences with `teacher_prompts_S` in the place of their prompts: the tokens behind a prompt, and the
    order of sequences, stay, so that the action tokens of both batches are the same, one after the other. It has the
    columns that a forward pass reads, and none of a loss. A batch without such prompts is returned as it is."""
    if not batch.teacher_prompts_S:
        return batch
    tokens, masks, lengths = [], [], []
    rows = zip(batch.starts_S, batch.lengths_S, batch.prompt_lengths_S, batch.teacher_prompts_S, strict=True)
    for start, length, own, told in rows:
        behind = slice(int(start + own), int(start + length))
        tokens += [torch.tensor(told, dtype=torch.int64), batch.tokens_N[behind]]
        masks += [torch.zeros(len(told), dtype=torch.bool), batch.action_mask_N[behind]]
        lengths.append(len(told) + behind.stop - behind.start)
    return PackedBatch(
        tokens_N=torch.cat(tokens),
        action_mask_N=torch.cat(masks),
        lengths_S=torch.tensor(lengths),
        prompt_lengths_S=torch.tensor([len(told) for told in batch.teacher_prompts_S]),
        group_ids_S=batch.group_ids_S,
        unit_ids_S=batch.unit_ids_S,
        shares_S=batch.shares_S,
        shares=batch.shares,
        datasources_S=batch.datasources_S,
    )
