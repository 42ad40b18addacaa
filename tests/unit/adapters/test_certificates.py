"""Certificates that clients trust, and those that cannot be read."""

from pathlib import Path

import pytest

from rollgrad.adapters.rewards.http import HttpReward
from rollgrad.adapters.system.certificates import trusted_certificates
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.errors import RewardError


@pytest.fixture(autouse=True)
def read_again() -> None:
    trusted_certificates.cache_clear()


@pytest.mark.parametrize(("name", "reason"), [("gone.pem", "No such file"), ("empty.pem", "no certificate")])
async def test_a_variable_that_names_no_certificates_is_said(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As environments leave it behind (conda's), and a client of plain HTTP does not start either."""
    (tmp_path / "empty.pem").touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / name))
    request = RewardRequest(prompt=Prompt(token_ids=(1,), text=""), response="x", stop_reason=StopReason.STOP)
    with pytest.raises(RewardError) as error:
        await HttpReward(["http://127.0.0.1:9/"], timeout=60.0).score([request])
    assert f"SSL_CERT_FILE is '{tmp_path / name}'" in str(error.value)
    assert reason in str(error.value)
