"""Runs whose reward or environment servers, processes of their own, are killed while an episode waits for them."""

import itertools
import json
import string
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import rollgrad
from rollgrad.adapters.environments.nemo_gym import NemoGymEnvironment
from rollgrad.adapters.environments.openenv import OpenEnvEnvironment
from rollgrad.adapters.rewards import posting
from rollgrad.adapters.rewards.http import HttpReward
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.domain.control.circuit_breaker import Circuit
from rollgrad.domain.errors import EngineError, RewardError
from rollgrad.domain.ports.environment import Environment
from rollgrad.domain.ports.metric_sink import MetricSink
from tests.accounts import nothing_is_lost
from tests.fakes.server_process import ServerProcess

pytestmark = pytest.mark.chaos

STEPS, GROUPS, SAMPLES = 3, 2, 2
MIDDLE_OF_STEP_TWO = GROUPS * SAMPLES + 3
"""An episode, counted from 1, where one is played after the other: the first of the last group."""


class Steps(MetricSink):
    """Keeps what each step reports; `after_two` is called between the second and the third."""

    def __init__(self, after_two: Callable[[], object] = lambda: None) -> None:
        self.lines: list[Mapping[str, float]] = []
        self._after_two = after_two

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.lines.append(metrics)
        if step == 2:
            self._after_two()

    def accounts(self, name: str) -> list[float]:
        return [line.get(name, 0.0) for line in self.lines]


@pytest.fixture
def make(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., RLConfig]:
    rows = [{"input": f"What is {a} plus {b}?", "label": str(a + b)} for a in range(1, 4) for b in range(1, 4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def config(*, overlapping: bool = False, max_failures: int = 0) -> RLConfig:
        made = RLConfig()
        made.actor.model_name_or_path, made.actor.dtype = str(tiny_model_dir), DType.FLOAT32
        made.algo.advantage.estimator = "group_norm"
        made.data.prompt_dataset, made.data.label_key = str(tmp_path / "prompts.jsonl"), "label"
        made.rollout.batch_size, made.rollout.n_samples_per_prompt = GROUPS, SAMPLES
        made.rollout.max_new_tokens = 4
        made.rollout.stop_strings = ("\ufffd", *string.printable)  # a random model seldom ends a turn by itself
        made.rollout.max_concurrent, made.rollout.max_failures = 1, max_failures
        made.train.max_steps, made.train.async_enable = STEPS, overlapping
        made.ckpt.output_dir, made.ckpt.state_steps, made.logger.console = str(tmp_path / "run"), 1, False
        return made

    return config


@pytest.fixture(autouse=True)
def _servers_are_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "BACKOFF", 0.01)


@pytest.fixture
def start() -> Iterator[Callable[..., ServerProcess]]:
    with ExitStack() as stack:
        yield lambda kind, **options: stack.enter_context(ServerProcess(kind, **options))


@pytest.mark.parametrize("overlapping", [False, True], ids=["sync", "async"])
def test_while_one_reward_server_lives_nothing_fails(
    make: Callable[..., RLConfig], start: Callable[..., ServerProcess], overlapping: bool
) -> None:
    servers = [start("reward", held=2), start("reward", held=3), start("reward")]
    config, sink = make(overlapping=overlapping), Steps()
    config.reward.remote_url, config.reward.timeout = ",".join(server.url for server in servers), 60.0
    rollgrad.train(config, sink=sink)
    assert servers[0].was_killed()
    assert sink.accounts("rollout/samples") == [GROUPS * SAMPLES] * STEPS
    assert not any(name.startswith("rollout/failed") for line in sink.lines for name in line)
    if overlapping:
        nothing_is_lost(config)


@pytest.mark.parametrize(
    ("failure_value", "max_failures"), [(-1.0, 0), (None, 2), (None, 1)], ids=["fallback", "budget", "over_budget"]
)
def test_without_its_only_reward_server_a_run_does_as_it_is_told_and_uses_it_when_it_is_back(
    make: Callable[..., RLConfig],
    start: Callable[..., ServerProcess],
    failure_value: float | None,
    max_failures: int,
) -> None:
    """Two judgements are missing from the second step, those of a whole group."""
    server = start("reward", held=MIDDLE_OF_STEP_TWO)
    circuit = Circuit(cooldown=0.01)
    source = HttpReward([server.url], timeout=5.0, failure_value=failure_value, circuit=circuit)
    config = make(max_failures=max_failures)
    sink = Steps(after_two=lambda: start("reward", port=server.port))
    if failure_value is None and max_failures < 2:
        with pytest.raises(RewardError, match=r"2 episodes failed \(2 reward\).*No reward server judged .* within 5 s"):
            rollgrad.train(config, reward=source, sink=sink)
        assert len(sink.lines) == 1
        return
    rollgrad.train(config, reward=source, sink=sink)
    assert server.was_killed()
    if failure_value is None:
        assert sink.accounts("rollout/failed_reward") == [0.0, 2.0, 0.0]
        assert sink.accounts("rollout/samples") == [4.0, 2.0, 4.0]
        assert sink.accounts("rollout/rejected_empty") == [0.0, 1.0, 0.0]
    else:
        assert sink.accounts("rollout/samples") == [4.0] * STEPS
        assert sink.accounts("reward/reward_failed") == [0.0, 0.5, 0.0]
    assert sink.accounts("rollout/prompts_played") == [GROUPS] * STEPS


def openenv(url: str) -> Environment:
    return OpenEnvEnvironment(url, timeout=60.0)


def nemo_gym(url: str) -> Environment:
    return NemoGymEnvironment(url, timeout=60.0)


@pytest.mark.parametrize(
    ("connect", "held", "overlapping"), [(openenv, 2, False), (nemo_gym, 1, True)], ids=["openenv", "nemo_gym"]
)
@pytest.mark.parametrize("max_failures", [1, 0])
def test_an_environment_that_dies_in_an_episode_costs_that_episode(
    make: Callable[..., RLConfig],
    start: Callable[..., ServerProcess],
    connect: Callable[[str], Environment],
    held: int,
    overlapping: bool,
    max_failures: int,
) -> None:
    kind = connect.__name__
    doomed, other = start(kind, held=held), start(kind)
    config, sink = make(overlapping=overlapping, max_failures=max_failures), Steps()
    config.rollout.max_turns = 2
    episodes = itertools.count(1)

    def environment() -> Environment:
        return connect(doomed.url if next(episodes) == MIDDLE_OF_STEP_TWO else other.url)

    def train() -> Any:
        return rollgrad.train(config, environment=environment, sink=sink)

    if not max_failures:
        with pytest.raises(EngineError, match=r"The environment raised ConnectionError: The .* server .*127\.0\.0\.1"):
            train()
        return
    train()
    assert doomed.was_killed()
    assert sum(sink.accounts("rollout/failed_environment")) == 1
    assert sum(sink.accounts("rollout/samples")) == STEPS * GROUPS * SAMPLES - 1
    if overlapping:
        nothing_is_lost(config)
