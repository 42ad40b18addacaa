"""Estimators over whole batches, as plain float64 loops written from the papers; they share no code with the domain.

`estimate(name, batch, ...)` gives each sequence's advantages before whitening, None where not an action.
"""

import math
from collections import defaultdict
from collections.abc import Callable

from tests.unit.domain.references import Sequence, action_positions, blank

Rows = list[list[float | None]]
Rollout = tuple[int, int]


def rollout(s: Sequence) -> Rollout:
    return s.group, s.sample


def outcomes(batch: list[Sequence], *, extras: bool = False) -> dict[Rollout, float]:
    """Summed reward of each rollout over its branches."""
    found: dict[Rollout, float] = defaultdict(float)
    for s in batch:
        found[rollout(s)] += math.fsum(s.rewards[t] + extras * s.extras[t] for t in action_positions(s))
    return dict(found)


def in_groups(values: dict[Rollout, float], function: Callable[[list[float]], list[float]]) -> dict[Rollout, float]:
    """`function` over each group's values."""
    result: dict[Rollout, float] = {}
    for group in {g for g, _ in values}:
        members = [key for key in values if key[0] == group]
        result |= dict(zip(members, function([values[key] for key in members]), strict=True))
    return result


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def centred(values: list[float]) -> list[float]:
    return [v - mean(values) for v in values]


def normalised(values: list[float]) -> list[float]:
    spread = math.sqrt(math.fsum(c * c for c in centred(values)) / max(1, len(values) - 1))
    return [c / (spread + 1e-9) for c in centred(values)]


def leave_one_out(values: list[float]) -> list[float]:
    if len(values) == 1:
        return [0.0]
    return [v - (math.fsum(values) - v) / (len(values) - 1) for v in values]


def relative(values: list[float]) -> list[float]:
    return [(v - mean(values)) / mean(values) if mean(values) > 0 else 0.0 for v in values]


def broadcast(batch: list[Sequence], values: dict[Rollout, float], *, extras: bool = True) -> Rows:
    """The rollout's value on each action token, plus the extras from that token on."""
    rows = []
    for s in batch:
        row, togo = blank(s), 0.0
        for t in reversed(action_positions(s)):
            togo += s.extras[t] if extras else 0.0
            row[t] = values[rollout(s)] + togo
        rows.append(row)
    return rows


def turns(s: Sequence) -> list[list[int]]:
    """Runs of adjacent action tokens."""
    runs: list[list[int]] = []
    for t in action_positions(s):
        if runs and runs[-1][-1] == t - 1:
            runs[-1].append(t)
        else:
            runs.append([t])
    return runs


def gae(
    batch: list[Sequence], gamma: float, lambd: float, critic_lambd: float | None, alpha: float | None
) -> tuple[Rows, Rows]:
    """(advantages, returns): Schulman et al. 2016 with VAPO's two lambdas."""
    advantages, returns = [], []
    for s in batch:
        steps = action_positions(s)
        own = lambd if alpha is None else max(0.0, 1 - 1 / (alpha * max(1, len(steps))))
        rows = []
        for lam in (own, own if critic_lambd is None else critic_lambd):
            row, running, following = blank(s), 0.0, 0.0
            for t in reversed(steps):
                running = s.rewards[t] + s.extras[t] + gamma * following - s.values[t] + gamma * lam * running
                following = s.values[t]
                row[t] = running
            rows.append(row)
        advantages.append(rows[0])
        returns.append([None if x is None else x + v for x, v in zip(rows[1], s.values, strict=True)])
    return advantages, returns


def turn_gae(batch: list[Sequence], gamma: float, lambd: float) -> Rows:
    rows = []
    for s in batch:
        row, running, following = blank(s), 0.0, 0.0
        for turn in reversed(turns(s)):
            value = s.values[turn[0]]
            reward = math.fsum(s.rewards[t] + s.extras[t] for t in turn)
            running = reward + gamma * following - value + gamma * lambd * running
            following = value
            for t in turn:
                row[t] = running
        rows.append(row)
    return rows


