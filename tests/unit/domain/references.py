"""Float64 references, written from the papers as plain loops; they share no code with the domain."""

import itertools
import math
import random
from fractions import Fraction

import attrs

Rows = list[list[float | None]]
"""One row for each sequence, one entry for each token: None where it is not an action."""

PART_WEIGHTS = (1.0, 0.5)
"""Weights of the two named rewards of a random batch."""


@attrs.define
class Sequence:
    """One sequence: per token its reward, KL addition, value and whether it is an action, and the turn of each token
    within its rollout (None: runs of adjacent action tokens); the reward of its prompt's greedy rollout; its named
    rewards."""

    group: int
    sample: int
    rewards: list[float]
    extras: list[float]
    values: list[float]
    actions: list[bool]
    turns: list[int] | None = None
    baseline: float = 0.0
    parts: list[float] = attrs.field(factory=lambda: [0.0] * len(PART_WEIGHTS))

    @property
    def logprobs(self) -> list[float]:
        """Log-prob of each token."""
        return [-0.1 - abs(value) for value in self.values]

    @property
    def collisions(self) -> list[float]:
        """Collision entropy of each token, of a vocabulary of three of which two others share what is left."""
        return [-math.log(math.exp(2 * x) + (1 - math.exp(x)) ** 2 / 2) for x in self.logprobs]

    @property
    def states(self) -> list[int]:
        """State in which each token's turn was played, as the turn's first token has it."""
        return [int(value > 0) for value in self.values]


@attrs.frozen
class Settings:
    """The options of an estimator and of the whitening after it."""

    gamma: float = 1.0
    lambd: float = 1.0
    critic_lambd: float | None = None
    length_adaptive_alpha: float | None = None
    prefix_weight: float = 0.5
    step_weight: float = 1.0
    pass_k: int = 2
    no_std_norm: bool = False


Rollout = tuple[int, int]
"""(group, sample)."""


def action_positions(sequence: Sequence) -> list[int]:
    return [t for t, action in enumerate(sequence.actions) if action]


Place = tuple[int, int]
"""(sequence, token)."""


def episodes(batch: list[Sequence]) -> dict[Rollout, list[Place]]:
    """The action tokens of each rollout, turn by turn, or branch by branch where turns have no numbers."""
    result: dict[Rollout, list[Place]] = {}
    for i, s in enumerate(batch):
        result.setdefault((s.group, s.sample), []).extend((i, t) for t in action_positions(s))
    for places in result.values():
        places.sort(key=lambda place: (batch[place[0]].turns or [0] * (place[1] + 1))[place[1]])
    return result


def turns_of(batch: list[Sequence], places: list[Place]) -> list[list[Place]]:
    """The action tokens of each turn of an episode."""
    turns: list[list[Place]] = []
    for i, t in places:
        before, numbers = turns[-1][-1] if turns else (-1, -1), batch[i].turns
        if before[0] == i and (t == before[1] + 1 if numbers is None else numbers[t] == numbers[before[1]]):
            turns[-1].append((i, t))
        else:
            turns.append([(i, t)])
    return turns


def turn_numbers(batch: list[Sequence]) -> list[list[int]]:
    """Turn of each token within its rollout, -1 where it is not an action."""
    numbers = [[-1] * len(s.actions) for s in batch]
    for places in episodes(batch).values():
        for k, turn in enumerate(turns_of(batch, places)):
            for i, t in turn:
                numbers[i][t] = k
    return numbers


def blank(batch: list[Sequence]) -> Rows:
    return [[None] * len(s.actions) for s in batch]


def mean_of(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def unbiased_std(values: list[float]) -> float:
    if len(values) == 1:
        return 0.0
    mean = mean_of(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))


def standard(value: float, values: list[float]) -> float:
    return (value - mean_of(values)) / (unbiased_std(values) + 1e-9)


