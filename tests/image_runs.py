"""A folder with pictures, and an environment that answers with them."""

from pathlib import Path

import pytest

from rollgrad.domain.episodes.messages import Action
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.environment import Observation, StepResult
from tests.tiny_vision import picture


def enter_picture_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder with two pictures the current directory; prepared data stay out of the user's home."""
    for name, color in {"red": (200, 0, 0), "blue": (0, 0, 200)}.items():
        (folder / f"{name}.png").write_bytes(picture(color))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.chdir(folder)
    return folder


class Gallery:
    """Answers each reply with another picture, in a message."""

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, prompt: Prompt) -> Observation:
        return list(prompt.messages)

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        parts = [{"type": "text", "text": "And"}, {"type": "image", "path": "red.png"}, {"type": "text", "text": "?"}]
        message = {"role": "user", "content": parts}
        return StepResult(observation=[message], reward=float(len(action.text) % 2), terminated=self.turns == 3)

    async def close(self) -> None:
        """Has nothing to close."""
