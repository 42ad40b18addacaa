"""Objects that a caller brings in the place of the run's own adapters."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import rollgrad
from rollgrad.adapters.rewards.none import NoReward
from rollgrad.application.settings.sections.reward import Verifier
from rollgrad.domain.errors import CheckpointError, ConfigurationError, DataError
from rollgrad.entrypoints.composition.brought import PORTS, check_brought
from rollgrad.entrypoints.inputs import check_inputs
from rollgrad.entrypoints.library import container_with
from rollgrad.testing import (
    FakeAgentExecutor,
    FakeChatCodec,
    FakeClock,
    FakeMetricSink,
    FakePolicy,
    FakePromptSource,
    FakeReference,
    FakeRolloutEngine,
    FakeValue,
    FakeWeightChannel,
)
from rollgrad.testing.environment import FakeEnvironment

ROWS = [{"question": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(4)]


def settings(model: Path, out: Path) -> rollgrad.RLConfig:
    config = rollgrad.RLConfig()
    config.actor.model_name_or_path, config.actor.dtype = str(model), "float32"
    config.algo.advantage.estimator = "rloo"
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.rollout.max_new_tokens = 2, 2, 4
    config.train.max_steps, config.ckpt.output_dir, config.logger.console = 1, str(out / "out"), False
    return config


def letters(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    assert set(labels) <= {"1", "2", "3", "4"}
    return [float(len(query) % 3) for query in queries]


@pytest.mark.parametrize("kind", ["list", "datasets"])
def test_prompts_may_be_rows(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    import datasets

    rows: Any = ROWS if kind == "list" else datasets.Dataset.from_list(ROWS)
    container = container_with(settings(tiny_model_dir, tmp_path), letters, None, {"prompts": rows})
    prompts = container.prompts()
    assert len(prompts) == 4
    assert {(prompt.messages[0]["content"], prompt.label) for prompt in prompts.take(4)} == {
        (row["question"], row["answer"]) for row in ROWS
    }


@pytest.mark.parametrize("function", ["train", "evaluate"])
@pytest.mark.parametrize("rows", ["brought", "file"])
def test_a_reward_of_the_callers_own_needs_no_labels_for_the_one_that_it_replaces(
    function: str, rows: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """The verifier of the settings would refuse them."""
    config = settings(tiny_model_dir, tmp_path)
    config.reward.verifier = Verifier.LAST_NUMBER
    wordy = [{"question": "Which letter is first?", "answer": "a"}, {"question": "Which is last?", "answer": "z"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in wordy))
    config.data.prompt_dataset = config.eval.dataset = str(file)
    config.data.input_key, config.data.label_key = "question", "answer"
    brought: dict[str, Any] = {"prompts": wordy} if rows == "brought" else {}
    judged_later: tuple[Any, ...] = (NoReward(), True, "generate")
    for reward, refused, by in ((letters, False, function), (None, True, function), judged_later):
        container = container_with(config, reward, None, brought, by)
        prompts = container.eval_prompts if function == "evaluate" else container.prompts
        with pytest.raises(DataError, match="last_number compares with") if refused else nullcontext():
            assert len(prompts()) == 2


@pytest.mark.parametrize(("votes", "told"), [(False, ["1 of 2 held-out prompts of eval.dataset are in"]), (True, [])])
def test_held_out_prompts_that_are_trained_on_are_told(
    votes: bool, told: list[str], tiny_model_dir: Path, tmp_path: Path
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(
        "".join(json.dumps({"question": text, "answer": "2"}) + "\n" for text in ("New?", ROWS[1]["question"]))
    )
    config = settings(tiny_model_dir, tmp_path)
    config.eval.dataset, config.reward.majority_vote = str(held_out), votes
    container = container_with(config, letters, None, {"prompts": ROWS})
    with capture_logs() as logs:
        check_inputs(container, trains=config)
    assert [log["event"][:45] for log in logs if "held-out" in log["event"]] == [words[:45] for words in told]


def test_games_of_other_seeds_are_held_out(tiny_model_dir: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    games = [{"question": "Play.", "answer": "", "seed": seed} for seed in range(4)]
    held_out.write_text("".join(json.dumps(game) + "\n" for game in games[1:]))
    config = settings(tiny_model_dir, tmp_path)
    config.eval.dataset = str(held_out)
    container = container_with(config, letters, lambda: FakeEnvironment([]), {"prompts": games[:2]})
    with capture_logs() as logs:
        check_inputs(container, trains=config)
    told = [log["event"] for log in logs if "held-out" in log["event"]]
    assert [words[:45] for words in told] == ["1 of 3 held-out prompts of eval.dataset are in"[:45]]


@pytest.mark.parametrize("plays", [False, True])
def test_rows_that_stand_twice_are_counted(plays: bool, tiny_model_dir: Path, tmp_path: Path) -> None:
    """In the prompts that are trained on and in those that are held out; of games whole rows are compared."""
    held_out = tmp_path / "held_out.jsonl"
    games = [{"question": f"Game {number // 2}", "answer": "2", "seed": number // 4} for number in range(8)]
    held_out.write_text("".join(json.dumps(game) + "\n" for game in games))
    config = settings(tiny_model_dir, tmp_path)
    config.eval.dataset = str(held_out)
    rows = [*ROWS, {**ROWS[0], "answer": "9"}, ROWS[1]]
    environment = (lambda: FakeEnvironment([])) if plays else None
    container = container_with(config, letters, environment, {"prompts": rows})
    with capture_logs() as logs:
        check_inputs(container, trains=config)
    told = [log["event"] for log in logs if "repeat" in log["event"]]
    assert told == [
        "4 of 8 held-out prompts of eval.dataset repeat an earlier one, which counts again",
        f"{1 if plays else 2} of 6 rows of prompts repeat an earlier prompt, which is trained on more often",
    ]


def test_a_run_on_rows_continues_on_the_same_rows_alone(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = settings(tiny_model_dir, tmp_path)
    assert rollgrad.train(config, reward=letters, prompts=ROWS).steps == 1
    config.train.max_steps, config.ckpt.resume = 2, "auto"
    with pytest.raises(CheckpointError, match="prompt_dataset"):
        rollgrad.train(config, reward=letters, prompts=ROWS[:3])
    assert rollgrad.train(config, reward=letters, prompts=ROWS).steps == 2


def test_the_fakes_of_all_ports_are_taken() -> None:
    fakes = {
        "engine": FakeRolloutEngine(),
        "executor": FakeAgentExecutor.__new__(FakeAgentExecutor),
        "prompts": FakePromptSource.__new__(FakePromptSource),
        "policy": FakePolicy(),
        "reference": FakeReference.__new__(FakeReference),
        "critic": FakeValue.__new__(FakeValue),
        "channel": FakeWeightChannel.__new__(FakeWeightChannel),
        "sink": FakeMetricSink(),
        "codec": FakeChatCodec(),
        "clock": FakeClock(),
    }
    check_brought(fakes, trains=True)
    assert PORTS.keys() - fakes.keys() == {"checkpoints"}


class Deaf:
    async def generate(self, request: Any, *, on_token: Any = None) -> Any: ...
    async def pause(self, mode: Any) -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...


class Env:
    async def reset(self, prompt: Any) -> str:
        return ""


@pytest.mark.parametrize(
    ("brought", "message"),
    [
        ({"prompts": iter(())}, "prompts is a tuple_iterator, which has no take, __len__, state_dict, load_state_dict"),
        ({"prompts": ["3+4?"]}, r"prompts are a list without rows .* list of mappings, of one at least, such as \[\{"),
        ({"rewards": letters}, r"train\(\) has no argument called 'rewards': did you mean reward\?"),
        ({"nothing": letters}, r"train\(\) has no argument called 'nothing': the known ones are .*\bsink\b"),
        (
            {"sink": FakeMetricSink},
            r"sink is the class FakeMetricSink: give an object of it, such as FakeMetricSink\(\)",
        ),
        ({"engine": Deaf()}, "no channel says how the policy's weights reach it: give channel"),
        ({"environment": Env()}, "environment is one object of Env, but .* give the class, environment=Env"),
        (
            {"environment": Env},
            "class Env, which has no step, close: an environment has the methods reset, step, close",
        ),
    ],
)
def test_what_lacks_something_is_refused_before_anything_is_loaded(
    brought: dict[str, Any], message: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rollgrad.train(settings(tiny_model_dir, tmp_path), **{"reward": letters, "prompts": ROWS, **brought})


@pytest.mark.parametrize("settings", ["examples/sums.yaml", Path("examples/sums.yaml"), {"actor": {}}])
@pytest.mark.parametrize(
    "call",
    [
        rollgrad.train,
        rollgrad.evaluate,
        rollgrad.train_sft,
        rollgrad.loop,
        lambda config: rollgrad.generate(config, Path("replies.jsonl")),
        lambda config: rollgrad.score(config, Path("replies.jsonl"), Path("scored.jsonl")),
    ],
)
def test_a_file_in_the_place_of_settings_is_refused(call: Any, settings: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^The settings are a \w+, but .* rollgrad\.load_config"):
        call(settings)
