"""Rollouts of a run, token by token: a Parquet file for each update and each evaluation, in `trajectories/`.

Invariants: a file appears whole, under its name, or not at all; together the files are no larger than the limit, or
than those that were there when the run went on, but for the newest one. On a full disk the oldest make room for newer
ones, and for checkpoints. Does not own: the columns (`trajectory_table`),
nor reading (`trajectory_files`).
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from rollgrad.adapters.checkpoints.files import is_full, replace_file
from rollgrad.adapters.checkpoints.lock import keep_locked
from rollgrad.adapters.tracking.trajectory_files import PREFIXES, step_of, trajectory_files, trajectory_path
from rollgrad.adapters.tracking.trajectory_table import Spans, TokenText, trajectory_table
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.rollouts.trajectory_log import TrajectoryLog
from rollgrad.domain.batches.packed import RolloutBatch, pack
from rollgrad.domain.ports.chat_codec import ChatCodec

if TYPE_CHECKING:
    import pyarrow

log = structlog.get_logger(__name__)

BYTES_PER_GIB = 2**30
ROWS_PER_GROUP = 64
"""Rows that are compressed together: few, so that a reader of one trajectory unpacks no others."""
KEPT_OF_FULL = 0.9
"""Share of the files' size that is kept where they have filled the disk: the rest is room for the run's logs."""


class ParquetTrajectories(TrajectoryLog):
    """Writes files in a thread of its own, one at a time: a step waits for the file of the one before. If a file cannot
    be written, the run goes on without it; the first is named at once, their number at the end.

    Args:
        directory: where the files are; it is made with the first one, and again if it was removed.
        codec: has the text of tokens; a copy of it is made at once, before others use it, because a tokenizer serves
            one thread at a time.
        max_gib: size of all files above which the oldest are removed, those of updates before those of evaluations; 0
            writes none. If those of an earlier process have more, they may keep it: only new ones displace them.
        secrets: returns the parts (start, stop) of a text that are never written.
    """

    def __init__(
        self,
        directory: Path,
        codec: ChatCodec,
        *,
        max_gib: float,
        secrets: Spans = lambda text: (),
    ) -> None:
        self._directory = directory
        self._limit = max_gib * BYTES_PER_GIB
        self._secrets = secrets
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trajectories")
        self._writing: Future[None] | None = None
        self._sizes: dict[Path, int] | None = None  # of all files; None before the first one is written
        self._failed = 0
        self._thinned = False
        self._codec = codec
        if self._limit:
            try:
                self._codec = copy.deepcopy(codec)
            except Exception as error:  # a user's own: training goes on without the files
                log.warning("no trajectories are kept: the codec cannot be copied", error=str(error))
                self._limit = 0.0

    def update(self, step: int, groups: Sequence[RolloutGroup], batch: RolloutBatch) -> None:
        """Begins to write `step-N.parquet`."""
        self._begin("update", step, groups, batch)

    def evaluation(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Begins to write `eval-N.parquet`."""
        self._begin("evaluation", step, groups, None)

    def flush(self) -> None:
        """Waits until all that was given is written, or has failed."""
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Waits until all is written; idempotent."""
        self._writer.shutdown(wait=True)
        if self._failed > 1:
            log.warning("some files of trajectories could not be written", files=self._failed)
        self._failed = 0

    def _begin(self, kind: str, step: int, groups: Sequence[RolloutGroup], batch: RolloutBatch | None) -> None:
        if not self._limit:
            return
        path = trajectory_path(self._directory.parent, step, kind)
        with self._surviving(path):
            self.flush()
            self._writing = self._writer.submit(self._write, path, kind, step, tuple(groups), batch)

    @cached_property
    def _text(self) -> TokenText:
        return TokenText(partial(self._codec.decode, special_tokens=True))

    def _write(
        self,
        path: Path,
        kind: str,
        step: int,
        groups: Sequence[RolloutGroup],
        batch: RolloutBatch | None,
    ) -> None:
        with self._surviving(path):
            if batch is None:
                played = [trajectory for group in groups for trajectory in group.trajectories]
                batch = pack(played) if played else None
            table = trajectory_table(
                kind, step, groups, batch, text=self._text, plain=self._codec.decode, secrets=self._secrets
            )
            content = _parquet(table)
            keep_locked(self._directory.parent)
            self._directory.mkdir(parents=True, exist_ok=True)  # also where it was removed meanwhile
            if self._sizes is None:
                self._sizes = _sizes(self._directory.parent)
                self._limit = max(self._limit, sum(self._sizes.values()))
            try:
                replace_file(path, content)
            except OSError as error:
                if not (is_full(error) and self._shrink()):
                    raise
                replace_file(path, content)
            self._sizes[path] = len(content)
            self._thin(path)

    @contextmanager
    def _surviving(self, path: Path) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk, a label whose text raises: training goes on without the file
            self._failed += 1
            if self._failed == 1:
                log.warning(
                    "trajectories could not be written; the run goes on without them", path=str(path), error=str(error)
                )

    def _shrink(self) -> bool:
        """Removes the oldest files of a full disk, and sets the limit to what is left; returns whether there are
        any."""
        self._sizes = _sizes(self._directory.parent)  # others may have made room, too
        if not self._sizes:
            return False
        self._limit = KEPT_OF_FULL * sum(self._sizes.values())
        self._tell("the disk is full: from now on the oldest trajectories are removed")
        self._thin(None)
        return True

    def _thin(self, newest: Path | None) -> None:
        """Removes the oldest files beyond the limit."""
        assert self._sizes is not None
        excess = sum(self._sizes.values()) - self._limit
        if excess <= 0:
            return
        self._tell("trajectories have reached --logger.trajectories_max_gib: from now on the oldest are removed")
        for path in _oldest_first(self._sizes):
            if excess <= 0:
                return
            if path != newest:
                path.unlink(missing_ok=True)
                excess -= self._sizes.pop(path)

    def _tell(self, event: str) -> None:
        """Reports once that files are removed."""
        if not self._thinned:
            log.warning(event, gib=self._limit / BYTES_PER_GIB, directory=str(self._directory))
            self._thinned = True


def make_room(run: Path, lack: int | None, share: float) -> bool:
    """Removes the oldest of a run's files of trajectories for what is worth more: as many as have the bytes that it
    lacks or, where the lack is not known, all but a share; returns whether it has. None is removed in vain: where all
    together have fewer bytes.

    Raises:
        CheckpointError: another run has taken the directory.
    """
    keep_locked(run)
    sizes = _sizes(run)
    files = _oldest_first(sizes)
    if lack is None:
        gone = files[: len(files) - int(share * len(files))]
    elif sum(sizes.values()) >= lack:
        before = accumulate((sizes[path] for path in files), initial=0)
        gone = [path for path, freed in zip(files, before, strict=False) if freed < lack]
    else:
        gone = []
        log.warning(
            "the disk is full, and all trajectories together are too few to make room for a checkpoint: they stay",
            lacks_gib=round(lack / BYTES_PER_GIB, 3),
            trajectories_gib=round(sum(sizes.values()) / BYTES_PER_GIB, 3),
        )
    for path in gone:
        path.unlink(missing_ok=True)
    if gone:
        log.warning(
            "the disk is full: trajectories are removed to make room for a checkpoint",
            removed=len(gone),
            left=len(files) - len(gone),
        )
    return bool(gone)


def _sizes(run: Path) -> dict[Path, int]:
    return {file: file.stat().st_size for file in trajectory_files(run)}


def _oldest_first(files: Iterable[Path]) -> list[Path]:
    """Returns files in the order in which they are given up: those of updates before those of evaluations."""
    return sorted(files, key=lambda path: (path.name.startswith(PREFIXES["evaluation"]), step_of(path)))


def _parquet(table: "pyarrow.Table") -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    # Texts and tokens alone are compressed: numbers of rows are few, and a list reads those of all files.
    large = [
        f"{column.name}.list.element" if pa.types.is_list(column.type) else column.name
        for column in table.schema
        if pa.types.is_list(column.type) or pa.types.is_string(column.type)
    ]
    stream = pa.BufferOutputStream()
    parquet.write_table(
        table, stream, compression=dict.fromkeys(large, "zstd"), use_dictionary=large, row_group_size=ROWS_PER_GROUP
    )
    content: bytes = stream.getvalue().to_pybytes()
    return content
