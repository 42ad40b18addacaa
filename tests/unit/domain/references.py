"""Random batches for the references: sequences as plain lists."""

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


def blank(sequence: Sequence) -> list[float | None]:
    return [None] * len(sequence.actions)


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
