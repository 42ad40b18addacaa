"""Environments in which several roles act, each in a conversation of its own and for a reward of its own."""

from collections.abc import Sequence
from typing import Any

import pytest

from rollgrad.adapters.environments.plain_methods import awaitable_environment
from rollgrad.adapters.environments.textarena import TextArenaEnvironment
from rollgrad.application.episodes.multi_turn import MultiTurnExecutor
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.messages import Action, Message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.episodes.trajectory import SegmentKind, Trajectory
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.domain.ports.environment import Environment, StepResult
from rollgrad.testing.chat_codec import EOS, FakeChatCodec
from rollgrad.testing.reward_source import FakeRewardSource
from tests.fakes.scripted_engine import ScriptedEngine

PROMPT = Prompt(token_ids=(1,), text="Play.", messages=({"role": "user", "content": "Play."},))
TEXT = Prompt(token_ids=(1,), text="Play.")


class Haggle(Environment):
    """A seller names a price, which a buyer takes by "yes"; others begin the talk again. `results` replace some."""

    def __init__(
        self, results: dict[int, StepResult] | None = None, roles: Sequence[str] = ("seller", "buyer")
    ) -> None:
        self.turn = 0
        self.roles = roles
        self.results = results or {}

    @property
    def acting_role(self) -> str:
        return self.roles[self.turn % 2]

    async def reset(self, prompt: Prompt) -> str | Sequence[Message]:
        return "A price?"

    async def step(self, action: Action) -> StepResult:
        turn, self.turn = self.turn, self.turn + 1
        if turn in self.results:
            return self.results[turn]
        if action.text == "yes":
            return StepResult(terminated=True, rewards={"seller": 2.0, "buyer": -1.0, "banker": 5.0})
        opening = [{"role": "system", "content": "Buy."}] if turn == 0 else []
        return StepResult(observation=[*opening, {"role": "user", "content": action.text}], reward=0.25)

    async def close(self) -> None:
        pass


async def play(
    environment: Any, *script: str, prompt: Prompt = PROMPT, **options: Any
) -> tuple[list[Trajectory] | RolloutFailure, list[str]]:
    """The episode, and what the engine was shown."""
    codec = FakeChatCodec()
    engine = ScriptedEngine(codec, EOS, script)
    executor = MultiTurnExecutor(engine, codec, lambda params: environment, **{"max_turns": 9, **options})
    request = EpisodeRequest(prompt=prompt, params=SamplingParams(max_new_tokens=50, seed=3), group_id=0, sample_id=0)
    result = await executor.run(request)
    if isinstance(result, list):
        recorded = [
            tuple(t.token_ids_T[s.start : s.stop].tolist())
            for t in result
            for s in t.segments
            if s.kind is SegmentKind.ACTION
        ]
        assert sorted(recorded) == sorted(tuple(said.token_ids) for _, said in engine.said), "each reply is an action"
    return result, [codec.decode(request.prompt_token_ids, special_tokens=True) for request in engine.requests]


def earned(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    return {t.role: [s.reward for s in t.segments if s.kind is SegmentKind.ACTION] for t in trajectories}


async def test_each_role_has_its_own_conversation_and_rewards() -> None:
    result, shown = await play(Haggle(), "9", "7?", "8", "yes")
    assert isinstance(result, list)
    assert earned(result) == {"seller": [0.25, 0.25 + 2.0], "buyer": [0.25, -1.0]}
    assert {t.role: t.score for t in result} == {"seller": 2.5, "buyer": -0.75}
    codec = FakeChatCodec()
    opening = [*PROMPT.messages, {"role": "user", "content": "A price?"}]
    assert shown[0] == codec.render(opening, ()).text
    assert shown[1] == codec.render([{"role": "system", "content": "Buy."}, {"role": "user", "content": "9"}], ()).text
    for first, later, said in ((0, 2, "9"), (1, 3, "7?")):
        assert shown[later].startswith(f"{shown[first]}{said}")
    assert {t.metrics["turns"] for t in result} == {4.0}
    assert {t.metrics["branches"] for t in result} == {2.0}


async def test_a_text_for_a_role_that_has_not_acted_follows_the_prompt() -> None:
    results = {0: StepResult(observation="He says 9.")}
    result, shown = await play(Haggle(results), "9", "yes")
    assert isinstance(result, list)
    codec = FakeChatCodec()
    assert shown[1] == codec.render([*PROMPT.messages, {"role": "user", "content": "He says 9."}], ()).text


async def test_roles_without_rewards_of_their_own_share_the_runs() -> None:
    results = {1: StepResult(reward=None, terminated=True)}
    judged = FakeRewardSource(lambda request: 0.5)
    result, _ = await play(Haggle(results), "9", "no", rewards=judged)
    assert isinstance(result, list)
    assert {t.role: t.score for t in result} == {"seller": 0.5, "buyer": 0.5}


async def test_a_role_may_earn_alone_before_the_end() -> None:
    results = {1: StepResult(observation="9?", reward=0.0, rewards={"seller": 0.5})}
    result, _ = await play(Haggle(results), "9", "7", max_turns=2)
    assert isinstance(result, list)
    assert earned(result) == {"seller": [0.75], "buyer": [0.0]}


async def test_rewards_of_roles_are_rewards_also_where_the_step_has_none() -> None:
    results = {1: StepResult(reward=None, terminated=True, rewards={"seller": 1.0, "buyer": -1.0})}
    result, _ = await play(Haggle(results), "9", "no", rewards=FakeRewardSource(lambda request: 0.5))
    assert isinstance(result, list)
    assert earned(result) == {"seller": [1.25], "buyer": [-1.0]}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            Haggle({1: StepResult(terminated=True, rewards={"seller": 1.0})}),
            "The environment's last step has rewards of seller, but buyer acted, too: return a reward for each role.",
        ),
        (
            Haggle({1: StepResult(terminated=True, rewards={"seller": float("nan"), "buyer": 0.0})}),
            "The environment returned the reward of the role seller nan: it must be a finite number.",
        ),
        (
            Haggle(roles=("the seller", "buyer")),
            "The environment's acting_role is 'the seller': it must be a word of at most 64 letters, digits, '-', '_' "
            "and '.'.",
        ),
        (
            Haggle({0: StepResult(), 1: StepResult(terminated=True, rewards={"buyer": 1.0})}, roles=("", "")),
            "The environment's last step has rewards of buyer, but one without a role acted, too: return a reward for "
            "each role.",
        ),
    ],
)
async def test_what_an_environment_with_roles_must_not_do_fails_its_episode(environment: Any, message: str) -> None:
    result, _ = await play(environment, "9", "no")
    assert isinstance(result, RolloutFailure)
    assert (result.kind, result.message) == (FailureKind.ENVIRONMENT, message)


