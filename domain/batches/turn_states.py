"""The states in which the turns of a batch were played, as numbers that tell the same from others."""

from collections import Counter
from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.domain.episodes.trajectory import SegmentKind, Trajectory


@frozen(kw_only=True, eq=False)
class TurnStates:
    """`ids_N` int64: the state of each action token, from 0, equal where two turns were played in the same one, -1
    outside actions; no other turn has that of a turn whose state is unknown. `shared_share`: share of the turns whose
    group has another one in the same state."""

    ids_N: Tensor
    shared_share: float

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> "TurnStates":
        """Returns the states of trajectories, laid end to end as `pack` does."""
        ids_N = torch.full((sum(map(len, trajectories)),), -1, dtype=torch.int64)
        numbers: dict[int, int] = {}
        turns: list[tuple[int, str, int]] = []
        unknown = start = 0
        for trajectory in trajectories:
            for segment in trajectory.segments:
                if segment.kind is not SegmentKind.ACTION:
                    continue
                if segment.state is None:
                    number, unknown = len(numbers) + unknown, unknown + 1
                else:
                    number = numbers.get(segment.state, len(numbers) + unknown)
                    numbers.setdefault(segment.state, number)
                ids_N[start + segment.start : start + segment.stop] = number
                turns.append((trajectory.group_id, trajectory.role, number))
            start += len(trajectory)
        played = Counter(turns)
        return cls(ids_N=ids_N, shared_share=sum(played[turn] > 1 for turn in turns) / max(1, len(turns)))