def whitened(rows: Rows, std_norm: bool = True) -> Rows:
    flat = [x for row in rows for x in row if x is not None]
    if not flat:
        return rows
    mean = mean_of(flat)
    variance = math.fsum((x - mean) ** 2 for x in flat) / len(flat)
    scale = math.sqrt(max(variance, 1e-8)) if std_norm else 1.0
    return [[None if x is None else (x - mean) / scale for x in row] for row in rows]


def whitened_over(batch: list[Sequence], rows: Rows, over: str, std_norm: bool) -> Rows:
    """Over nothing, the batch, or each group by itself."""
    if over == "none":
        return rows
    if over == "batch":
        return whitened(rows, std_norm)
    result = list(rows)
    for group in {s.group for s in batch}:
        mine = [i for i, s in enumerate(batch) if s.group == group]
        for i, row in zip(mine, whitened([rows[i] for i in mine], std_norm), strict=True):
            result[i] = row
    return result


def gae(
    batch: list[Sequence],
    gamma: float,
    lambd: float,
    critic_lambd: float | None = None,
    length_adaptive_alpha: float | None = None,
) -> tuple[Rows, Rows]:
    """Schulman et al. 2016, eq. 11 and 16, over action tokens; VAPO's lambdas; (raw advantages, returns)."""
    advantages, returns = blank(batch), blank(batch)
    for places in episodes(batch).values():
        policy_lambd = lambd
        if length_adaptive_alpha is not None and places:
            policy_lambd = max(0.0, 1.0 - 1.0 / (length_adaptive_alpha * len(places)))
        target_lambd = policy_lambd if critic_lambd is None else critic_lambd
        running, target, next_value = 0.0, 0.0, 0.0
        for i, t in reversed(places):
            s = batch[i]
            delta = s.rewards[t] + s.extras[t] + gamma * next_value - s.values[t]
            running = delta + gamma * policy_lambd * running
            target = delta + gamma * target_lambd * target
            next_value = s.values[t]
            advantages[i][t], returns[i][t] = running, target + s.values[t]
    return advantages, returns


def turn_gae(batch: list[Sequence], gamma: float, lambd: float, critic_lambd: float | None = None) -> tuple[Rows, Rows]:
    """GAE with a turn for a step: the value at its first token, the rewards and KL of all its tokens."""
    advantages, returns = blank(batch), blank(batch)
    for places in episodes(batch).values():
        running, target, next_value = 0.0, 0.0, 0.0
        for turn in reversed(turns_of(batch, places)):
            value = batch[turn[0][0]].values[turn[0][1]]
            delta = math.fsum(batch[i].rewards[t] + batch[i].extras[t] for i, t in turn) + gamma * next_value - value
            running = delta + gamma * lambd * running
            target = delta + gamma * (lambd if critic_lambd is None else critic_lambd) * target
            next_value = value
            for i, t in turn:
                advantages[i][t], returns[i][t] = running, target + value
    return advantages, returns


def returns_to_go(batch: list[Sequence], gamma: float, *, extras_only: bool = False) -> Rows:
    rows = blank(batch)
    for places in episodes(batch).values():
        running = 0.0
        for i, t in reversed(places):
            running = (0.0 if extras_only else batch[i].rewards[t]) + batch[i].extras[t] + gamma * running
            rows[i][t] = running
    return rows


def outcomes(batch: list[Sequence], *, extras: bool = False) -> dict[Rollout, float]:
    """Outcome of each rollout: all its branches together, with the KL of its tokens if `extras`."""
    total: dict[Rollout, float] = {}
    for s in batch:
        got = math.fsum(s.rewards[t] + (s.extras[t] if extras else 0.0) for t in action_positions(s))
        total[s.group, s.sample] = total.get((s.group, s.sample), 0.0) + got
    return total


def members(total: dict[Rollout, float], group: int) -> list[float]:
    return [r for (g, _), r in total.items() if g == group]