class PlainHaggle:
    """Plays the same game with plain functions."""

    def __init__(self) -> None:
        self.acting_role = "seller"

    def reset(self, prompt: Prompt) -> str:
        return "A price?"

    def step(self, action: Action) -> StepResult:
        self.acting_role = "buyer"
        done = action.text == "yes"
        rewards = {"seller": 1.0, "buyer": 0.0} if done else {}
        return StepResult(observation=action.text, terminated=done, rewards=rewards)

    def close(self) -> None:
        pass


class Misspelled(Haggle):
    """Names its player by an attribute that it has not."""

    @property
    def acting_role(self) -> str:
        return str(self.playr)  # type: ignore[attr-defined]


class PlainMisspelled(PlainHaggle):
    acting_role = Misspelled.acting_role  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    "environment", [Misspelled(), awaitable_environment(PlainMisspelled())], ids=["async", "plain"]
)
async def test_a_role_that_cannot_be_told_is_not_taken_for_none(environment: Environment) -> None:
    result, _ = await play(environment, "9", "no")
    assert isinstance(result, RolloutFailure)
    assert result.kind is FailureKind.ENVIRONMENT
    assert "has no attribute 'playr'" in result.message


async def test_roles_need_a_conversation() -> None:
    result, _ = await play(Haggle(), "9", prompt=TEXT)
    assert isinstance(result, RolloutFailure)
    assert result.kind is FailureKind.DATA
    assert "has tools or roles or speaks in messages, but its prompt is a plain text" in result.message


async def test_plain_environments_have_roles_too() -> None:
    result, _ = await play(awaitable_environment(PlainHaggle()), "9", "yes")
    assert isinstance(result, list)
    assert earned(result) == {"seller": [1.0], "buyer": [0.0]}


class Count:
    """TextArena's shape: whoever says 3 first wins; "x" is an invalid move, by which the other one wins."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.players, self.player, self.log = num_players, 0, [(-1, "Rules.", None)]
        self.seen = [0] * num_players
        self.rewards: dict[int, int] = {}
        self.invalid = False

    def get_observation(self) -> tuple[int, Any]:
        start, self.seen[self.player] = self.seen[self.player], len(self.log)
        return self.player, self.log[start:]

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.log.append((self.player, action, None))
        self.invalid = action == "x"
        if action in ("3", "x"):
            sign = -1 if self.invalid else 1
            self.rewards = {player: sign if player == self.player else -sign for player in range(self.players)}
            return True, {}
        self.player = (self.player + 1) % self.players
        return False, {}

    def close(self) -> tuple[Any, Any]:
        return self.rewards, {self.player: {"invalid_move": self.invalid}}


@pytest.mark.parametrize(("end", "first", "invalid"), [("3", 1.0, 0.0), ("x", -1.0, 1.0)])
async def test_a_model_plays_textarena_against_itself(end: str, first: float, invalid: float) -> None:
    result, shown = await play(TextArenaEnvironment(Count, players=2), "1", "2", end)
    assert isinstance(result, list)
    assert earned(result) == {"player-0": [0.0, first], "player-1": [-first]}
    assert {t.metrics["invalid_move"] for t in result} == {invalid}
    codec = FakeChatCodec()
    assert shown[1] == codec.render([{"role": "user", "content": "Play.\n\nRules.\n[Player 0] 1"}], ()).text
    assert shown[2].startswith(f"{shown[0]}1")
    assert "[Player 1] 2" in shown[2]


def test_a_game_has_an_opponent_or_several_seats_of_the_model() -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        TextArenaEnvironment(Count, opponent=str, players=2)
