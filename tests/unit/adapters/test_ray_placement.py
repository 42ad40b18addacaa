"""Reservations of Ray whose Ray is gone."""

from importlib import import_module

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.ray.placement import Placement


def test_a_ray_that_takes_no_reservation_back_hides_no_other_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import GetTimeoutError

    def fails(group: object) -> None:
        raise GetTimeoutError("GCS server is dead")

    # By its name, for `ray.util` has a function of the module's name.
    monkeypatch.setattr(import_module("ray.util.placement_group"), "remove_placement_group", fails)
    placement = object.__new__(Placement)
    placement._group, placement._name = None, "actor"
    with capture_logs() as logs:
        placement.remove()
    assert [(log["log_level"], log["of"], log["reason"]) for log in logs] == [
        ("warning", "actor", "GCS server is dead")
    ]
