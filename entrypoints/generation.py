"""`rollgrad.generate` and `rollgrad.score`: replies of a model in a file, and their rewards."""

import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import structlog
from attrs import evolve, frozen

from rollgrad.adapters.checkpoints.fingerprint import model_fingerprint
from rollgrad.adapters.data.datasets.source import DatasetPromptSource
from rollgrad.adapters.data.kept_images import KeptImages
from rollgrad.adapters.data.reasoning_gym.source import ReasoningGymPromptSource
from rollgrad.adapters.data.replies import Row, chosen_rows, read_rows, reply_row, unsampled_row
from rollgrad.adapters.data.reply_log import RowLog, read_description, row_log
from rollgrad.adapters.engines.vllm_server.engine import ServedEngine
from rollgrad.adapters.rewards.none import NoReward
from rollgrad.application.rollouts.failure_budget import FailureBudget
from rollgrad.application.rollouts.generation import GenerationService
from rollgrad.application.settings.rules.generation import generation_errors, scoring_errors
from rollgrad.application.settings.rules.resume import may_differ
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.application.settings.sections.algo import AlgoConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.replies import Reply, UnsampledReply
from rollgrad.domain.errors import ConfigurationError, DataError, RollgradError, raise_together
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.entrypoints.composition.cluster import keep_roles
from rollgrad.entrypoints.composition.lifetimes import closing, gives_memory_back, shut_down
from rollgrad.entrypoints.composition.rl.container import RLContainer
from rollgrad.entrypoints.composition.rl.extensions import load_extension
from rollgrad.entrypoints.description import flat_settings, reward_fingerprint
from rollgrad.entrypoints.dry_run import scoring_file_problems
from rollgrad.entrypoints.judged_rows import Made, check_sight, judged_rows
from rollgrad.entrypoints.kinds import settle
from rollgrad.entrypoints.library import container_with
from rollgrad.entrypoints.progress import progress
from rollgrad.entrypoints.training import run_interruptibly

SAMPLING = (
    *("actor.model_name_or_path", "actor.dtype", "actor.float32_head"),
    *("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.max_new_tokens", "rollout.stop_strings"),
)
"""Settings on which replies depend, besides those of `data`."""
GO_ON = "What was made until then is kept: mend that, and start again"

log = structlog.get_logger(__name__)


@frozen(kw_only=True)
class Replies:
    """Result of `generate` and of `score`: the file, the number of its rows, how many of them this call made, and how
    many of all failed."""

    path: Path
    rows: int
    made: int
    failed: int = 0


def generate(
    config: RLConfig,
    out: Path | str,
    *,
    logprobs: bool = False,
    rows: Sequence[int] | None = None,
    retry_failed: bool = False,
    **adapters: Any,
) -> Replies:
    """Samples `config.rollout.n_samples_per_prompt` replies to each prompt of `config.data.prompt_dataset`, and appends
    them to a JSONL file. Those that it has already are left alone: a call that was interrupted, or killed, is continued
    by the same call, and makes the same replies.

    Args:
        config: the settings of a training run, of which those of the model, the prompts and the sampling are read.
        out: the file, whose rows have `row` (number in the dataset, from 0), `sample`, `prompt`, `messages`,
            `completion`, `prompt_tokens`, `tokens`, `stop_reason`, `model`, `seed`, `label`, `datasource` and
            `metadata` (the dataset's own row); of prompts with images also `images` and `image_places`. A reply that
            could not be sampled has null as `completion`, and the reason as `failure`.
        logprobs: also write `logprobs`, those of the tokens under the sampling distribution.
        rows: numbers of the rows whose prompts are taken, in this order; all that are not too long by default.
        retry_failed: sample those again that failed.
        adapters: objects that replace those of the configuration: `engine`, `codec`.

    Raises:
        RollgradError: a setting or the data are wrong, the file has replies of other settings, or more replies than
            `config.rollout.max_failures` failed in this call. What was sampled until then is in the file.
    """

    def chosen(kept: Sequence[int]) -> Sequence[int]:
        return kept if rows is None else rows

    settle(config)
    return generate_chosen(
        config, out, choose=chosen, seed=config.train.seed, logprobs=logprobs, retry_failed=retry_failed, **adapters
    )


