"""Rules of runs that learn from examples. See `validation`."""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TypeVar

from attrs import evolve

from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.rules.cluster import cluster_problems
from rollgrad.application.settings.rules.images import example_image_problems
from rollgrad.application.settings.rules.inputs import (
    best_metric_problems,
    dataset_names,
    mixture_problems,
    model_problems,
    optimizer_problems,
    prompt_form_problems,
)
from rollgrad.application.settings.rules.lora import lora_problems
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import ActorConfig, LoraConfig, ModelConfig
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.application.settings.sections.examples import (
    ExampleDataConfig,
    ExampleEvalConfig,
    ExampleFormat,
    ExampleTrainConfig,
    PairDataConfig,
    RankedReplies,
    RowsConfig,
)
from rollgrad.application.settings.sections.train import TrainConfig
from rollgrad.application.settings.sft import SFTRun, SupervisedTrainConfig
from rollgrad.application.settings.validation import broken_rules
from rollgrad.domain.errors import ConfigurationError

Offline = TypeVar("Offline", bound=OfflineRun)

UNREAD = {
    "logger.log_samples": "nothing is sampled in this run",
    "logger.trajectories_max_gib": "nothing is sampled in this run",
    "actor.lora.sync": "no engine samples in this run",
}
"""Settings of the sections that runs over examples share with others, which they refuse, and why."""


def example_errors(run: Offline, *own: Callable[[Offline], Iterator[str]]) -> list[ConfigurationError]:
    """Returns every rule that the settings of a run over examples break: those of all such runs, and its `own`."""
    return broken_rules(
        run, lambda run: (rule(run) for rule in (example_problems, stream_problems, *own, shared_problems))
    )


def sft_errors(run: SFTRun) -> list[ConfigurationError]:
    """Returns every rule that the settings of a run of supervised fine-tuning break."""
    return example_errors(
        run,
        lambda run: step_problems(run.train),
        noise_problems,
        lambda run: format_problems(run.data),
    )


def example_problems(run: OfflineRun) -> Iterator[str]:
    """Yields what is wrong with the examples and the length of the run."""
    data, train = run.data, run.train
    names = dataset_names(data.dataset)
    if not names:
        yield "No examples are set: name a dataset with --data.dataset."
    yield from mixture_problems("data.probs", data.probs, "data.dataset", names)
    if train.max_steps is not None and train.num_epochs != ExampleTrainConfig().num_epochs:
        yield (
            f"train.max_steps is {train.max_steps} and train.num_epochs is {train.num_epochs}, but a run has one "
            "length: leave out --train.max_steps or --train.num_epochs."
        )
    if run.eval.dataset is None and run.eval.steps != ExampleEvalConfig().steps:
        yield (
            f"eval.steps is {run.eval.steps}, but there is nothing to evaluate on: set --eval.dataset, or leave "
            "--eval.steps out."
        )
    if run.eval.dataset is not None and not dataset_names(run.eval.dataset):
        yield f"eval.dataset is {run.eval.dataset!r}, which names no dataset: change --eval.dataset, or leave it out."
    yield from best_metric_problems(run.ckpt, run.eval.dataset, run.eval.steps, run.evaluated())
    yield from example_image_problems(run)
    default = type(run)()
    for name, why in UNREAD.items():
        value = attrgetter(name)(run)
        if value != attrgetter(name)(default):
            shown = f"{value:g}" if isinstance(value, float) else value
            yield f"{name} is {shown}, but {why}: leave --{name} out."


def step_problems(train: SupervisedTrainConfig) -> Iterator[str]:
    """Yields what is wrong with the size of a step."""
    if train.batch_tokens is not None and train.batch_size != ExampleTrainConfig().batch_size:
        yield (
            f"train.batch_tokens is {train.batch_tokens} and train.batch_size is {train.batch_size}, but a step has "
            "one size: leave out --train.batch_tokens or --train.batch_size."
        )


