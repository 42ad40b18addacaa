"""Float64 references, written from the papers as plain loops; they share no code with the domain."""

import math
import random

import attrs


@attrs.define
class Sequence:
    """One sequence: per token its reward, KL addition, value and whether it is an action."""

    group: int
    sample: int
    rewards: list[float]
    extras: list[float]
    values: list[float]
    actions: list[bool]


def action_positions(sequence: Sequence) -> list[int]:
    return [t for t, action in enumerate(sequence.actions) if action]


def whitened(rows: list[list[float | None]], std_norm: bool = True) -> list[list[float | None]]:
    flat = [x for row in rows for x in row if x is not None]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((x - mean) ** 2 for x in flat) / len(flat)
    scale = math.sqrt(max(variance, 1e-8)) if std_norm else 1.0
    return [[None if x is None else (x - mean) / scale for x in row] for row in rows]


def blank(sequence: Sequence) -> list[float | None]:
    return [None] * len(sequence.actions)


def gae(batch: list[Sequence], gamma: float, lambd: float) -> tuple[list[list[float | None]], list[list[float | None]]]:
    """Schulman et al. 2016, eq. 11 and 16, over action tokens; (advantages before whitening, returns)."""
    advantages, returns = [], []
    for s in batch:
        row_a, row_r = blank(s), blank(s)
        running, next_value = 0.0, 0.0
        for t in reversed(action_positions(s)):
            delta = s.rewards[t] + s.extras[t] + gamma * next_value - s.values[t]
            running = delta + gamma * lambd * running
            next_value = s.values[t]
            row_a[t], row_r[t] = running, running + s.values[t]
        advantages.append(row_a)
        returns.append(row_r)
    return advantages, returns


def returns_to_go(batch: list[Sequence], gamma: float, *, extras_only: bool = False) -> list[list[float | None]]:
    rows = []
    for s in batch:
        row, running = blank(s), 0.0
        for t in reversed(action_positions(s)):
            running = (0.0 if extras_only else s.rewards[t]) + s.extras[t] + gamma * running
            row[t] = running
        rows.append(row)
    return rows


def outcomes(batch: list[Sequence]) -> dict[tuple[int, int], float]:
    """Outcome of each rollout: all its branches together."""
    total: dict[tuple[int, int], float] = {}
    for s in batch:
        got = math.fsum(s.rewards[t] for t in action_positions(s))
        total[s.group, s.sample] = total.get((s.group, s.sample), 0.0) + got
    return total


def baseline_advantage(kind: str, mine: float, others: list[float]) -> float:
    """Advantage of one outcome against the others of its group (the papers' formulas)."""
    n = len(others) + 1
    if n == 1:
        return 0.0
    everyone = [mine, *others]
    mean = math.fsum(everyone) / n
    if kind == "rloo":
        return mine - math.fsum(others) / (n - 1)
    if kind == "group_norm":
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in everyone) / (n - 1))
        return (mine - mean) / (std + 1e-9)
    return mine - mean


def estimate(kind: str, batch: list[Sequence], gamma: float, lambd: float, std_norm: bool) -> list[list[float | None]]:
    """Advantages of every estimator; None where not an action."""
    if kind == "gae":
        return whitened(gae(batch, gamma, lambd)[0], std_norm)
    if kind == "reinforce":
        return whitened(returns_to_go(batch, gamma), std_norm)
    total = outcomes(batch)
    to_go = returns_to_go(batch, 1.0, extras_only=True)
    rows = []
    for s, extras in zip(batch, to_go, strict=True):
        others = [r for (g, i), r in total.items() if g == s.group and i != s.sample]
        advantage = baseline_advantage(kind, total[s.group, s.sample], others)
        rows.append([None if e is None else advantage + e for e in extras])
    return whitened(rows, std_norm) if kind == "reinforce_baseline" else rows


def random_batch(seed: int, *, long: bool = False) -> list[Sequence]:
    """Ragged groups in random order, several turns with observations between, branches, empty of actions at times."""
    rng = random.Random(seed)
    batch = []
    for group in range(rng.randint(1, 4)):
        for sample in range(rng.randint(1, 5)):
            for _ in range(2 if rng.random() < 0.2 else 1):
                actions = [False] * rng.randint(1, 4)
                for _ in range(rng.randint(0, 3)):
                    actions += [True] * rng.randint(1, 150 if long else 6) + [False] * rng.randint(0, 5)
                n = len(actions)
                ends = [t for t in range(n) if actions[t] and (t + 1 == n or not actions[t + 1])]
                rewards = [rng.choice([0.0, 1.0, 0.5, -2.0]) if t in ends else 0.0 for t in range(n)]
                batch.append(
                    Sequence(
                        group=group * 7,
                        sample=sample,
                        rewards=rewards,
                        extras=[rng.gauss(0, 0.1) if a else 0.0 for a in actions],
                        values=[rng.gauss(0, 1) if a else 0.0 for a in actions],
                        actions=actions,
                    )
                )
    if not any(any(s.actions) for s in batch):
        batch[0].actions[-1] = True
    rng.shuffle(batch)
    return batch
