"""`rollgrad.generate` and `rollgrad.score`: replies of a model in a file, and their rewards."""

import asyncio
import hashlib
import itertools
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import structlog
from attrs import evolve, frozen

from rollgrad.adapters.checkpoints.fingerprint import model_fingerprint
from rollgrad.adapters.data.datasets.source import DatasetPromptSource
from rollgrad.adapters.data.reasoning_gym.source import ReasoningGymPromptSource
from rollgrad.adapters.data.replies import (
    Row,
    RowLog,
    read_description,
    read_rows,
    reply_row,
    row_log,
    row_prompt,
)
from rollgrad.adapters.rewards.none import NoReward
from rollgrad.application.episodes.judging import judge_request
from rollgrad.application.rollouts.generation import GenerationService, scores
from rollgrad.application.settings.function_path import FunctionPath
from rollgrad.application.settings.rules.generation import generation_errors, scoring_errors
from rollgrad.application.settings.rules.resume import may_differ
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.application.settings.sections.algo import AlgoConfig
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import ConfigurationError, DataError, raise_together
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.entrypoints.composition.lifetimes import closing, shut_down
from rollgrad.entrypoints.composition.rl import RLContainer
from rollgrad.entrypoints.description import flat_settings
from rollgrad.entrypoints.dry_run import scoring_file_problems
from rollgrad.entrypoints.event_loop import run_to_end
from rollgrad.entrypoints.library import container_with
from rollgrad.entrypoints.training import heeding_signals

SAMPLING = (
    *("actor.model_name_or_path", "actor.dtype", "actor.float32_head"),
    *("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.max_new_tokens", "rollout.stop_strings"),
)
"""Settings on which replies depend, besides those of `data`."""
LINES = 20
"""Approximate number of lines in a log file that say how far it is."""

log = structlog.get_logger(__name__)


@frozen(kw_only=True)
class Replies:
    """Result of `generate` and of `score`: the file, the number of its rows, and how many of them this call made."""

    path: Path
    rows: int
    made: int


def generate(
    config: RLConfig, out: Path | str, *, logprobs: bool = False, rows: Sequence[int] | None = None, **adapters: Any
) -> Replies:
    """Samples `config.rollout.n_samples_per_prompt` replies to each prompt of `config.data.prompt_dataset`, and appends
    them to a JSONL file. Those that it has already are left alone: a call that was interrupted, or killed, is continued
    by the same call, and makes the same replies.

    Args:
        config: the settings of a training run, of which those of the model, the prompts and the sampling are read.
        out: the file, whose rows have `row` (number in the data set, from 0), `sample`, `prompt`, `messages`,
            `completion`, `prompt_tokens`, `tokens`, `stop_reason`, `model`, `seed`, `label`, `datasource` and
            `metadata` (the data set's own row).
        logprobs: also write `logprobs`, those of the tokens under the sampling distribution.
        rows: numbers of the rows whose prompts are taken, in this order; all that are not too long by default.
        adapters: objects that replace those of the configuration: `engine`, `codec`.

    Raises:
        RollgradError: a setting or the data are wrong, or the file has replies of other settings. What was sampled
            until then is in the file.
    """

    def chosen(kept: Sequence[int]) -> Sequence[int]:
        return kept if rows is None else rows

    return generate_chosen(config, out, choose=chosen, seed=config.train.seed, logprobs=logprobs, **adapters)