def noise_problems(run: SFTRun) -> Iterator[str]:
    """Yields what is wrong with noise on embeddings."""
    if run.train.neftune_alpha and run.ds.sequence_parallel_size > 1:
        yield (
            f"train.neftune_alpha is {run.train.neftune_alpha} with ds.sequence_parallel_size "
            f"{run.ds.sequence_parallel_size}, but noise is made for whole sequences: leave one of "
            "--train.neftune_alpha and --ds.sequence_parallel_size out."
        )


def stream_problems(run: OfflineRun) -> Iterator[str]:
    """Yields what is wrong with rows that are read while training goes on."""
    data, train = run.data, run.train
    if not data.stream:
        return
    if train.max_steps is None:
        yield "data.stream is on, but rows that are streamed have no known number: set --train.max_steps."
    if len(dataset_names(data.dataset)) > 1:
        yield f"data.stream is on, but data.dataset names several: {data.dataset}: give one to --data.dataset."
    if "[" in data.split:
        yield (
            f"data.stream is on, but data.split is {data.split}, a slice of rows whose number is not known: leave the "
            "brackets of --data.split out."
        )
    if data.max_samples is not None:
        yield (
            f"data.stream is on, but data.max_samples is {data.max_samples}: leave --data.max_samples out, and set "
            "--train.max_steps."
        )
    if isinstance(train, SupervisedTrainConfig) and train.batch_tokens is not None:
        yield (
            f"data.stream is on, but train.batch_tokens is {train.batch_tokens}, which needs the lengths of all rows: "
            "leave --train.batch_tokens out, and set --train.batch_size."
        )
    if data.num_workers != RowsConfig().num_workers:
        yield (
            f"data.stream is on, but data.num_workers is {data.num_workers}: streamed rows are prepared in the run's "
            "own process; leave --data.num_workers out."
        )
    if isinstance(data, PairDataConfig) and data.pairs is RankedReplies.ALL:
        yield (
            "data.stream is on, but data.pairs is all, and a streamed row is one pair: leave --data.pairs or "
            "--data.stream out."
        )


def format_problems(data: ExampleDataConfig) -> Iterator[str]:
    """Yields what is wrong with how rows are read."""
    if data.output_key is not None and data.input_key is None:
        yield (
            f"data.output_key is {data.output_key!r}, but no column with its prompt is named: set --data.input_key, or "
            "leave --data.output_key out."
        )
    if data.input_key is not None and data.format in (
        ExampleFormat.TOKENS,
        ExampleFormat.REPLIES,
        ExampleFormat.ALPACA,
    ):
        yield (
            f"data.input_key is {data.input_key!r}, but data.format {data.format} has columns of its own: leave "
            "--data.input_key or --data.format out."
        )
    others = {
        ExampleFormat.PAIRS: "train dpo",
        ExampleFormat.UNPAIRED: "train kto",
        ExampleFormat.STEPS: "train prm",
    }
    if data.format in others:
        yield (
            f"data.format is {data.format}, which {others[data.format]} learns from: name the columns to imitate with "
            "--data.input_key and --data.output_key, or leave --data.format out."
        )


def shared_problems(run: OfflineRun) -> Iterator[str]:
    """Yields what is wrong with settings that reinforcement learning has as well, by its rules."""
    same = as_rl(run)
    for rule in (model_problems, lora_problems, optimizer_problems, cluster_problems, prompt_form_problems):
        yield from rule(same)


def as_rl(run: OfflineRun) -> RLConfig:
    """Returns the settings of a reinforcement-learning run that has the same model, processes and chat template."""
    actor, data, train = run.actor, run.data, run.train
    names = (field for field in ModelConfig.__annotations__ if field != "lora")
    lora = evolve(actor.lora, sync=LoraConfig().sync)  # another rule looks at `sync`
    return RLConfig(
        actor=ActorConfig(**{name: getattr(actor, name) for name in names}, lora=lora),
        data=DataConfig(
            apply_chat_template=data.apply_chat_template,
            chat_template=data.chat_template,
            chat_template_kwargs=data.chat_template_kwargs,
            system_prompt=data.system_prompt,
            input_template=data.input_template,
        ),
        train=TrainConfig(enable_ema=train.enable_ema, ema_beta=train.ema_beta),
        cluster=run.cluster,
        ds=run.ds,
    )
