"""Policy losses, corrections and KL for one micro-batch, written from the papers as plain float64 loops over sequences;
they share no code with the domain."""

import math
from collections.abc import Sequence

Row = Sequence[float]
"""One sequence's action tokens."""


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(rho: float, a: float, low: float, high: float) -> float:
    return -min(rho * a, clip(rho, 1 - low, 1 + high) * a)


def mean(values: Row) -> float:
    return math.fsum(values) / len(values)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def binary_kl(p: float, q: float) -> float:
    """Both are log-probs."""
    p, q = math.exp(p), math.exp(q)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def token_losses(
    name: str, new: Row, old: Row, advantages: Row, selected: Sequence[bool], low: float, high: float
) -> list[float]:
    """Loss of each action token of one sequence; `new` is the current policy (ratios without a gradient use it too)."""
    rhos = [math.exp(n - o) for n, o in zip(new, old, strict=True)]
    triples = list(zip(rhos, advantages, new, strict=True))
    match name:
        case "ppo":
            return [ppo(rho, a, low, high) for rho, a, _ in triples]
        case "sequence_ppo":
            return [ppo(math.prod(rhos), a, low, high) for a in advantages]
        case "gspo" | "gspo_token":
            s = math.exp(mean([math.log(rho) for rho in rhos]))
            return [ppo(s, a, low, high) for a in advantages]
        case "gmpo":
            chosen = []
            for rho, a, _ in triples:
                sign, x = math.copysign(1, a) if a else 0, math.log(rho)
                chosen.append(sign * min(sign * x, sign * clip(x, -low, high)))
            return [-math.exp(mean(chosen)) * mean(advantages)] * len(rhos)
        case "cispo":
            return [-clip(rho, 1 - low, 1 + high) * a * n for rho, a, n in triples]
        case "sapo":
            taus = [1.0 if a > 0 else 1.05 for a in advantages]
            return [-4 / t * sigmoid(t * (rho - 1)) * a for t, (rho, a, _) in zip(taus, triples, strict=True)]
        case "clip_cov":
            return [0.0 if s else ppo(rho, a, low, high) for s, (rho, a, _) in zip(selected, triples, strict=True)]
        case "kl_cov":
            return [
                -rho * a + (abs(math.log(rho)) if s else 0.0) for s, (rho, a, _) in zip(selected, triples, strict=True)
            ]
        case "dppo_tv" | "dppo_kl":
            losses = []
            for (rho, a, n), o in zip(triples, old, strict=True):
                moved = abs(math.exp(n) - math.exp(o)) if name == "dppo_tv" else binary_kl(o, n)
                outside = (a > 0 and rho > 1 and moved > high) or (a < 0 and rho < 1 and moved > low)
                losses.append(0.0 if outside else -rho * a)
            return losses
        case "policy_gradient":
            return [-a * n for _, a, n in triples]
    raise ValueError(name)


def gradients(
    name: str, new: Row, old: Row, advantages: Row, selected: Sequence[bool], low: float, high: float, weights: Row
) -> list[float]:
    """d/d new_t of sum(weight x loss), by the rules of calculus and the papers' stop-gradients."""
    rhos = [math.exp(n - o) for n, o in zip(new, old, strict=True)]
    count = len(rhos)
    if name in ("cispo", "policy_gradient"):
        factors = [clip(rho, 1 - low, 1 + high) if name == "cispo" else 1.0 for rho in rhos]
        return [-w * f * a for w, f, a in zip(weights, factors, advantages, strict=True)]
    if name == "gspo_token":
        s = math.exp(mean([math.log(rho) for rho in rhos]))
        inside = [ppo(s, a, low, high) == -s * a for a in advantages]
        return [-w * s * a if i else 0.0 for w, a, i in zip(weights, advantages, inside, strict=True)]

    def total(values: Row) -> float:
        losses = token_losses(name, values, old, advantages, selected, low, high)
        return math.fsum(w * loss for w, loss in zip(weights, losses, strict=True))

    step = 1e-6
    found = []
    for t in range(count):
        up, down = list(new), list(new)
        up[t] += step
        down[t] -= step
        found.append((total(up) - total(down)) / (2 * step))
    return found


def correction(
    level: str, mode: str, gate: str, low: float, high: float, threshold: float, new: Row, base: Row, advantages: Row
) -> list[float]:
    """The factor of each action token of one sequence."""
    tokens = [math.exp(n - b) for n, b in zip(new, base, strict=True)]
    count = len(tokens)
    ratios = {
        "token": tokens,
        "sequence": [math.prod(tokens)] * count,
        "geometric": [math.exp(mean([math.log(w) for w in tokens]))] * count,
    }[level]
    statistics = {
        "ratio": [0.0] * count,
        "binary_kl": [binary_kl(b, n) for n, b in zip(new, base, strict=True)],
        "tv": [abs(math.exp(b) - math.exp(n)) for n, b in zip(new, base, strict=True)],
        "opsm": [b - n for n, b in zip(new, base, strict=True)],
    }[gate]
    if level != "token":
        statistics = [mean(statistics)] * count
    factors = []
    for w, ratio, statistic, a in zip(tokens, ratios, statistics, advantages, strict=True):
        if gate != "ratio" and statistic > threshold and not (gate == "opsm" and a >= 0):
            factors.append(0.0)
        elif mode == "truncate":
            factors.append(min(ratio, high))
        elif mode == "clip":
            factors.append(clip(ratio, low, high))
        else:
            factors.append(w if gate != "ratio" or low <= ratio <= high else 0.0)
    return factors
