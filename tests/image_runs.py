"""An environment that answers with pictures."""

from rollgrad.domain.episodes.messages import Action
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.environment import Observation, StepResult


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