@gives_memory_back
def generate_chosen(
    config: RLConfig,
    out: Path | str,
    *,
    choose: Callable[[Sequence[int]], Sequence[int]],
    seed: int,
    logprobs: bool = False,
    retry_failed: bool = False,
    **adapters: Any,
) -> Replies:
    """Does what `generate` does, with `seed` for the sampling alone, and with the rows that `choose` takes of all whose
    prompts are not too long."""
    load_extension(config)
    config = evolve(config, actor=evolve(config.actor, lora=LoraConfig()))  # the model as it is
    raise_together(generation_errors(config))
    container = container_with(config, NoReward(), None, adapters, "generate")
    keep_roles(container, "engines")
    out = Path(out).absolute()
    try:
        prompts = _prompts_by_row(container)
        keys = _keys(prompts, choose, config.rollout.n_samples_per_prompt)
        sampled_by = _sampled_by(config, prompts.survey.fingerprint, seed=seed, logprobs=logprobs)
        defaults = flat_settings(RLConfig())
        with row_log(out, sampled_by, defaults=defaults, retry_failed=retry_failed) as file:
            missing = [key for key in keys if key not in file.done]
            if missing:
                if config.rollout.engine is Engine.SERVER and "engine" not in adapters:
                    _check_servers(container.served_engines(), config, logprobs=logprobs)
                replies = _generation(container, config, seed).stream(_prompted(missing, prompts.prompt))
                images = None if config.data.image_key is None else KeptImages(out)
                made = _sampled(replies, model=config.actor.model_name_or_path, logprobs=logprobs, images=images)
                tolerant = _tolerant(made, config, len(keys), retrying=retry_failed)
                writing = _write(tolerant, file, "Sampling", len(keys), len(missing))
                run_interruptibly(closing(writing, container), "sampling ends, and keeps what it has")
            return Replies(path=out, rows=len(file.done), made=len(missing), failed=file.failed)
    finally:
        shut_down(container)


def _prompts_by_row(container: RLContainer) -> DatasetPromptSource | ReasoningGymPromptSource:
    """Returns the prompts of a run, whose rows have numbers.

    Raises:
        ConfigurationError: they are a source of the caller's own, which has none.
    """
    prompts = container.prompts()
    if not isinstance(prompts, DatasetPromptSource | ReasoningGymPromptSource):
        raise ConfigurationError(
            "generate() takes prompts by their rows, which its prompts= does not have: name a dataset in "
            "data.prompt_dataset."
        )
    return prompts


def _keys(
    prompts: DatasetPromptSource | ReasoningGymPromptSource,
    choose: Callable[[Sequence[int]], Sequence[int]],
    samples: int,
) -> list[tuple[int, int]]:
    """Returns row and sample of each reply: `samples` to each row that `choose` takes of those that are not too
    long."""
    kept = prompts.survey.keeps
    chosen = choose([row for row in range(len(prompts.survey.lengths)) if kept(row)])
    return [(row, sample) for row in chosen for sample in range(samples)]


def _generation(container: RLContainer, config: RLConfig, seed: int) -> GenerationService:
    return GenerationService(
        container.traced_executor(),
        container.codec(),
        container.sampling(),
        seed=seed,
        at_once=config.rollout.max_concurrent,
    )


@gives_memory_back
def score(
    config: RLConfig,
    source: Path | str,
    out: Path | str,
    *,
    reward: RewardSource | Callable[..., Any] | None = None,
    retry_failed: bool = False,
    **adapters: Any,
) -> Replies:
    """Judges the replies of a JSONL file, and appends them with `reward` (null where none applies), `scores` and
    `metrics` to another; with the reason as `failure` where a reply could not be judged. Those that it has already are
    left alone, as `generate` does.

    Args:
        config: the settings of a training run, of which `reward` is read; the model, whose tokenizer reads tokens, is
            that of the replies by default. The scorer of a generated `data.prompt_dataset` judges where no reward is
            set.
        source: rows as `generate` writes them; at least `prompt` and `completion`, texts.
        out: the file that is written.
        reward: the reward, as for `train`.
        retry_failed: judge those again that failed, also where the reward function's file has changed since: the others
            keep their rewards.
        adapters: objects that replace those of the configuration: `codec`.

    Raises:
        RollgradError: a setting or a row is wrong, the file has rows of other settings, or more replies than
            `config.rollout.max_failures` could not be judged in this call. What was judged until then is in the file.
    """
    source, out = Path(source).absolute(), Path(out).absolute()
    if source == out:
        raise ConfigurationError(f"--output is {str(out)!r}, which is the file that is read: choose another --output.")
    load_extension(config)
    config = evolve(config, algo=AlgoConfig())  # its teachers give no rewards
    raise_together([*scoring_errors(config, has_reward=reward is not None), *scoring_file_problems(config)])
    keys, models = surveyed(source, config)
    if not config.actor.model_name_or_path:
        config = evolve(config, actor=evolve(config.actor, model_name_or_path=_only(models)))
    container = container_with(config, reward, None, adapters, "score")
    keep_roles(container, "reward")
    try:
        with row_log(
            out,
            _judged_by(config, source),
            defaults=flat_settings(RLConfig()),
            retry_failed=retry_failed,
            mendable=("function",),
        ) as file:
            total = len(keys)
            keys -= file.done  # in place: of a million rows each set of keys is 124 MiB
            if count := len(keys):
                missing = chosen_rows(source, keys, flag="--input")
                judged = judged_rows(container, missing, at_once=config.rollout.max_concurrent)
                tolerant = _tolerant(judged, config, total, retrying=retry_failed)
                writing = _write(tolerant, file, "Scoring", total, count)
                run_interruptibly(closing(writing, container), "scoring ends, and keeps what it has")
            return Replies(path=out, rows=len(file.done), made=count, failed=file.failed)
    finally:
        shut_down(container)


