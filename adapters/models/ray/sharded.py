"""Policy, critic and reference whose parts are in the processes of a group, behind the ports of models.

A batch is divided by tokens (`domain.batches.sharding`) over the processes, or over groups of neighbouring ranks: all
of a group get one part (`wire.py`), and divide its tokens (`adapters.models.torch.layers.sequence_parallel`).
Weights are sent by the processes themselves and cross no pipe.
Does not own: how a process computes its part (`adapters.models.torch`, `adapters.models.deepspeed`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.models.ray.group_state import GroupState
from rollgrad.adapters.models.ray.replaced_group import ReplacedGroup
from rollgrad.adapters.models.ray.wire import (
    LOGPROBS,
    PREDICT,
    PREDICTED,
    SCORE,
    SCORES,
    VALUES,
    Recording,
    SentReplies,
    divided,
    merged,
)
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.rewards.model import Judge
from rollgrad.adapters.weights.shared_buckets import Assembler, SharedMemory, fill_at
from rollgrad.adapters.weights.transfer import Send
from rollgrad.application.learning.update import Listening
from rollgrad.domain.batches.metrics import joined
from rollgrad.domain.batches.packed import Batch, PackedBatch
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.batches.sharding import sequences_of_shares
from rollgrad.domain.episodes.rewards import RewardInput
from rollgrad.domain.errors import WorkerError
from rollgrad.domain.ports.models import (
    AveragedPolicy,
    PolicyObjective,
    PredictingModel,
    Predictions,
    ReferenceModel,
    TokenScores,
    TrainedReward,
    ValueModel,
    ValueObjective,
)


class _Trained:
    """Common part of a policy and a critic; each `width` neighbouring processes have one part of a batch."""

    def __init__(self, group: WorkerGroup, *, width: int = 1) -> None:
        self._group = group
        self._parts = _Parts(group, width)

    def padded(self) -> bool:
        """Returns what the port says."""
        return self._parts.padded

    def save(self, path: Path) -> None:
        """Saves the model as its port says; the first process writes."""
        self._group.all("save", path.absolute())  # processes have working directories of their own

    def sleep(self) -> None:
        """Moves what optimizer steps alone need to the CPU's memory, until the next update."""
        self._group.all("sleep")

    def state_dict(self) -> GroupState:
        """Returns the state as the port says, until the next update; its processes have it."""
        return GroupState(self._group, lambda: self._parts.updates)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state as the port says."""
        self._parts.updates += 1
        self._group.all("load_state_dict", state.whole() if isinstance(state, GroupState) else state)


class _Predicting(PredictingModel):
    """Common part of a policy and a reference."""

    _parts: "_Parts"

    def predict(self, batch: PackedBatch, top_k: int) -> Predictions:
        """Implements `PredictingModel.predict`."""
        found, mask_N = self._parts.predictions(self._parts.pass_of(batch), top_k), batch.action_mask_N
        return Predictions(ids_AK=found.ids_AK[mask_N], logprobs_AB=found.logprobs_AB[mask_N])

    def predictions(self, passes: Passes[Any], top_k: int) -> Predictions:
        """Implements `PredictingModel.predictions`."""
        return self._parts.predictions(passes, top_k)


class ShardedPolicy(_Predicting, _Trained, AveragedPolicy):
    """A `PolicyModel`; each process of `group` holds a `RankPolicy`, and each `width` neighbours one part of a
    batch."""

    def __init__(self, group: WorkerGroup, *, width: int = 1) -> None:
        super().__init__(group, width=width)
        self.steps = 0
        """Optimizer steps begun."""

    def score(self, batch: PackedBatch) -> TokenScores:
        """Implements `PolicyModel.score`."""
        return self._parts.score(batch)

    def logprobs(self, passes: Passes[Any]) -> Tensor:
        """Implements `PolicyModel.logprobs`."""
        return self._parts.logprobs(passes)

    def scores(self, passes: Passes[Any]) -> TokenScores:
        """Implements `PolicyModel.scores`."""
        return self._parts.scores(passes)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Implements `AveragedPolicy.averaged`."""
        self._group.all("begin_average")
        try:
            yield
        except BaseException:
            with suppress(WorkerError):  # the first error may have ended the group
                self._group.all("end_average")
            raise
        self._group.all("end_average")

    def update(self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch]) -> dict[str, float]:
        """Implements `PolicyModel.update`."""
        self.steps += 1
        return self._parts.update(micro_batches, objective)

    def sent(
        self, send: Send, *arguments: Any, ranks: Sequence[int] = (0,), adapter: bool = False
    ) -> Iterator[list[Any]]:
        """Implements `DividedPolicy.sent`."""
        what = "adapter" if adapter else "weights"
        yield from self._group.read(
            f"open_{what}",
            send,
            *arguments,
            ranks=ranks,
            following="next_update",
            rest="skip_weights",
            others=f"gather_{what}",
        )

    def parts(self) -> int:
        """Implements `DividedPolicy.parts`."""
        return self._group.size if self._has_parts else 0

    @cached_property
    def _has_parts(self) -> bool:
        return self._group.size > 1 and self._group.on_this_machine() and all(self._group.all("has_parts"))

    def sent_parts(self, send: Send, *arguments: Any) -> Iterator[list[Any]]:
        """Implements `DividedPolicy.sent_parts`."""
        yield from self._group.read(
            "open_parts",
            send,
            *arguments,
            ranks=range(self._group.size),
            following="next_update",
            rest="skip_weights",
            others="gather_weights",
        )

    def address(self) -> tuple[str, int]:
        """Implements `DividedPolicy.address`."""
        return self._group.address()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Implements `PolicyModel.weights`; copies on the CPU."""
        memory = SharedMemory()
        try:
            assembler = Assembler(torch.device("cpu"))
            for [(index, pieces)] in self.sent(fill_at, memory.path, memory.bucket_bytes):
                memory.unlink()  # the sender has it open too, so no file is left whatever happens now
                yield from assembler.take(memory.bucket(index), pieces)
        finally:
            memory.unlink()


class ShardedValue(_Trained, ValueModel):
    """A `ValueModel`; each process of `group` holds a `TorchValue`, and each `width` neighbours one part of a batch."""

    def values(self, batch: PackedBatch) -> Tensor:
        """Implements `ValueModel.values`."""
        return self._parts.values(self._parts.pass_of(batch))

    def all_values(self, passes: Passes[Any]) -> Tensor:
        """Implements `ValueModel.all_values`."""
        return self._parts.values(passes)

    def update(self, micro_batches: Sequence[Batch], objective: ValueObjective[Batch]) -> dict[str, float]:
        """Implements `ValueModel.update`."""
        return self._parts.update(micro_batches, objective)


class ShardedReward(ShardedValue, TrainedReward):
    """A `TrainedReward`; each process of `group` holds a `TorchReward`, and each `width` neighbours one part of a
    batch."""

    def set_moments(self, moments: tuple[float, float] | None) -> None:
        """Implements `TrainedReward.set_moments`."""
        self._group.all("set_moments", moments)


class ShardedReference(_Predicting, ReferenceModel):
    """A `ReferenceModel`; each process of `group` holds a whole `TorchReference`, and each `width` neighbours one part
    of a batch."""

    def __init__(self, group: WorkerGroup | ReplacedGroup, *, width: int = 1) -> None:
        self._parts = _Parts(group, width)

    def padded(self) -> bool:
        """Implements `ReferenceModel.padded`."""
        return self._parts.padded

    def score(self, batch: PackedBatch) -> TokenScores:
        """Implements `ReferenceModel.score`."""
        return self._parts.score(batch)

    def logprobs(self, passes: Passes[Any]) -> Tensor:
        """Implements `ReferenceModel.logprobs`."""
        return self._parts.logprobs(passes)


def reward_copies(group: WorkerGroup | ReplacedGroup) -> list[Judge]:
    """Returns functions that call the whole `RewardModel` of each process of `group`."""

    def judge(rank: int, replies: Sequence[RewardInput]) -> list[tuple[float, bool]]:
        judged: list[tuple[float, bool]] = group.some("judge", [rank], SentReplies.of(replies))[0]
        return judged

    return [partial(judge, rank) for rank in range(group.size)]


def divided_reward(group: WorkerGroup | ReplacedGroup) -> list[Judge]:
    """Returns the only function that calls the `RewardModel` which the processes of `group` divide: each scores a share
    of the replies, all at the same time."""

    def judge(replies: Sequence[RewardInput]) -> list[Any]:
        longest_first = sorted(range(len(replies)), key=lambda i: (len(replies[i].text), i), reverse=True)
        shares = [longest_first[rank :: group.size] for rank in range(group.size)]
        found = group.each("judge", [[SentReplies.of([replies[index] for index in own])] for own in shares])
        judged = {
            i: verdict for own, part in zip(shares, found, strict=True) for i, verdict in zip(own, part, strict=True)
        }
        return [judged[index] for index in range(len(replies))]

    return [judge]


class _Parts:
    """Calls in which each `width` neighbouring processes get one part of a batch, and return equal results."""

    def __init__(self, group: WorkerGroup | ReplacedGroup, width: int) -> None:
        self._group = group
        self._width = width
        self.updates = 0
        """How often the model has changed."""

    def score(self, batch: PackedBatch) -> TokenScores:
        """Returns the log-probs and entropy of the whole batch, in one pass."""
        return TokenScores(**self._columns(SCORE, self._planned(batch)))

    def logprobs(self, passes: Passes[Any]) -> Tensor:
        """Returns the log-probs of the whole batch; one call for all passes."""
        return self._columns(LOGPROBS, passes)["logprobs_N"]

    def scores(self, passes: Passes[Any]) -> TokenScores:
        """Returns the log-probs and entropy of the whole batch, and its experts if the model keeps them; one call."""
        return TokenScores(**self._columns(SCORES, passes))

    def values(self, passes: Passes[Any]) -> Tensor:
        """Returns the values of the whole batch; one call for all passes."""
        return self._columns(VALUES, passes)[VALUES]

    def predictions(self, passes: Passes[Any], top_k: int) -> Predictions:
        """Returns the predictions of all tokens of the whole batch; one call for all passes."""
        columns = self._columns(PREDICT, passes, top_k)
        return Predictions(ids_AK=columns[PREDICTED[0]], logprobs_AB=columns[PREDICTED[1]])

    def pass_of(self, batch: Batch) -> Passes[Batch]:
        """Returns a batch as one pass."""
        return self._planned(batch)

    def update(
        self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch] | ValueObjective[Batch]
    ) -> dict[str, float]:
        """Takes one optimizer step, in which every process has a part of each micro-batch."""
        self.updates += 1
        if isinstance(micro_batches, Passes) and micro_batches.shares == self._count:
            passes = [micro_batches]
        else:
            passes = [self._planned(batch) for batch in micro_batches]
        parts = [divided(each, self._count) for each in passes]
        listening = objective if isinstance(objective, Listening) else None
        loss = self._group.put(objective if listening is None else Recording(listening.objective))
        results = self._each("update", [[[own[part] for own in parts], loss] for part in range(self._count)])
        if listening is None:
            return joined(results)
        for number, each in enumerate(passes):
            _tell(listening, each, [told[number] for _, told in results])
        return joined([metrics for metrics, _ in results])

    @cached_property
    def padded(self) -> bool:
        """Whether the processes compute sequences padded."""
        return bool(self._group.all("padded")[0])

    @property
    def _count(self) -> int:
        return self._group.size // self._width

    def _planned(self, batch: Batch) -> Passes[Batch]:
        return Passes(batch, [[own.tolist() for own in sequences_of_shares(batch, self._count)]])

    def _columns(self, method: str, passes: Passes[Any], *more: Any) -> dict[str, Tensor]:
        if passes.shares != self._count:
            found = [self._columns(method, self._planned(batch), *more) for batch in passes]
            return {name: passes.merged([columns[name] for columns in found]) for name in found[0]}
        results = self._each(method, [[[part], *more] for part in divided(passes, self._count)])
        return merged(passes, results)

    def _each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns the results by part, from one process of each."""
        if self._width > 1:
            put = self._group.put
            arguments = [
                [put(argument) if isinstance(argument, list) else argument for argument in a] for a in arguments
            ]
        own = [arguments[rank // self._width] for rank in range(self._group.size)]
        return self._group.each(method, own)[:: self._width]


def _tell(listening: Listening, passes: Passes[Any], told: Sequence[Mapping[str, Any]]) -> None:
    """Tells an objective what its parts were told in their processes."""
    columns = merged(passes, told)
    clipped_N = columns.pop("clipped_N", None)
    listening.hear(passes.whole, TokenScores(**columns), None if clipped_N is None else clipped_N.bool())