def leave_one_out(total: dict[Rollout, float], rollout: Rollout) -> float:
    others = [r for key, r in total.items() if key[0] == rollout[0] and key != rollout]
    return total[rollout] - mean_of(others) if others else 0.0


def gpg_scale(total: dict[Rollout, float]) -> float:
    """Rollouts over rollouts of groups whose rewards differ."""
    useful = sum(len(set(members(total, group))) > 1 for group, _ in total)
    return len(total) / max(1, useful)


def optimal_baseline(batch: list[Sequence], total: dict[Rollout, float], group: int) -> float:
    """Mean of a group's outcomes weighted by the rollouts' action tokens; 0 for a group without any."""
    tokens = {key: sum(sum(s.actions) for s in batch if (s.group, s.sample) == key) for key in total if key[0] == group}
    weight = sum(tokens.values())
    return math.fsum(tokens[key] * total[key] for key in tokens) / weight if weight else 0.0


def decoupled(batch: list[Sequence], keys: list[Rollout]) -> dict[Rollout, float]:
    """GDPO: each part normalised in its group, summed by weight, normalised over the batch."""
    mixed = dict.fromkeys(keys, 0.0)
    for k, weight in enumerate(PART_WEIGHTS):
        part = {key: math.fsum(s.parts[k] for s in batch if (s.group, s.sample) == key) for key in keys}
        for key in keys:
            mixed[key] += weight * standard(part[key], members(part, key[0]))
    return {key: standard(value, list(mixed.values())) for key, value in mixed.items()}


def best_of(total: dict[Rollout, float], rollout: Rollout, k: int) -> float:
    """How the best of k of the group that have the rollout compares with the best of any k, all of which are tried."""
    everyone = [key for key in total if key[0] == rollout[0]]
    choices = list(itertools.combinations(everyone, min(k, len(everyone))))
    best = [max(total[key] for key in choice) for choice in choices]
    mine = mean_of([value for value, choice in zip(best, choices, strict=True) if rollout in choice])
    deviation = math.sqrt(mean_of([(value - mean_of(best)) ** 2 for value in best]))
    return (mine - mean_of(best)) / (deviation + 1e-9)


def outcome_advantages(kind: str, batch: list[Sequence], settings: Settings) -> dict[Rollout, float]:
    """Advantage of each rollout of the estimators that give every token of a rollout the same."""
    total = outcomes(batch, extras=kind == "rloo_sequence")
    if kind == "gdpo":
        return decoupled(batch, list(total))
    baselines = {(s.group, s.sample): s.baseline for s in batch}
    batch_mean = mean_of(list(total.values()))
    result = {}
    for rollout, mine in total.items():
        everyone = members(total, rollout[0])
        mean = mean_of(everyone)
        match kind:
            case "rloo" | "rloo_sequence":
                result[rollout] = leave_one_out(total, rollout)
            case "group_norm":
                result[rollout] = standard(mine, everyone)
            case "lite_ppo":
                result[rollout] = (mine - mean) / (unbiased_std(list(total.values())) + 1e-9)
            case "dr_grpo" | "reinforce_baseline":
                result[rollout] = mine - mean
            case "opo":
                result[rollout] = mine - optimal_baseline(batch, total, rollout[0])
            case "gpg":
                result[rollout] = gpg_scale(total) * (mine - mean)
            case "maxrl":
                result[rollout] = (mine - mean) / mean if mean > 0 else 0.0
            case "pass_at_k":
                result[rollout] = best_of(total, rollout, settings.pass_k)
            case "remax":
                result[rollout] = mine - baselines[rollout]
            case "flash_reinforce":
                result[rollout] = mine - batch_mean
            case _:
                raise AssertionError(f"no reference for estimator {kind}")
    return result


