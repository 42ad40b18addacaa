"""The file of replies: what may be written, and what is said of what may not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollgrad.adapters.data.reply_log import row_log
from rollgrad.domain.errors import CheckpointError


def opened(path: Path, description: Mapping[str, Any]) -> None:
    with row_log(path, description, defaults={}) as rows:
        rows.add({"row": 0, "sample": 0, "completion": "x"})


def test_rows_of_other_settings_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    opened(path, {"seed": 1})
    with pytest.raises(CheckpointError) as raised:
        opened(path, {"seed": 2})
    assert str(raised.value).startswith(f"{path} holds rows of other settings, which differ in seed (1, now 2)")
    assert str(raised.value).count("choose another --output") == 1


def test_a_device_is_refused_before_anything_is_made() -> None:
    with pytest.raises(CheckpointError, match=r"--output is '/dev/null', which is no file"):
        opened(Path("/dev/null"), {})
