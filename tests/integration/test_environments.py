"""Real environments of Gymnasium, TextArena and SkyRL-Gym, played through their adapters."""

import asyncio
import importlib
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rollgrad
from rollgrad.adapters.environments.gymnasium import GymnasiumEnvironment
from rollgrad.adapters.environments.skyrl import SkyRLEnvironment
from rollgrad.adapters.environments.textarena import TextArenaEnvironment
from rollgrad.application.settings.sections.actor import DType
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import Action, assistant_message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.environment import Environment, StepResult
from tests.example_runs import logged

TURN_LIMIT = 300


def blackjack_in_words(observation: tuple[int, int, int]) -> str:
    mine, dealers, ace = observation
    return f"You have {mine}{' with an ace' if ace else ''}, the dealer shows {dealers}. 0 to stick, 1 to hit."


def centre_or_corner(board: str) -> str:
    """Takes the first free cell of TicTacToe's board, which writes the numbers of the free cells."""
    return f"[{re.findall(r'(?<![0-9])[0-8](?![0-9])', board)[-1]}]"


def gsm8k(prompt: Prompt) -> Any:
    import skyrl_gym

    return skyrl_gym.make("gsm8k", extras={"reward_spec": {"ground_truth": str(prompt.label)}})


def gsm8k_multi_turn(prompt: Prompt) -> Any:
    import skyrl_gym

    return skyrl_gym.make(
        "gsm8k_multi_turn", extras={"reward_spec": {"ground_truth": str(prompt.label)}, "max_turns": 3}
    )


def made_by(package: str, name: str, **settings: Any) -> Any:
    return importlib.import_module(package).make(name, **settings)


environment_factories: list[tuple[str, Callable[[], Environment]]] = [
    ("frozen_lake", lambda: GymnasiumEnvironment(partial(made_by, "gymnasium", "FrozenLake-v1", is_slippery=False))),
    ("taxi", lambda: GymnasiumEnvironment(partial(made_by, "gymnasium", "Taxi-v4"), invalid_reward=-10.0)),
    ("cliff", lambda: GymnasiumEnvironment(partial(made_by, "gymnasium", "CliffWalking-v1", max_episode_steps=20))),
    (
        "blackjack",
        lambda: GymnasiumEnvironment(partial(made_by, "gymnasium", "Blackjack-v1"), render=blackjack_in_words),
    ),
    ("guess_the_number", lambda: TextArenaEnvironment(partial(made_by, "textarena", "GuessTheNumber-v0"))),
    ("guess_the_number_raw", lambda: TextArenaEnvironment(partial(made_by, "textarena", "GuessTheNumber-v0-raw"))),
    (
        "tic_tac_toe",
        lambda: TextArenaEnvironment(partial(made_by, "textarena", "TicTacToe-v0-raw"), opponent=centre_or_corner),
    ),
    ("gsm8k", lambda: SkyRLEnvironment(gsm8k)),
    ("gsm8k_multi_turn", lambda: SkyRLEnvironment(gsm8k_multi_turn)),
]
"""Names, and what makes a fresh environment of each; a whole number as the prompt's label will do for all."""


def act(text: str) -> Action:
    generation = Generation(token_ids=[1], logprobs=[-1.0], versions=[0], stop_reason=StopReason.STOP)
    return Action(text=text, generation=generation, message=assistant_message(text))


def ask(label: int) -> Prompt:
    return Prompt(token_ids=(1,), text="Play.", label=label, messages=({"role": "user", "content": "Play."},))


def text_of(messages: Any) -> str:
    return "\n".join(str(message["content"]) for message in messages)


async def play(
    environment: Environment, policy: Callable[[str], str], label: int = 7
) -> tuple[list[str], list[StepResult]]:
    """Returns the texts that the policy was shown, and the environment's answers, to the episode's end."""
    try:
        shown, results = [text_of(await environment.reset(ask(label)))], list[StepResult]()
        while len(results) < TURN_LIMIT and not (results and (results[-1].terminated or results[-1].truncated)):
            results.append(await environment.step(act(policy("\n".join(shown)))))
            shown.append(text_of(results[-1].observation))
        return shown, results
    finally:
        await environment.close()


def bisect(transcript: str) -> str:
    low, high = 1, 20
    hints = re.findall(r"target number is (higher|lower)", transcript)
    for hint in hints:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if hint == "higher" else (low, middle - 1)
    return f"[{(low + high) // 2}]"