def turn_group_norm(batch: list[Sequence], gamma: float) -> Rows:
    """Rewards to go of turn k of a rollout, normalised among the group's rollouts that reached turn k; the KL still to
    come is added."""
    turns = {rollout: turns_of(batch, places) for rollout, places in episodes(batch).items()}
    togo = {
        rollout: [math.fsum(batch[i].rewards[t] for i, t in turn) for turn in mine] for rollout, mine in turns.items()
    }
    for rewards in togo.values():
        for k in reversed(range(len(rewards) - 1)):
            rewards[k] += gamma * rewards[k + 1]
    rows = returns_to_go(batch, 1.0, extras_only=True)
    for rollout, mine in turns.items():
        for k, turn in enumerate(mine):
            reached = [other[k] for (group, _), other in togo.items() if group == rollout[0] and len(other) > k]
            for i, t in turn:
                rows[i][t] = (rows[i][t] or 0.0) + standard(togo[rollout][k], reached)
    return rows


def process_group_norm(batch: list[Sequence]) -> Rows:
    """Each turn's reward normalised among all turns of the group, summed from the turn on; the KL still to come is
    added."""
    turns = {rollout: turns_of(batch, places) for rollout, places in episodes(batch).items()}
    rewards = {
        rollout: [math.fsum(batch[i].rewards[t] for i, t in turn) for turn in mine] for rollout, mine in turns.items()
    }
    rows = returns_to_go(batch, 1.0, extras_only=True)
    for rollout, mine in turns.items():
        everyone = [r for (group, _), theirs in rewards.items() if group == rollout[0] for r in theirs]
        for k, turn in enumerate(mine):
            advantage = math.fsum(standard(r, everyone) for r in rewards[rollout][k:])
            for i, t in turn:
                rows[i][t] = (rows[i][t] or 0.0) + advantage
    return rows


def gigpo(batch: list[Sequence], gamma: float, weight: float, no_std_norm: bool) -> Rows:
    """The outcome normalised in the group, plus `weight` times the discounted rewards from the turn on, normalised
    among all turns of the group in the same state; the KL still to come is added. With `no_std_norm` both are compared
    with the mean alone."""

    def compared(value: float, among: list[float]) -> float:
        return value - mean_of(among) if no_std_norm else standard(value, among)

    total = outcomes(batch)
    turns = {rollout: turns_of(batch, places) for rollout, places in episodes(batch).items()}
    steps: dict[tuple[Rollout, int], tuple[int, float]] = {}  # state and rewards to go
    for rollout, mine in turns.items():
        togo = 0.0
        for k, turn in reversed(list(enumerate(mine))):
            togo = math.fsum(batch[i].rewards[t] for i, t in turn) + gamma * togo
            first, place = turn[0]
            steps[rollout, k] = batch[first].states[place], togo
    rows = returns_to_go(batch, 1.0, extras_only=True)
    for rollout, mine in turns.items():
        for k, turn in enumerate(mine):
            state, togo = steps[rollout, k]
            alike = [g for (other, _), (s, g) in steps.items() if other[0] == rollout[0] and s == state]
            advantage = compared(total[rollout], members(total, rollout[0])) + weight * compared(togo, alike)
            for i, t in turn:
                rows[i][t] = (rows[i][t] or 0.0) + advantage
    return rows


def token_baseline(batch: list[Sequence]) -> Rows:
    """Reward to go minus the mean of the group's at the same place, weighted by the squared gradients up to it; of the
    longest rollout's last tokens the last such mean."""
    togo, rows = returns_to_go(batch, 1.0), blank(batch)
    energies: dict[Rollout, list[float]] = {}
    for rollout, places in episodes(batch).items():
        sums = energies.setdefault(rollout, [])
        for i, t in places:
            p = math.exp(batch[i].logprobs[t])
            sums.append((sums[-1] if sums else 0.0) + 1 - 2 * p + math.exp(-batch[i].collisions[t]))
    for rollout, places in episodes(batch).items():
        group = {key: mine for key, mine in episodes(batch).items() if key[0] == rollout[0]}
        for number, (i, t) in enumerate(places):
            compared = min(number, sorted(map(len, group.values()))[-2] - 1) if len(group) > 1 else -1
            if compared < 0:
                rows[i][t] = 0.0
                continue
            reached = {key: mine[compared] for key, mine in group.items() if len(mine) > compared}
            weights = [energies[key][compared] for key in reached]
            returns = [togo[j][u] or 0.0 for j, u in reached.values()]
            mean = math.fsum(w * g for w, g in zip(weights, returns, strict=True)) / math.fsum(weights)
            rows[i][t] = (togo[i][t] or 0.0) - mean
    return rows


