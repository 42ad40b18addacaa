"""A tiny model that sees images names one shape after another: `make demo-streak`.

As long as it is right, the environment answers with a new picture, up to three in an episode. The model is that of
shapes.py.
"""

import io
import random

from shapes import SHAPES, PictureTask, draw, main, one_shape

from rollgrad.domain.episodes.messages import Action, Message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.environment import StepResult

PICTURES = 3
"""Pictures of an episode at most."""


class Streak:
    """Pictures one after the other, the same in each episode of a prompt. Each right name has an equal share of 1."""

    async def reset(self, prompt: Prompt) -> list[Message]:
        """Returns the question about the first picture."""
        self._chance = random.Random(prompt.images[0].image.digest)
        self._shape, self._named = str(prompt.label), 0
        return list(prompt.messages)

    async def step(self, action: Action) -> StepResult:
        """Judges a name, and shows the next picture if it is right."""
        if action.text.strip() != self._shape:
            return StepResult(terminated=True)
        self._named += 1
        self._shape = self._chance.choice(SHAPES)
        file = io.BytesIO()
        draw(self._shape, self._chance).save(file, format="PNG")
        content = [{"type": "image", "image": file.getvalue()}, {"type": "text", "text": "what shape ?"}]
        return StepResult(
            observation=[{"role": "user", "content": content}],
            reward=1 / PICTURES,
            terminated=self._named == PICTURES,
            score=self._named / PICTURES,
        )

    async def close(self) -> None:
        """Has nothing to close."""


STREAK_TASK = PictureTask(drawn=one_shape, words=SHAPES, environment=Streak)

if __name__ == "__main__":
    main("streak", STREAK_TASK, "Train a tiny model to name the shapes in one image after another.")