@pytest.mark.parametrize(("name", "make"), environment_factories, ids=[name for name, _ in environment_factories])
async def test_episodes_of_a_group_start_alike(name: str, make: Callable[[], Environment]) -> None:
    groups = await asyncio.gather(*(play(make(), lambda text: "[2] 1", label) for label in (7, 7, 7, 8, 8)))
    courses = [(shown, [(one.reward, one.terminated, one.truncated) for one in results]) for shown, results in groups]
    assert courses[0] == courses[1] == courses[2]
    assert courses[3] == courses[4]
    results = groups[0][1]
    assert results[-1].terminated or results[-1].truncated or len(results) == TURN_LIMIT


async def test_frozen_lake_is_crossed() -> None:
    moves = iter(["1", "1", "2", "2", "1", "2"])
    _, results = await play(dict(environment_factories)["frozen_lake"](), lambda text: f"I take {next(moves)}.")
    assert [result.reward for result in results] == [0.0] * 5 + [1.0]
    assert results[-1].terminated


async def test_a_time_limit_truncates() -> None:
    _, results = await play(dict(environment_factories)["cliff"](), lambda text: "0")
    assert [result.truncated for result in results] == [False] * 19 + [True]
    assert sum(result.reward for result in results) == -20.0


@pytest.mark.parametrize("name", ["guess_the_number", "guess_the_number_raw"])
async def test_the_number_is_found_by_bisection_in_concurrent_games(name: str) -> None:
    make = dict(environment_factories)[name]

    async def scenario() -> list[Any]:
        return await asyncio.gather(*(play(make(), bisect, label) for label in range(6) for _ in range(3)))

    games = await scenario()
    assert all(results[-1].terminated and results[-1].reward == 1.0 for _, results in games)
    lengths = [len(results) for _, results in games]
    assert all(len(set(lengths[group : group + 3])) == 1 for group in range(0, 18, 3))
    assert len(set(lengths)) > 1, "other seeds hide other numbers"
    rules = [shown.count("You are playing Guess The Number") for shown in ("\n".join(seen) for seen, _ in games)]
    assert set(rules) == {1}, "what the conversation has already is not repeated"


async def test_tic_tac_toe_is_won_and_lost_against_a_script() -> None:
    make = dict(environment_factories)["tic_tac_toe"]
    row = iter(["[0]", "[1]", "[2]"])
    _, won = await play(make(), lambda text: next(row))
    assert (won[-1].reward, len(won)) == (1.0, 3)
    _, forfeited = await play(make(), lambda text: "no idea")
    assert (forfeited[-1].reward, forfeited[-1].metrics["invalid_move"]) == (-1.0, 1.0)


async def test_gsm8k_is_judged() -> None:
    make = dict(environment_factories)["gsm8k_multi_turn"]
    replies = iter(["#### 3", "#### 7"])
    _, results = await play(make(), lambda text: next(replies), label=7)
    assert [result.terminated for result in results] == [False, True]
    assert results[-1].reward == 1.0
    assert results[-1].metrics == {"steps": 2.0}


@pytest.fixture(scope="module")
def long_model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with positions for the rules of a game, in its tokens of few letters."""
    model = shutil.copytree(tiny_model_dir, tmp_path_factory.mktemp("models") / "long")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 8192}))
    return Path(model)


@pytest.mark.parametrize(("name", "make"), environment_factories, ids=[name for name, _ in environment_factories])
def test_a_model_is_trained_on_each(
    name: str, make: Callable[[], Environment], long_model: Path, tmp_path: Path
) -> None:
    tasks = [{"input": f"Game {index}.", "label": index} for index in range(4)]
    (tmp_path / "games.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    config = rollgrad.RLConfig()
    config.actor.model_name_or_path, config.actor.dtype = str(long_model), DType.FLOAT32
    config.actor.adam.lr = 1e-3
    config.algo.advantage.estimator = "group_norm"
    config.data.prompt_dataset, config.data.label_key = str(tmp_path / "games.jsonl"), "label"
    config.rollout.batch_size, config.rollout.n_samples_per_prompt = 2, 2
    config.rollout.max_new_tokens, config.rollout.max_turns = 6, 3
    config.train.max_steps = 2
    config.ckpt.output_dir = str(tmp_path / "run")
    config.logger.console = False
    assert rollgrad.train(config, environment=make).steps == 2
    trained = [line for line in logged(tmp_path / "run") if "reward/mean" in line]
    assert len(trained) == 2
    assert all(1 <= line["reward/turns"] <= 3 for line in trained)
    assert all(line["policy/mismatch_abs"] < 1e-3 for line in trained if "policy/mismatch_abs" in line)
