"""Procedural tasks of reasoning-gym: their questions as prompts, their scorers as reward.

Invariant: the tasks of a run are a pure function of the specification, the size and the seed. Scoring runs
in sandboxed processes, because some scorers evaluate text of replies. Does not own: rendering (`PromptBuilder`).
"""

import ast
import asyncio
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from attrs import evolve, frozen

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.datasets.prompt_builder import PromptBuilder
from rollgrad.adapters.data.datasets.source import DatasetPromptSource
from rollgrad.adapters.data.datasets.teacher_template import TeacherTemplate
from rollgrad.adapters.data.reasoning_gym import worker
from rollgrad.adapters.rewards.judge_pool import JudgePool
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.application.settings.sections.reward import JudgeIsolation
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import DataError, MissingExtraError, RewardError
from rollgrad.domain.ports.prompt_source import PromptSource
from rollgrad.domain.ports.reward_source import RewardSource

SPEC_PREFIX = "reasoning_gym:"


@frozen
class TaskSpec:
    """A task's name and the settings of its generator."""

    task: str
    config: tuple[tuple[str, Any], ...] = ()


def parse_spec(spec: str) -> TaskSpec:
    """Parses `reasoning_gym:TASK?setting=value&...`; values are Python literals, or else text.

    >>> parse_spec("reasoning_gym:basic_arithmetic?min_terms=2&max_terms=2")
    TaskSpec(task='basic_arithmetic', config=(('min_terms', 2), ('max_terms', 2)))

    Raises:
        DataError: it has another form.
    """
    task, _, query = spec.removeprefix(SPEC_PREFIX).partition("?")
    if not spec.startswith(SPEC_PREFIX) or not task or "," in task:
        raise DataError(
            f"{spec!r} names no reasoning-gym task: write reasoning_gym:TASK or reasoning_gym:TASK?setting=value "
            "(one task a run)."
        )
    settings = (part.partition("=") for part in query.split("&") if part)
    return TaskSpec(task, tuple((key, _literal(value)) for key, _, value in settings))


class ReasoningGymPromptSource(PromptSource):
    """`size` tasks generated from `spec` and `seed`; the label is the reference answer, the metadata the task's entry.

    `data` says how prompts are rendered; its input and label keys, size and max_samples are not used. `setting` names
    the dataset in errors; `teacher` is what a teacher reads in the place of prompts.

    Raises:
        DataError: the task is unknown, or its generator refuses the settings.
        MissingExtraError: reasoning-gym is not installed.
    """

    def __init__(
        self,
        spec: str,
        codec: TemplateCodec,
        data: DataConfig,
        *,
        size: int,
        seed: int,
        setting: str = "data.prompt_dataset",
        teacher: TeacherTemplate | None = None,
    ) -> None:
        parsed = parse_spec(spec)
        builder = PromptBuilder(codec, evolve(data, input_key="question", label_key="answer"), teacher=teacher)
        self._source = DatasetPromptSource(
            _Entries(parsed.task, _create(parsed, size=size, seed=seed)),
            builder,
            seed=seed,
            setting=setting,
        )
        self.survey = self._source.survey
        """Lengths of all prompts, and which are kept."""

    def take(self, count: int) -> list[Prompt]:
        """Returns the next `count` prompts; wraps into the next epoch."""
        return self._source.take(count)

    def prompts(self) -> list[Prompt]:
        """Returns every prompt once, in the generator's order; leaves the position alone."""
        return self._source.prompts()

    def prompt(self, index: int) -> Prompt:
        """Returns the prompt of task `index`."""
        return self._source.prompt(index)

    def __len__(self) -> int:
        return len(self._source)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, JSON-serialisable."""
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        self._source.load_state_dict(state)


class ReasoningGymReward(RewardSource):
    """Scores replies with the scorer of the task that the prompt came from, each within `timeout` seconds.

    A reply whose scoring hangs or raises scores 0 and counts in the metric `judge_timed_out` or `judge_failed`.

    Raises:
        DataError: `spec` names no known task, or settings its generator refuses.
        MissingExtraError: reasoning-gym is not installed.
        ConfigurationError: the machine cannot isolate judges as `isolation` demands.
    """

    def __init__(self, spec: str, *, timeout: float, isolation: JudgeIsolation = JudgeIsolation.SANDBOX) -> None:
        self._spec = parse_spec(spec)
        _create(self._spec, size=1, seed=0)
        self._pool = JudgePool(worker, timeout=timeout, isolation=isolation)

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Returns one reward from 0 to 1 for each request, in order.

        Raises:
            RewardError: a prompt does not come from reasoning-gym.
        """
        return list(await asyncio.gather(*(self._judge(request) for request in requests)))

    def close(self) -> None:
        """Ends the worker processes; idempotent."""
        self._pool.close()

    async def _judge(self, request: RewardRequest) -> Reward:
        entry = {key: value for key, value in request.prompt.metadata.items() if key != "datasource"}
        if not {"question", "answer", "metadata"} <= entry.keys():
            raise RewardError(
                f"A prompt of {request.prompt.datasource!r} is no reasoning-gym task, so its scorer cannot judge it: "
                "use reasoning_gym:TASK for training and evaluation alike, or set --reward.verifier."
            )
        task = request.prompt.datasource
        config = self._spec.config if task == self._spec.task else ()
        verdict = await self._pool.judge(worker.score_answer, request.response, entry, common=(task, repr(config)))
        return Reward(value=verdict.value, metrics=verdict.metrics)


class _Entries:
    """A generated dataset, each entry with its origin. It is generated only once, because some tasks take long."""

    def __init__(self, task: str, dataset: Any) -> None:
        self._task = task
        self._dataset = dataset
        self._made: dict[int, Mapping[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if index not in self._made:
            self._made[index] = {**self._dataset[index], "datasource": self._task}
        return self._made[index]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _create(spec: TaskSpec, *, size: int, seed: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{SPEC_PREFIX}{spec.task} needs reasoning-gym: pip install rollgrad[reasoning-gym]."
        ) from error
    if spec.task not in DATASETS:
        near = get_close_matches(spec.task, DATASETS, n=3, cutoff=0.4)
        hint = f"the nearest are {', '.join(near)}" if near else f"there are {len(DATASETS)}, such as chain_sum"
        raise DataError(f"reasoning-gym has no task {spec.task!r}: {hint}.")
    try:
        return reasoning_gym.create_dataset(spec.task, size=size, seed=seed, **dict(spec.config))
    except (TypeError, ValueError, AssertionError) as error:
        settings = ", ".join(f"{key}={value!r}" for key, value in spec.config) or "none"
        raise DataError(f"The reasoning-gym task {spec.task} refuses its settings ({settings}): {error}") from error
