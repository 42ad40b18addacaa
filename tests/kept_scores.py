"""Log-probs of a reply that went on under new weights with the keys and values of the old ones."""

from collections.abc import Sequence
from pathlib import Path

import torch


@torch.no_grad()
def kept_scores(
    model_dir: Path,
    weights: Sequence[dict[str, torch.Tensor]],
    switch: int,
    prompt: Sequence[int],
    reply: Sequence[int],
) -> list[float]:
    """Log-probs of `reply` where `weights[0]` passed all tokens up to the one that drew `reply[switch - 1]`, and
    `weights[1]` the others, on the keys and values of the first."""
    from transformers import AutoModelForCausalLM, DynamicCache

    tokens, cut = torch.tensor([[*prompt, *reply]]), len(prompt) + switch - 1
    cache, rows = DynamicCache(), []
    for chunk, state in zip((tokens[:, :cut], tokens[:, cut:]), weights, strict=True):
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        model.load_state_dict(state, strict=False)
        rows.append(model(chunk, past_key_values=cache, use_cache=True).logits[0])
    found = torch.cat(rows)[len(prompt) - 1 : -1].log_softmax(-1)[range(len(reply)), list(reply)]
    return [float(x) for x in found]
