"""Models are uploaded to the hub, here a server with its wire."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from rollgrad.adapters.checkpoints.hub import check_upload, find_model, hub_answers, upload_model
from rollgrad.adapters.data.datasets.loading import load_dataset
from rollgrad.domain.errors import CheckpointError, ConfigurationError, DataError
from rollgrad.entrypoints.training import upload
from tests.fakes.hub import Hub, hub_double

TOKEN = "hf_a-token-of-nobody"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_double() as served:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", served.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model" / "critic").mkdir(parents=True)
    (tmp_path / "model" / "README.md").write_text("---\ntags: [rollgrad]\n---\n# runs\n")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(range(256)))
    (tmp_path / "model" / "critic" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_a_model_is_uploaded_whole_to_a_private_repository(hub: Hub, model: Path) -> None:
    check_upload("me/name")
    address = upload_model(model, "me/name")
    assert address.startswith(f"{hub.url}/me/name/commit/")
    there = {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}
    assert hub.files == there
    (made,) = hub.made
    assert made == {"name": "name", "organization": "me", "visibility": "private"}
    assert hub.tokens == {f"Bearer {TOKEN}"}


def test_an_upload_that_fails_is_a_warning_without_the_token(
    hub: Hub, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.broken = True
    upload(model, "me/name")
    said = "".join(capfd.readouterr())
    assert f"hf upload me/name {model} does it" in said
    assert "403" in said
    assert TOKEN not in said


def test_a_process_that_has_imported_nothing_of_the_hub_can_ask_it() -> None:
    code = "from rollgrad.adapters.checkpoints.hub import check_upload; check_upload('me/name')"
    environment = {**os.environ, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize("name", ["me/my--model", "me/model.git", "me/-model"])
def test_a_name_that_the_hub_would_refuse_at_the_end_is_refused_at_once(name: str, hub: Hub) -> None:
    with pytest.raises(ConfigurationError, match=f"ckpt.push_to_hub is '{name}', a name that the hub does not take"):
        check_upload(name)


def test_without_a_token_or_a_hub_a_run_does_not_begin(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigurationError, match=r"'me/name', but there is no token for the hub: set HF_TOKEN"):
        check_upload("me/name")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match="but HF_HUB_OFFLINE says"):
        check_upload("me/name")


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A hub whose port is closed, and an empty cache of models."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub_answers.cache_clear()
    yield tmp_path
    hub_answers.cache_clear()


def test_a_model_that_is_nowhere_is_said_at_once_without_the_hub(silent_hub: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"--actor\.x is 'me/typo', which is neither a directory nor in the local"
    ):
        find_model("me/typo", flag="--actor.x")


def test_a_model_in_the_cache_is_read_there_without_the_hub(silent_hub: Path) -> None:
    snapshot = silent_hub / "models--me--model" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    find_model("me/model", flag="--actor.x")
    assert (huggingface_hub.constants.is_offline_mode(), os.environ["HF_HUB_OFFLINE"]) == (True, "1")


def test_a_hub_that_does_not_answer_is_asked_once_for_models_and_data(
    silent_hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked = []

    class Session:
        def head(self, url: str, **settings: object) -> None:
            asked.append(url)
            raise OSError("closed")

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointError, match="'me/typo'"):
        find_model("me/typo", flag="--actor.x")
    for _ in range(2):
        with pytest.raises(DataError, match="the Hugging Face hub cannot be reached"):
            load_dataset("me/rows", split="train", probs=None, seed=0, max_samples=None)
    assert asked == ["http://127.0.0.1:9"]
    assert not datasets.config.HF_HUB_OFFLINE


def test_what_is_no_name_of_the_hub_is_left_to_loading(silent_hub: Path) -> None:
    find_model("a b/c", flag="--actor.x")