def turn_group_norm(batch: list[Sequence], gamma: float) -> Rows:
    played: dict[Rollout, list[tuple[int, list[int]]]] = defaultdict(list)
    for index, s in enumerate(batch):
        played[rollout(s)] += [(index, turn) for turn in turns(s)]
    togo: dict[tuple[int, int], dict[Rollout, float]] = defaultdict(dict)
    for key, all_turns in played.items():
        running = 0.0
        for number in range(len(all_turns) - 1, -1, -1):
            index, turn = all_turns[number]
            running = math.fsum(batch[index].rewards[t] for t in turn) + gamma * running
            togo[key[0], number][key] = running
    credit = {cell: in_groups(values, normalised) for cell, values in togo.items()}
    rows = broadcast(batch, dict.fromkeys(outcomes(batch), 0.0))
    for key, all_turns in played.items():
        for number, (index, turn) in enumerate(all_turns):
            for t in turn:
                before = rows[index][t]
                assert before is not None
                rows[index][t] = before + credit[key[0], number][key]
    return rows


def gdpo(batch: list[Sequence], parts: list[list[float]], weights: list[float]) -> Rows:
    total: dict[Rollout, float] = defaultdict(float)
    for k, weight in enumerate(weights):
        values: dict[Rollout, float] = defaultdict(float)
        for s, row in zip(batch, parts, strict=True):
            values[rollout(s)] += row[k]
        for key, value in in_groups(values, normalised).items():
            total[key] += weight * value
    return broadcast(batch, dict(zip(total, normalised(list(total.values())), strict=True)))


def estimate(
    name: str,
    batch: list[Sequence],
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    baselines: list[float],
    parts: list[list[float]],
    weights: list[float],
) -> Rows:
    """Advantages of every estimator."""
    found = outcomes(batch)
    match name:
        case "gae":
            return gae(batch, gamma, lambd, None, None)[0]
        case "turn_gae":
            return turn_gae(batch, gamma, lambd)
        case "reinforce":
            rows = []
            for s in batch:
                row, running = blank(s), 0.0
                for t in reversed(action_positions(s)):
                    running = s.rewards[t] + s.extras[t] + gamma * running
                    row[t] = running
                rows.append(row)
            return rows
        case "reinforce_baseline" | "dr_grpo":
            return broadcast(batch, in_groups(found, centred))
        case "rloo":
            return broadcast(batch, in_groups(found, leave_one_out))
        case "rloo_sequence":
            return broadcast(batch, in_groups(outcomes(batch, extras=True), leave_one_out), extras=False)
        case "group_norm":
            return broadcast(batch, in_groups(found, normalised))
        case "opo":
            lengths: dict[Rollout, float] = defaultdict(float)
            for s in batch:
                lengths[rollout(s)] += len(action_positions(s))
            values = {}
            for key, value in found.items():
                group = [other for other in found if other[0] == key[0]]
                baseline = math.fsum(lengths[o] * found[o] for o in group) / max(
                    1.0, math.fsum(lengths[o] for o in group)
                )
                values[key] = value - baseline
            return broadcast(batch, values)
        case "gpg":
            spread = in_groups(found, lambda v: [float(min(v) < max(v))] * len(v))
            alpha = len(found) / max(1.0, math.fsum(spread.values()))
            return broadcast(batch, {key: alpha * value for key, value in in_groups(found, centred).items()})
        case "maxrl":
            return broadcast(batch, in_groups(found, relative))
        case "gdpo":
            return gdpo(batch, parts, weights)
        case "turn_group_norm":
            return turn_group_norm(batch, gamma)
        case "remax":
            baseline_of = {rollout(s): b for s, b in zip(batch, baselines, strict=True)}
            return broadcast(batch, {key: value - baseline_of[key] for key, value in found.items()})
        case "flash_reinforce":
            return broadcast(batch, dict(zip(found, centred(list(found.values())), strict=True)))
        case "on_policy_distill":
            return [[s.extras[t] if a else None for t, a in enumerate(s.actions)] for s in batch]
    raise ValueError(name)


def whitened(batch: list[Sequence], rows: Rows, over: str, *, std_norm: bool) -> Rows:
    """Minus the mean and over the population deviation, of the batch's or each group's action tokens."""
    if over == "none":
        return rows
    pools: dict[int, list[float]] = defaultdict(list)
    for s, row in zip(batch, rows, strict=True):
        pools[s.group if over == "group" else 0] += [x for x in row if x is not None]
    result = []
    for s, row in zip(batch, rows, strict=True):
        pool = pools[s.group if over == "group" else 0]
        middle = mean(pool) if pool else 0.0
        variance = math.fsum((x - middle) ** 2 for x in pool) / len(pool) if pool else 1.0
        scale = math.sqrt(max(variance, 1e-8)) if std_norm else 1.0
        result.append([None if x is None else (x - middle) / scale for x in row])
    return result