def generate_chosen(
    config: RLConfig,
    out: Path | str,
    *,
    choose: Callable[[Sequence[int]], Sequence[int]],
    seed: int,
    logprobs: bool = False,
    **adapters: Any,
) -> Replies:
    """Does what `generate` does, with `seed` for the sampling alone, and with the rows that `choose` takes of all whose
    prompts are not too long."""
    config = evolve(config, actor=evolve(config.actor, lora=LoraConfig()))  # the model as it is
    raise_together(generation_errors(config))
    container = container_with(config, NoReward(), None, adapters, "generate")
    out = Path(out).absolute()
    try:
        prompts = container.prompts()
        if not isinstance(prompts, DatasetPromptSource | ReasoningGymPromptSource):
            raise ConfigurationError(
                "generate() takes prompts by their rows, which its prompts= does not have: name a data set in "
                "data.prompt_dataset."
            )
        kept = prompts.survey.keeps
        numbers = choose([row for row in range(len(prompts.survey.lengths)) if kept(row)])
        keys = [(row, sample) for row in numbers for sample in range(config.rollout.n_samples_per_prompt)]
        with row_log(
            out, _sampled_by(config, prompts.survey.fingerprint, seed=seed, logprobs=logprobs), flag="--out"
        ) as file:
            missing = [key for key in keys if key not in file.done]
            if missing:
                service = GenerationService(
                    container.executor(),
                    container.codec(),
                    container.sampling(),
                    seed=seed,
                    at_once=config.rollout.max_concurrent,
                )
                replies = service.stream(_prompted(missing, prompts.prompt))
                model = config.actor.model_name_or_path
                made = (
                    [reply_row(reply, model=model, logprobs=logprobs) for reply in ready] async for ready in replies
                )
                _to_end(closing(_write(made, file, "Sampling", len(keys), len(missing)), container))
            return Replies(path=out, rows=len(file.done), made=len(missing))
    finally:
        shut_down(container)


def score(
    config: RLConfig,
    source: Path | str,
    out: Path | str,
    *,
    reward: RewardSource | Callable[..., Any] | None = None,
    **adapters: Any,
) -> Replies:
    """Judges the replies of a JSONL file, and appends them with `reward` (null where none applies), `scores` and
    `metrics` to another. Those that it has already are left alone, as `generate` does.

    Args:
        config: the settings of a training run, of which `reward` is read; the model, whose tokenizer reads tokens, is
            that of the replies by default. The scorer of a generated `data.prompt_dataset` judges where no reward is
            set.
        source: rows as `generate` writes them; at least `prompt` and `completion`, texts.
        out: the file that is written.
        reward: as for `train`.
        adapters: objects that replace those of the configuration: `codec`.

    Raises:
        RollgradError: a setting or a row is wrong, a reply could not be judged, or the file has rows of other settings.
            What was judged until then is in the file.
    """
    source, out = Path(source).absolute(), Path(out).absolute()
    if source == out:
        raise ConfigurationError(f"--out is {str(out)!r}, which is the file that is read: choose another --out.")
    config = evolve(config, algo=AlgoConfig())  # its teachers give no rewards
    raise_together([*scoring_errors(config, has_reward=reward is not None), *scoring_file_problems(config)])
    keys, models = _surveyed(source)
    if not config.actor.model_name_or_path:
        config = evolve(config, actor=evolve(config.actor, model_name_or_path=_only(models)))
    container = container_with(config, reward, None, adapters, "score")
    try:
        with row_log(out, _judged_by(config, source), flag="--out") as file:
            count = len(keys - file.done)
            if count:
                missing = (row for row in read_rows(source, flag="--input") if _key(row) not in file.done)
                judged = _judged(container, missing, at_once=config.rollout.max_concurrent)
                _to_end(closing(_write(judged, file, "Scoring", len(keys), count), container))
            return Replies(path=out, rows=len(file.done), made=count)
    finally:
        shut_down(container)


def _to_end(work: Coroutine[Any, Any, None]) -> None:
    """Does `work`; SIGTERM and SIGHUP end it as Ctrl-C does, with engines closed and rows written.

    Raises:
        KeyboardInterrupt: one of them came.
    """
    try:
        run_to_end(heeding_signals(work))
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error


def _surveyed(source: Path) -> tuple[set[tuple[int, int]], set[str]]:
    """Returns row and sample of all replies of a file, which are not kept in memory, and the models whose tokens they
    have.

    Raises:
        DataError: a line is no reply, or there is none.
    """
    keys: set[tuple[int, int]] = set()
    models: set[str] = set()
    for row in read_rows(source, flag="--input"):
        keys.add(_key(row))
        if row.get("tokens"):
            models.add(row.get("model", ""))
    if not keys:
        raise DataError(f"{source} has no rows: check --input.")
    return keys, models


def _key(row: Row) -> tuple[int, int]:
    return row["row"], row["sample"]


