"""TextArena games, for one player, for two with a scripted opponent, or for the model against itself.

Invariant: the model sits at seat 0, or at all of them, and the reward is what the game's `close()` gives a seat, on its
last turn.
Works by duck typing: `make` imports TextArena, this module does not. Games draw from the global generator, so their
calls run inside `GlobalRandomness`.
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
"""Seat of the model."""
GAME = -1
"""Sender of the game's own messages."""


class TextArenaEnvironment(Environment):
    """Plays one episode of what `make()` returns, seeded by the prompt (`prompt_seed`).

    Args:
        make: makes a fresh game, such as `partial(textarena.make, "GuessTheNumber-v0")`.
        opponent: the second player of a two-player game, a function from its observation to its move. If it uses
            `random`, the prompt seeds it too: while it moves, all other games wait. None for a game of one player.
        players: seats of the model, each of which is a role (`player-0`, ...) with a conversation and a reward of its
            own; without an opponent only.
        timeout: seconds for one turn, the opponent's included.

    Metrics: `invalid_move`, 1 if the game ended by an invalid move of the model.

    Raises:
        ValueError: there are an opponent and several seats of the model.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        opponent: Callable[[str], str] | None = None,
        players: int = 1,
        timeout: float = 60.0,
    ) -> None:
        if opponent is not None and players > 1:
            raise ValueError("TextArenaEnvironment has an opponent and several players: leave one of them out.")
        self._make = make
        self._opponent = opponent
        self._thread = EpisodeThread("The TextArena game", timeout=timeout)
        self._timeout = timeout
        self._randomness = GlobalRandomness(0)
        self._players = players
        self._prompt: Prompt | None = None
        self._seat = SEAT
        self._seated: set[int] = set()
        self._game: Any = None
        self._shown: dict[int, str] = {}

    @property
    def acting_role(self) -> str:
        """The seat whose move is next; no role if the model has one seat."""
        return _role(self._seat) if self._players > 1 else ""

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Returns the prompt's conversation with the game's rules and board.

        Raises:
            RuntimeError: the game ended before the model's first move.
            TimeoutError: the game did not start in time.
        """
        seed = prompt_seed(prompt)
        self._randomness = GlobalRandomness(seed, self._timeout)
        self._shown, self._seated, self._prompt = {}, set(), prompt

        def start() -> str:
            with self._randomness.installed():
                self._game = self._make()
                self._game.reset(num_players=self._players if self._opponent is None else 2, seed=seed)
                text = self._until_the_models_turn(done=False)
            if text is None:
                raise RuntimeError("The TextArena game ended before the model's first move.")
            return text

        return self._told(await self._thread.call("reset", start))

    async def step(self, action: Action) -> StepResult:
        """Makes the reply the model's move, and plays the opponent's.

        Raises:
            TimeoutError: the game or the opponent did not answer in time.
        """

        def answer() -> StepResult:
            with self._randomness.installed():
                done, _ = self._game.step(action.text)
                text = self._until_the_models_turn(done=done)
                return self._outcome() if text is None else StepResult(observation=self._told(text))

        return await self._thread.call("a turn", answer)

    async def close(self) -> None:
        """Ends the thread; a game has no other resources."""
        await self._thread.close()

    def _until_the_models_turn(self, *, done: bool) -> str | None:
        """Plays the opponent's moves; returns the model's next observation, or None if the game is over. The seat is
        the last mover's then."""
        while not done:
            player, observation = self._game.get_observation()
            text = self._new_text(player, observation)
            if player < self._players:
                self._seat = player
                return text
            if self._opponent is None:
                raise RuntimeError(
                    "The TextArena game has more players: give TextArenaEnvironment an opponent, or set players."
                )
            done, _ = self._game.step(self._opponent(text))
        return None

    def _told(self, text: str) -> Sequence[Message]:
        """Returns the messages for the seat whose move is next: of its first turn, the prompt with the text."""
        assert self._prompt is not None
        first = self._seat not in self._seated
        self._seated.add(self._seat)
        return opening(self._prompt, text) if first else user_message(text)

    def _new_text(self, player: int, observation: str | Sequence[tuple[int, str, Any]]) -> str:
        """Returns the part of the observation that is new to a player: not shown before, and not its own words."""
        if not isinstance(observation, str):
            said = [(sender, text) for sender, text, _ in observation if sender != player]
            return "\n".join(text if sender == GAME else f"[Player {sender}] {text}" for sender, text in said)
        # TextArena's text wrapper repeats the whole game every time; the conversation has the beginning already.
        before, self._shown[player] = self._shown.get(player, ""), observation
        return observation.removeprefix(before).strip()

    def _outcome(self) -> StepResult:
        rewards, infos = self._game.close()
        seats = range(self._players)
        told: list[Mapping[str, Any]] = [(infos or {}).get(seat, {}) for seat in seats]
        earned = [float((rewards or {}).get(seat, 0.0)) for seat in seats]
        alone = self._players == 1
        return StepResult(
            reward=earned[SEAT] if alone else 0.0,
            rewards={} if alone else {_role(seat): earned[seat] for seat in seats},
            terminated=True,
            info=told[SEAT] if alone else {_role(seat): told[seat] for seat in seats},
            metrics={"invalid_move": float(any(info.get("invalid_move") for info in told))},
        )


def _role(seat: int) -> str:
    return f"player-{seat}"