def prefix_weighted(batch: list[Sequence], weight: float) -> Rows:
    """Each token's KL addition, more where the sizes of those before it are a small part of the episode's."""
    rows = blank(batch)
    for places in episodes(batch).values():
        sizes = [abs(batch[i].extras[t]) for i, t in places]
        total = math.fsum(sizes)
        for number, (i, t) in enumerate(places):
            prefix = math.fsum(sizes[:number]) / total if total else 0.0
            rows[i][t] = batch[i].extras[t] * (1 + weight * (1 - prefix))
    return rows


def raw(kind: str, batch: list[Sequence], settings: Settings) -> tuple[Rows, Rows]:
    """(advantages before whitening, returns) of every estimator."""
    match kind:
        case "gae":
            return gae(batch, settings.gamma, settings.lambd, settings.critic_lambd, settings.length_adaptive_alpha)
        case "turn_gae":
            return turn_gae(batch, settings.gamma, settings.lambd, settings.critic_lambd)
        case "reinforce":
            rows = returns_to_go(batch, settings.gamma)
        case "turn_group_norm":
            rows = turn_group_norm(batch, settings.gamma)
        case "process_group_norm":
            rows = process_group_norm(batch)
        case "gigpo":
            rows = gigpo(batch, settings.gamma, settings.step_weight, settings.no_std_norm)
        case "on_policy_distill":
            rows = [[x if a else None for x, a in zip(s.extras, s.actions, strict=True)] for s in batch]
        case "optimal_token_baseline":
            rows = token_baseline(batch)
        case "iw_opd":
            rows = prefix_weighted(batch, settings.prefix_weight)
        case _:
            advantage = outcome_advantages(kind, batch, settings)
            to_go = returns_to_go(batch, 1.0, extras_only=True)
            if kind == "rloo_sequence":
                to_go = [[None if x is None else 0.0 for x in row] for row in to_go]
            rows = [
                [None if x is None else advantage[s.group, s.sample] + x for x in row]
                for s, row in zip(batch, to_go, strict=True)
            ]
    return rows, rows


def random_batch(seed: int, *, long: bool = False, negative: bool = True) -> list[Sequence]:
    """Ragged groups in random order, several turns with observations between, branches, empty of actions at times; with
    `negative`, some rewards are."""
    rng, own = random.Random(seed), random.Random(seed + 1)
    batch = []
    for group in range(rng.randint(1, 4)):
        greedy = own.choice([0.0, 1.0, 0.25])
        for sample in range(rng.randint(1, 5)):
            for _ in range(2 if rng.random() < 0.2 else 1):
                actions = [False] * rng.randint(1, 4)
                for _ in range(rng.randint(0, 3)):
                    actions += [True] * rng.randint(1, 150 if long else 6) + [False] * rng.randint(0, 5)
                n = len(actions)
                ends = [t for t in range(n) if actions[t] and (t + 1 == n or not actions[t + 1])]
                rewards = [
                    rng.choice([0.0, 1.0, 0.5, -2.0 if negative else 2.0]) if t in ends else 0.0 for t in range(n)
                ]
                batch.append(
                    Sequence(
                        group=group * 7,
                        sample=sample,
                        rewards=rewards,
                        extras=[rng.gauss(0, 0.1) if a else 0.0 for a in actions],
                        values=[rng.gauss(0, 1) if a else 0.0 for a in actions],
                        actions=actions,
                        baseline=greedy,
                        parts=[own.choice([0.0, 1.0, 0.5, -2.0]), own.choice([0.0, 3.0, 1.0])],
                    )
                )
    if not any(any(s.actions) for s in batch):
        batch[0].actions[-1] = True
    rng.shuffle(batch)
    return batch


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ratio_of(x: float) -> float:
    return math.exp(clamp(x, -20.0, 20.0))


