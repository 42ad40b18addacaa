"""Learning-rate schedules as pure functions of the step."""

import math


def lr_factor(
    kind: str, step: int, *, total_steps: int, warmup_ratio: float, min_ratio: float, decay_ratio: float = 0.1
) -> float:
    """Returns the learning rate at optimizer step `step` (from 0), as a share of the peak.

    Args:
        kind: `constant`, `linear` (to `min_ratio`), `cosine_with_min_lr` (SGDR's half cosine, to `min_ratio`) or
            `warmup_stable_decay` (Hu et al. 2024, MiniCPM, arXiv:2404.06395, section 4: the peak, then linearly to
            `min_ratio`, as Hägele et al. 2024, arXiv:2405.18392, section 3, has it).
        step: steps already taken.
        total_steps: steps of the whole run.
        warmup_ratio: share of the run that rises linearly from 0; the first step already moves.
        min_ratio: floor of the decaying schedules.
        decay_ratio: last share of the run, in which `warmup_stable_decay` falls.

    Raises:
        ValueError: unknown `kind`.
    """
    warmup = math.ceil(total_steps * warmup_ratio)
    if step < warmup:
        return (step + 1) / (warmup + 1)  # not step / warmup: the first step would have a rate of 0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    match kind:
        case "constant":
            return 1.0
        case "linear":
            return min_ratio + (1 - min_ratio) * (1 - progress)
        case "cosine_with_min_lr":
            return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
        case "warmup_stable_decay":
            stable_until = max(warmup, total_steps - math.ceil(total_steps * decay_ratio))
            decayed = min(1.0, max(0, step - stable_until) / max(1, total_steps - stable_until))
            return min_ratio + (1 - min_ratio) * (1 - decayed)
    raise ValueError(f"Unknown schedule {kind!r}: use constant, linear, cosine_with_min_lr or warmup_stable_decay.")