def _check_servers(servers: Sequence[ServedEngine], config: RLConfig, *, logprobs: bool) -> None:
    """Warns of servers that call their model otherwise than the settings do, which the replies are said to be of.

    Raises:
        ConfigurationError: a server does not tell the log-probs that are to be written.
    """
    name, rollout = config.actor.model_name_or_path, config.rollout
    changed = rollout.temperature not in (0, 1) or (rollout.top_p, rollout.top_k) != (1, 0)
    for url, server in zip(rollout.server_urls, servers, strict=True):
        if logprobs and changed and not server.processed:
            raise ConfigurationError(
                f"rollout.server_urls names {url}, whose log-probs are of temperature 1 and all tokens, not of the "
                "distribution that is sampled: start vllm serve with --logprobs-mode processed_logprobs, or leave "
                "--logprobs out."
            )
        if name not in server.names:
            log.warning(
                f"the server {url} has {' at '.join(server.names)}, which is taken for {name!r}: check that they are "
                "the same model"
            )


def surveyed(source: Path, config: RLConfig) -> tuple[set[tuple[int, int]], set[str]]:
    """Returns row and sample of all replies of a file, which are not kept in memory, and the models whose tokens they
    have.

    Raises:
        DataError: a line is no reply, or there is none; or a reward model cannot see its images.
    """
    keys: set[tuple[int, int]] = set()
    models: set[str] = set()
    for row in read_rows(source, flag="--input", keys=keys):
        if config.reward.model_name_or_path is not None:
            check_sight(row, source, sees=config.data.image_key is not None)
        if row.get("tokens"):
            models.add(row.get("model", ""))
    if not keys:
        raise DataError(f"{source} has no rows: check --input.")
    return keys, models


async def _sampled(
    replies: AsyncIterator[Reply | UnsampledReply], *, model: str, logprobs: bool, images: KeptImages | None
) -> AsyncIterator[Made]:
    async with aclosing(replies) as samples:  # type: ignore[type-var] # it is an asynchronous generator
        async for reply in samples:
            if isinstance(reply, Reply):
                yield reply_row(reply, model=model, logprobs=logprobs, images=images), None
            else:
                yield unsampled_row(reply, model=model, images=images), reply.failure


async def _tolerant(made: AsyncIterator[Made], config: RLConfig, total: int, *, retrying: bool) -> AsyncIterator[Row]:
    """Yields the rows that are made, also of replies that failed. As many failures of this call are tolerated as of one
    that makes all `total` rows: those that fail each time would else end every call that makes them alone.

    Raises:
        RewardError, EngineError: too many failed, or the only one; the last one's row is not yielded.
    """
    budget = FailureBudget(0 if total == 1 else config.rollout.max_failures, total)
    async with aclosing(made) as results:  # type: ignore[type-var] # it is an asynchronous generator
        async for row, failure in results:
            if failure is not None:
                try:
                    budget.charge([failure])
                except RollgradError as error:
                    again = "" if retrying else " with --retry_failed"  # or they stay failed
                    raise type(error)(f"{str(error).rstrip('.')}. {GO_ON}{again}.") from error
            yield row


async def _write(made: AsyncIterator[Row], file: RowLog, doing: str, total: int, missing: int) -> None:
    """Appends what is made to a file, and shows how far it is, on a terminal."""
    with progress(doing, total, total - missing) as advance:
        async with aclosing(made) as rows:  # type: ignore[type-var] # it is an asynchronous generator
            async for row in rows:
                file.add(row)
                advance()


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
    model = config.reward.model_name_or_path
    return {
        "command": "score",
        **{name: value for name, value in settings.items() if name.startswith("reward.") and not may_differ(name)},
        "data.prompt_dataset": config.data.prompt_dataset,
        "function": reward_fingerprint(config.reward.function_path),
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