def bernoulli_kl(base_logprob: float, logprob: float) -> float:
    """KL of "this token or another"."""
    p, q = min(base_logprob, -1e-7), min(logprob, -1e-7)
    rest_p, rest_q = -math.expm1(p), -math.expm1(q)
    others = rest_p * clamp(math.log(rest_p) - math.log(rest_q), -20.0, 20.0)
    return max(0.0, math.exp(p) * clamp(p - q, -20.0, 20.0) + others)


@attrs.define
class Tokens:
    """A micro-batch for the losses: per token; `sequence` numbers from 0."""

    logprobs: list[float]
    old: list[float]
    advantages: list[float]
    actions: list[bool]
    sequence: list[int]
    selected: list[bool]

    @property
    def sequences(self) -> int:
        return max(self.sequence) + 1

    def of(self, sequence: int) -> list[int]:
        """The action tokens of a sequence."""
        return [t for t, s in enumerate(self.sequence) if s == sequence and self.actions[t]]


@attrs.frozen
class LossSettings:
    """The options of a policy loss, named as the domain's."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    cov_kl_coef: float = 1.0
    vespo_k: tuple[float, float] = (2.0, 3.0)
    vespo_lambda: tuple[float, float] = (3.0, 2.0)
    dro_beta: float = 0.05


def surrogate(rho: float, advantage: float, settings: LossSettings) -> float:
    """PPO's clipped loss of one token."""
    gain = min(rho * advantage, clamp(rho, 1 - settings.clip_low, 1 + settings.clip_high) * advantage)
    if settings.dual_clip is not None and advantage < 0:
        gain = max(gain, settings.dual_clip * advantage)
    return -gain


def sequence_ratio(kind: str, t: int, tokens: Tokens, logprobs: list[float], anchor: list[float]) -> float:
    """The ratio of a token's whole sequence; of gspo_token at `anchor`, moved by the token's own log-prob."""
    mine = tokens.of(tokens.sequence[t])
    if kind == "sequence_ppo":
        return ratio_of(math.fsum(logprobs[i] - tokens.old[i] for i in mine))
    if kind == "gspo":
        return ratio_of(math.fsum(logprobs[i] - tokens.old[i] for i in mine) / len(mine))
    fixed = ratio_of(math.fsum(anchor[i] - tokens.old[i] for i in mine) / len(mine))
    return fixed * math.exp(logprobs[t] - anchor[t])


def gmpo(t: int, tokens: Tokens, logprobs: list[float], settings: LossSettings) -> float:
    mine = tokens.of(tokens.sequence[t])
    kept = []
    for i in mine:
        x, advantage = clamp(logprobs[i] - tokens.old[i], -20.0, 20.0), tokens.advantages[i]
        sign = (advantage > 0) - (advantage < 0)
        kept.append(sign * min(sign * x, sign * clamp(x, -settings.clip_low, settings.clip_high)))
    return -math.exp(mean_of(kept)) * mean_of([tokens.advantages[i] for i in mine])