async def _judged(container: RLContainer, rows: Iterable[Row], *, at_once: int) -> AsyncIterator[list[Row]]:
    asked: deque[Row] = deque()

    def requests() -> Iterator[RewardRequest]:
        for row in rows:
            asked.append(row)
            yield _request(container, row)

    async with aclosing(scores(container.reward(), requests(), at_once=at_once)) as rewards:  # type: ignore[type-var]
        async for ready in rewards:
            yield [_with_reward(asked.popleft(), reward) for reward in ready]


def _request(container: RLContainer, row: Row) -> RewardRequest:
    prompt = row_prompt(row)
    stop = StopReason(row.get("stop_reason", StopReason.STOP))
    if not (prompt.token_ids and row.get("tokens")):
        return RewardRequest(prompt=prompt, response=row["completion"], stop_reason=stop)
    return judge_request(
        container.codec(),
        prompt,
        (*prompt.token_ids, *row["tokens"]),
        opening=len(prompt.token_ids),
        response=row["completion"],
        stop_reason=stop,
        step=0,
    )


def _with_reward(row: Row, reward: Reward | None) -> Row:
    if reward is None:
        return {**row, "reward": None, "scores": None, "metrics": {}}
    score = reward.value if reward.score is None else reward.score
    return {**row, "reward": reward.value, "scores": score, "metrics": {**reward.parts, **reward.metrics}}


async def _write(made: AsyncIterator[list[Row]], file: RowLog, doing: str, total: int, missing: int) -> None:
    """Appends what is made to a file, and shows how far it is, on a terminal."""
    with _progress(doing, total, total - missing) as advance:
        async with aclosing(made) as chunks:  # type: ignore[type-var] # it is an asynchronous generator
            async for rows in chunks:
                file.add(rows)
                advance(len(rows))


@contextmanager
def _progress(doing: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, and elsewhere a line now and then; yields the function that moves it by a number of
    rows."""
    if not sys.stderr.isatty():
        yield _lines(doing, total, done)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(doing, total=total, completed=done)
        yield lambda rows: bar.advance(task, rows)


def _lines(doing: str, total: int, done: int) -> Callable[[int], None]:
    def advance(rows: int) -> None:
        nonlocal done
        before, done = done, done + rows
        if before * LINES // total < done * LINES // total:
            log.info(doing.lower(), done=done, of=total)

    return advance


def _prompted(keys: Sequence[tuple[int, int]], prompt: Callable[[int], Prompt]) -> Iterator[tuple[int, int, Prompt]]:
    """Yields rows and samples with their prompts, each of which is made once."""
    for row, group in itertools.groupby(keys, key=lambda key: key[0]):
        its = prompt(row)
        for _, sample in group:
            yield row, sample, its


def _sampled_by(config: RLConfig, fingerprint: str, *, seed: int, logprobs: bool) -> Mapping[str, Any]:
    """Returns all that replies depend on."""
    settings = flat_settings(config)
    return {
        "command": "generate",
        **{name: value for name, value in settings.items() if name in SAMPLING or name.startswith("data.")},
        "weights": model_fingerprint(config.actor.model_name_or_path),
        "prompts": fingerprint,
        "seed": seed,
        "logprobs": logprobs,
    }


def _judged_by(config: RLConfig, source: Path) -> Mapping[str, Any]:
    """Returns all that rewards depend on, as far as this machine knows it."""
    settings = flat_settings(config)
    function, model = config.reward.function_path, config.reward.model_name_or_path
    return {
        "command": "score",
        **{name: value for name, value in settings.items() if name.startswith("reward.") and not may_differ(name)},
        "data.prompt_dataset": config.data.prompt_dataset,
        "function": function and hashlib.sha256(Path(FunctionPath.parse(function).file).read_bytes()).hexdigest(),
        "weights": model and model_fingerprint(model),
        "replies": read_description(source) or hashlib.sha256(source.read_bytes()).hexdigest(),
    }


def _only(models: set[str]) -> str:
    """Returns the model whose replies are judged; an empty text if none has tokens.

    Raises:
        ConfigurationError: there are several.
    """
    if len(models) > 1:
        raise ConfigurationError(
            f"The replies are of {', '.join(sorted(models))}: name the one whose tokenizer reads them all with "
            "--actor.model_name_or_path."
        )
    return next(iter(models), "")
