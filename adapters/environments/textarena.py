"""TextArena games, for one player, or for two with a scripted opponent.

Invariant: the model sits at seat 0, and the reward is what the game's `close()` gives that seat, on the last turn.
Works by duck typing: `make` imports TextArena, this does not. Games draw from the global generator: see
`GlobalRandomness`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgrad.adapters.environments.episode_thread import EpisodeThread
from rollgrad.adapters.environments.global_randomness import GlobalRandomness
from rollgrad.adapters.environments.opening import opening, prompt_seed, user_message
from rollgrad.domain.episodes.messages import Action, Message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.environment import Environment, StepResult

SEAT = 0
"""The model's."""
GAME = -1
"""Who the game itself is, as the sender of a message."""


class TextArenaEnvironment(Environment):
    """Plays one episode of what `make()` returns, seeded by the prompt (`prompt_seed`).

    Args:
        make: makes a fresh game, such as `partial(textarena.make, "GuessTheNumber-v0")`.
        opponent: the second player of a two-player game: from what it is shown to its move. It may use `random`, and
            is then seeded by the prompt too. None for a game of one player.
        timeout: seconds for one turn, the opponent's included.

    Metrics: `invalid_move`, 1 if the game ended by an invalid move of the model.
    """

    def __init__(
        self, make: Callable[[], Any], *, opponent: Callable[[str], str] | None = None, timeout: float = 60.0
    ) -> None:
        self._make = make
        self._opponent = opponent
        self._thread = EpisodeThread("The TextArena game", timeout=timeout)
        self._randomness = GlobalRandomness(0)
        self._game: Any = None
        self._shown: dict[int, str] = {}

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Returns the prompt's conversation with the game's rules and board.

        Raises:
            RuntimeError: the game ended before the model's first move.
            TimeoutError: the game was not there in time.
        """
        seed = prompt_seed(prompt)
        self._randomness = GlobalRandomness(seed)
        self._shown = {}

        def start() -> str:
            with self._randomness.installed():
                self._game = self._make()
                self._game.reset(num_players=1 if self._opponent is None else 2, seed=seed)
                text = self._until_the_models_turn(done=False)
            if text is None:
                raise RuntimeError("The TextArena game ended before the model's first move.")
            return text

        return opening(prompt, await self._thread.call("reset", start))

    async def step(self, action: Action) -> StepResult:
        """Makes the reply the model's move, and plays the opponent's.

        Raises:
            TimeoutError: the game or the opponent did not answer in time.
        """

        def answer() -> StepResult:
            with self._randomness.installed():
                done, _ = self._game.step(action.text)
                text = self._until_the_models_turn(done=done)
                return self._outcome() if text is None else StepResult(observation=user_message(text))

        return await self._thread.call("a turn", answer)

    async def close(self) -> None:
        """Ends the thread; a game holds nothing else."""
        await self._thread.close()

    def _until_the_models_turn(self, *, done: bool) -> str | None:
        """What the model is shown; None when the game is over."""
        while not done:
            player, observation = self._game.get_observation()
            text = self._news(player, observation)
            if player == SEAT:
                return text
            if self._opponent is None:
                raise RuntimeError("The TextArena game has more players: give TextArenaEnvironment an opponent.")
            done, _ = self._game.step(self._opponent(text))
        return None

    def _news(self, player: int, observation: str | Sequence[tuple[int, str, Any]]) -> str:
        """What a player has not been shown yet, or has not said."""
        if not isinstance(observation, str):
            said = [(sender, text) for sender, text, _ in observation if sender != player]
            return "\n".join(text if sender == GAME else f"[Player {sender}] {text}" for sender, text in said)
        # The wrapper that makes text repeats the whole game every time; the conversation has the beginning already.
        before, self._shown[player] = self._shown.get(player, ""), observation
        return observation.removeprefix(before).strip()

    def _outcome(self) -> StepResult:
        rewards, infos = self._game.close()
        info: Mapping[str, Any] = (infos or {}).get(SEAT, {})
        return StepResult(
            reward=float((rewards or {}).get(SEAT, 0.0)),
            terminated=True,
            info=info,
            metrics={"invalid_move": float(bool(info.get("invalid_move")))},
        )