def policy_loss(
    kind: str, tokens: Tokens, settings: LossSettings, logprobs: list[float], anchor: list[float]
) -> list[float]:
    """Loss of each action token at `logprobs`, 0 elsewhere; what the loss takes for a constant is taken at `anchor`."""
    result = [0.0] * len(logprobs)
    for t, action in enumerate(tokens.actions):
        if not action:
            continue
        old, advantage = tokens.old[t], tokens.advantages[t]
        rho, fixed = ratio_of(logprobs[t] - old), ratio_of(anchor[t] - old)
        match kind:
            case "ppo":
                loss = surrogate(rho, advantage, settings)
            case "sequence_ppo" | "gspo" | "gspo_token":
                loss = surrogate(sequence_ratio(kind, t, tokens, logprobs, anchor), advantage, settings)
            case "gmpo":
                loss = gmpo(t, tokens, logprobs, settings)
            case "cispo":
                loss = -clamp(fixed, 1 - settings.clip_low, 1 + settings.clip_high) * advantage * logprobs[t]
            case "sapo":
                tau = settings.sapo_tau[0] if advantage > 0 else settings.sapo_tau[1]
                loss = -4 / tau / (1 + math.exp(-tau * (rho - 1))) * advantage
            case "vespo":
                whole = ratio_of(math.fsum(anchor[i] - tokens.old[i] for i in tokens.of(tokens.sequence[t])))
                sign = 0 if advantage >= 0 else 1
                k, rate = settings.vespo_k[sign], settings.vespo_lambda[sign]
                # phi(W) = W^k e^(-rate W), divided by its value at W = 1
                loss = -(whole**k) * math.exp(-rate * whole) / math.exp(-rate) * advantage * logprobs[t]
            case "topr":
                whole = ratio_of(math.fsum(anchor[i] - tokens.old[i] for i in tokens.of(tokens.sequence[t])))
                loss = -(1.0 if advantage >= 0 else clamp(whole, 0.0, 1.0)) * advantage * logprobs[t]
            case "dro":
                loss = -(advantage * logprobs[t] - settings.dro_beta / 2 * (logprobs[t] - old) ** 2)
            case "clip_cov":
                loss = 0.0 if tokens.selected[t] else surrogate(rho, advantage, settings)
            case "kl_cov":
                loss = -rho * advantage
                if tokens.selected[t]:
                    loss += settings.cov_kl_coef * abs(logprobs[t] - old)
            case "dppo_tv" | "dppo_kl":
                change = math.exp(anchor[t]) - math.exp(old)
                size = abs(change) if kind == "dppo_tv" else bernoulli_kl(old, anchor[t])
                leaves_up = change > 0 and advantage > 0 and size > settings.clip_high
                leaves_down = change < 0 and advantage < 0 and size > settings.clip_low
                weight = min(fixed, 20.0) * math.exp(logprobs[t] - anchor[t])
                loss = 0.0 if leaves_up or leaves_down else -weight * advantage
            case "policy_gradient":
                loss = -advantage * logprobs[t]
            case _:
                raise AssertionError(f"no reference for policy loss {kind}")
        result[t] = loss
    return result


def policy_loss_gradient(
    kind: str, tokens: Tokens, settings: LossSettings, weights: list[float], step: float = 1e-6
) -> list[float]:
    """Central finite difference of the weighted sum of the reference."""

    def total(t: int, moved: float) -> float:
        logprobs = list(tokens.logprobs)
        logprobs[t] += moved
        losses = policy_loss(kind, tokens, settings, logprobs, tokens.logprobs)
        return math.fsum(w * x for w, x in zip(weights, losses, strict=True))

    return [(total(t, step) - total(t, -step)) / (2 * step) for t in range(len(tokens.logprobs))]


def kl_estimate(kind: str, logprob: float, reference: float, old: float) -> float:
    """One token; k3_unbiased takes the importance ratio over `old`, and alone has no bound."""
    x = logprob - reference
    bounded = clamp(x, -20.0, 20.0)
    k3 = math.exp(-bounded) - 1 + bounded
    if kind == "k3_unbiased":
        return ratio_of(logprob - old) * k3
    return clamp({"k1": x, "k2": x * x / 2, "k3": k3, "abs": abs(x)}[kind], -10.0, 10.0)


