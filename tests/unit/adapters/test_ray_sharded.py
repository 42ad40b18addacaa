"""Models in the processes of a group, as the driver asks for them."""

from pathlib import Path
from typing import Any, cast

import pytest

from rollgrad.adapters.models.ray.sharded import ShardedPolicy, ShardedValue
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.domain.errors import DataError, LostProcessError


class Calls:
    """A group that notes what it is asked for."""

    size = 1

    def __init__(self) -> None:
        self.made: list[tuple[str, Any]] = []

    def all(self, method: str, argument: Any) -> None:
        self.made.append((method, argument))


@pytest.mark.parametrize("kind", [ShardedPolicy, ShardedValue])
def test_processes_write_where_the_driver_would(
    kind: type[ShardedPolicy | ShardedValue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their working directory is that of Ray, which may have been started anywhere."""
    monkeypatch.chdir(tmp_path)
    calls = Calls()
    model = kind(cast(WorkerGroup, calls))
    model.save(Path("out/model"))
    model.state_dict().write_files(Path("out/state"))
    assert calls.made == [("save", tmp_path / "out/model"), ("write_state", tmp_path / "out/state")]


class Ended(Calls):
    """A group that an error ends."""

    def all(self, method: str, argument: Any = None) -> None:
        if method != "begin_average":
            raise LostProcessError("it has ended")


def test_the_error_that_ended_a_group_is_told_not_that_averages_stay_in_it() -> None:
    policy = ShardedPolicy(cast(WorkerGroup, Ended()))
    with pytest.raises(DataError, match="no such image"), policy.averaged():
        raise DataError("no such image")