def loss_weights(mode: str, batch: list[Sequence], max_length: int) -> list[float]:
    """Weight of each token from the mean that the mode is; the branches of a rollout are one sequence."""
    of_rollout = {rollout: len(places) for rollout, places in episodes(batch).items()}
    live = sum(count > 0 for count in of_rollout.values())
    of_group = {s.group: sum(n for (group, _), n in of_rollout.items() if group == s.group) for s in batch}
    live_groups = sum(count > 0 for count in of_group.values())
    result = []
    for s in batch:
        for action in s.actions:
            if not action:
                result.append(0.0)
                continue
            shares = {
                "token_mean": sum(of_rollout.values()),
                "sequence_mean": live * of_rollout[s.group, s.sample],
                "prompt_mean": live_groups * of_group[s.group],
                "constant_length": live * max_length,
                "sequence_sum": live,
                "token_sum": 1,
            }
            result.append(1 / shares[mode])
    return result


def high_entropy(entropies: list[float], actions: list[bool], share: float) -> list[bool]:
    """Wang et al. 2025, section 5: entropy is at least the quantile 1 - share, between neighbours linear."""
    ordered = sorted(h for h, action in zip(entropies, actions, strict=True) if action)
    if not ordered:
        return list(actions)
    place = (1 - Fraction(str(share))) * (len(ordered) - 1)
    below, part = ordered[math.floor(place)], place - math.floor(place)
    above = ordered[math.ceil(place)]
    threshold = Fraction(below) + part * (Fraction(above) - Fraction(below))
    return [action and Fraction(h) >= threshold for h, action in zip(entropies, actions, strict=True)]


def kept_by_second_moment(tokens: Tokens, threshold: float) -> list[bool]:
    """M2PO: of the action tokens those furthest off leave until the mean squared log-ratio of the others is small."""
    squares = {t: (tokens.logprobs[t] - tokens.old[t]) ** 2 for t, action in enumerate(tokens.actions) if action}
    while squares and mean_of(list(squares.values())) > threshold:
        worst = max(squares.values())
        squares = {t: square for t, square in squares.items() if square < worst}
    return [t in squares for t in range(len(tokens.actions))]


@attrs.frozen
class CorrectionSettings:
    """The options of an off-policy correction, named as the domain's."""

    level: str
    mode: str
    gate: str
    low: float
    high: float
    threshold: float
    bypass: bool


def correction_weight(settings: CorrectionSettings, t: int, tokens: Tokens) -> float:
    """The weight of one token; `tokens.old` are the sampler's log-probs."""
    if not tokens.actions[t]:
        return 0.0

    def log_ratio(i: int) -> float:
        return clamp(tokens.logprobs[i] - tokens.old[i], -20.0, 20.0)

    def statistic(i: int) -> float:
        base, new = tokens.old[i], tokens.logprobs[i]
        match settings.gate:
            case "binary_kl":
                return bernoulli_kl(base, new)
            case "tv":
                return abs(math.exp(base) - math.exp(new))
            case _:
                return base - new

    mine = tokens.of(tokens.sequence[t])
    match settings.level:
        case "token":
            level = ratio_of(log_ratio(t))
        case "sequence":
            level = ratio_of(math.fsum(log_ratio(i) for i in mine))
        case _:
            level = ratio_of(mean_of([log_ratio(i) for i in mine]))
    if settings.gate != "ratio":
        measured = statistic(t) if settings.level == "token" else mean_of([statistic(i) for i in mine])
        exempt = settings.gate == "opsm" and tokens.advantages[t] >= 0
        if measured > settings.threshold and not exempt:
            return 0.0
    match settings.mode:
        case "truncate":
            weight = min(level, settings.high)
        case "clip":
            weight = clamp(level, settings.low, settings.high)
        case _:
            if settings.gate == "ratio" and not settings.low <= level <= settings.high:
                return 0.0
            weight = ratio_of(log_ratio(t))
    return 1.0 if settings.bypass else weight
