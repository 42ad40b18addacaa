"""Rules of what a run reads: models, data, rewards, evaluation."""

import re
from collections.abc import Iterator, Sequence

from rollgrad.application.settings.derived import first_change
from rollgrad.application.settings.presets import traits_of
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.eval import EvalConfig
from rollgrad.application.settings.sections.optimizer import AdamConfig
from rollgrad.application.settings.sections.reward import JudgeIsolation, RewardConfig, Verifier
from rollgrad.application.settings.sections.train import TrainConfig
from rollgrad.domain.addresses import address_problem
from rollgrad.domain.algorithms.evaluation import summary_names

REASONING_GYM = "reasoning_gym:"
"""Prefix of a dataset that is generated, and judged by its own scorer."""

RENDERING = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
    }
)
"""Arguments of transformers' `apply_chat_template`, which are no variables of a template."""

PROBABILITY_TOLERANCE = 1e-6
"""Mixing probabilities are written in decimal, so their sum is 1 up to rounding."""


def dataset_names(datasets: str) -> tuple[str, ...]:
    """The datasets of a comma-separated setting.

    >>> dataset_names("a.jsonl, reasoning_gym:basic_arithmetic")
    ('a.jsonl', 'reasoning_gym:basic_arithmetic')
    """
    return tuple(name.strip() for name in datasets.split(",") if name.strip())


def model_problems(config: RLConfig) -> Iterator[str]:
    """Whether a model is named."""
    if not config.actor.model_name_or_path:
        yield "No model is set: name one with --actor.model_name_or_path."


def required_data_problems(config: RLConfig, *, has_prompts: bool = False) -> Iterator[str]:
    """Whether prompts to train on are named, unless the caller passes them."""
    if not has_prompts and not dataset_names(config.data.prompt_dataset):
        yield "No prompts are set: name a dataset with --data.prompt_dataset."


def required_eval_problems(config: RLConfig, *, has_held_out: bool) -> Iterator[str]:
    """Whether prompts to evaluate on are named, unless the caller brings them."""
    if not has_held_out and not dataset_names(config.eval.dataset or ""):
        yield "No held-out prompts are set: name a dataset with --eval.dataset."


def optimizer_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of optimizers, learning rates and the length of the run."""
    if config.train.max_steps is not None and config.train.num_episodes != TrainConfig().num_episodes:
        yield (
            f"train.max_steps is {config.train.max_steps} and train.num_episodes is {config.train.num_episodes}, but a "
            "run has one length: leave out --train.max_steps or --train.num_episodes."
        )
    for model in ("actor", "critic"):
        section = getattr(config, model)
        if section.optim_path is None:
            continue
        for name in ("betas", "eps"):
            value = getattr(section.adam, name)
            if value != getattr(AdamConfig(), name):
                yield (
                    f"{model}.adam.{name} is {value}, but {model}.optim_path {section.optim_path} is the optimizer, "
                    f"which has its own constants: leave --{model}.adam.{name} or --{model}.optim_path out."
                )
        if config.cluster.enable and config.cluster.strategy is Strategy.DEEPSPEED:
            yield (
                f"{model}.optim_path is {section.optim_path!r} with cluster.strategy deepspeed, whose processes step "
                "runs of numbers that end within matrices: set --cluster.strategy fsdp2, or leave "
                f"--{model}.optim_path out."
            )


def data_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of the datasets and their mixture."""
    data = config.data
    names = dataset_names(data.prompt_dataset)
    yield from prompt_mixture_problems(config)
    generated = any(_is_generated(name) for name in (*names, *dataset_names(config.eval.dataset or "")))
    if data.size != type(data)().size and not generated:
        yield (
            f"data.size is {data.size}, but no dataset is generated: leave --data.size out, or name a "
            f"{REASONING_GYM}TASK in --data.prompt_dataset."
        )
    for setting, split, datasets in (
        ("data.prompt_split", data.prompt_split, names),
        ("eval.split", config.eval.split, dataset_names(config.eval.dataset or "")),
    ):
        if "[" in split and any(map(_is_generated, datasets)):
            yield (
                f"{setting} is {split}, but prompts of a reasoning_gym task are generated, as many as data.size says: "
                f"leave the brackets of --{setting} out."
            )
    yield from prompt_form_problems(config)


def prompt_mixture_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of the mixing probabilities of prompts."""
    names = dataset_names(config.data.prompt_dataset)
    yield from mixture_problems("data.prompt_probs", config.data.prompt_probs, "data.prompt_dataset", names)


def mixture_problems(setting: str, probs: Sequence[float] | None, datasets: str, names: Sequence[str]) -> Iterator[str]:
    """Yields the problems of the mixing probabilities `probs`, set by `setting`, of the datasets `names`, set by
    `datasets`; none where there are no such probabilities."""
    if probs is None:
        return
    if len(probs) != len(names):
        yield (
            f"{setting} has {len(probs)} numbers for {len(names)} datasets: give one for each dataset of --{datasets}."
        )
    total = sum(probs)
    if min(probs, default=0) <= 0 or abs(total - 1) > PROBABILITY_TOLERANCE:
        yield (
            f"{setting} is {probs} with sum {total:g}, but probabilities are greater than 0 and sum to 1: change "
            f"--{setting}."
        )


def prompt_form_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of rendering prompts, and of their length."""
    data = config.data
    if data.max_len is not None and data.prompt_limit >= data.max_len:
        yield (
            f"data.max_prompt_tokens is {data.max_prompt_tokens}, but data.max_len {data.max_len} is for prompt and "
            "reply together: lower --data.max_prompt_tokens or leave it out, or raise --data.max_len."
        )
    if data.max_len is not None and config.rollout.max_episode_tokens is not None:
        yield (
            f"data.max_len is {data.max_len} and rollout.max_episode_tokens is {config.rollout.max_episode_tokens}, "
            "but both bound the tokens of an episode: leave --rollout.max_episode_tokens or --data.max_len out."
        )
    taken = RENDERING.intersection(data.chat_template_kwargs or ())
    if taken:
        yield (
            f"data.chat_template_kwargs sets {', '.join(sorted(taken))}, which rollgrad itself tells the template: "
            "leave it out of --data.chat_template_kwargs."
        )
    if data.input_template is not None and "{}" not in data.input_template:
        yield (
            f"data.input_template is {data.input_template!r}, which has no {{}} where the prompt goes: change "
            "--data.input_template."
        )


def reward_problems(config: RLConfig, datasets: str, *, has_reward: bool) -> Iterator[str]:
    """Yields the problems of the source of rewards."""
    reward = config.reward
    sources = reward.sources
    generated = all(_is_generated(name) for name in dataset_names(datasets))
    yield from _sum_problems(reward)
    named = reward.function_path is not None or reward.remote_url is not None or has_reward or len(sources) > 1
    if reward.weights is not None and not named:
        yield (
            f"reward.weights is {reward.weights}, but only a function or a server returns rewards with names: set "
            "--reward.function_path or --reward.remote_url, or leave --reward.weights out."
        )
    for key, value in (("remote_url", reward.remote_url), ("judge_url", reward.judge_url)):
        for url in (value or "").split(","):
            if url.strip() and (problem := address_problem(url.strip(), f"reward.{key}")) is not None:
                yield problem
    yield from _judge_problems(reward)
    judged_here = generated and not sources and not has_reward
    yield from _verifier_problems(reward, generated=judged_here)
    if not (sources or generated or has_reward):  # last, for the estimator may have a name that nobody knows
        yield from _unjudged_problems(config)


def _verifier_problems(reward: RewardConfig, *, generated: bool) -> Iterator[str]:
    """Yields the problems of verifiers and of their sandbox; `generated` prompts are judged by their own scorer."""
    if reward.verifier is Verifier.FORMAT and reward.format_pattern is None:
        yield "reward.verifier is format, which needs a regular expression: set --reward.format_pattern."
    if reward.format_pattern is not None:
        try:
            re.compile(reward.format_pattern)
        except re.error as error:
            yield (
                f"reward.format_pattern is {reward.format_pattern!r}, which is no regular expression ({error}): change "
                "--reward.format_pattern."
            )
    isolated = reward.verifier in (Verifier.MATH, Verifier.FORMAT) or generated
    if reward.isolation is not JudgeIsolation.SANDBOX and not isolated:
        yield (
            f"reward.isolation is {reward.isolation}, which only the math and format verifiers and the scorers of "
            f"{REASONING_GYM}TASK read: leave --reward.isolation out."
        )


def _unjudged_problems(config: RLConfig) -> Iterator[str]:
    """Yields that there is no reward, which a run needs that does not learn from a teacher alone, and its evaluation.

    Raises:
        ConfigurationError: no estimator has the name that is set.
    """
    taught = "teacher" in traits_of(config.algo.advantage.estimator).needs
    if taught and not config.eval.dataset:
        return
    unjudged = f"eval.dataset is {config.eval.dataset!r}, but there is no reward to judge its replies by"
    yield (
        f"{unjudged if taught else 'No reward is set'}: name one with --reward.function_path, "
        "--reward.model_name_or_path, --reward.remote_url, --reward.judge_url or --reward.verifier"
        f"{', or leave --eval.dataset out' if taught else ''}."
    )


def _sum_problems(reward: RewardConfig) -> Iterator[str]:
    """Yields the problems of several rewards together."""
    keys, names = list(dict.fromkeys(key for key, _ in reward.sources)), [name for _, name in reward.sources]
    if reward.function_path is not None and "function_path" not in keys:
        yield f"reward.function_path is {reward.function_path!r}, which names no file: change --reward.function_path."
    if len(names) < 2:
        return
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield (
            f"Two of the rewards {', '.join(names)} are called {', '.join(twice)}: name functions with "
            "--reward.function_path FILE:NAME, each of another name."
        )
        return
    weights = reward.weights
    if weights is None and len(keys) > 1:
        # One may be left over from a file of settings: nobody has said that they are a sum.
        given = [
            f"reward.{key} {getattr(reward, key) if key == 'verifier' else repr(getattr(reward, key))}" for key in keys
        ]
        yield (
            f"{' and '.join(given)} are {'both' if len(keys) == 2 else 'all'} set: keep one of them, or say what each "
            f"counts with --reward.weights {' '.join(f'{name} 1' for name in names)}."
        )
    if weights is None:
        return
    # A function or a server may return rewards of other names in the place of its own.
    fixed = [name for key, name in reward.sources if key not in ("function_path", "remote_url")]
    lacking = [name for name in fixed if name not in weights]
    unknown = [] if len(fixed) < len(names) else [name for name in weights if name not in names]
    if lacking or unknown:
        yield (
            f"reward.weights names {', '.join(weights)}, but the rewards are {', '.join(names)}: give one weight to "
            "each with --reward.weights."
        )


def _judge_problems(reward: RewardConfig) -> Iterator[str]:
    """Yields the problems of a language model as judge."""
    for key, meaning in (("judge_model", "the name of the model"), ("judge_prompt", "a text file with {response}")):
        if reward.judge_url is not None and getattr(reward, key) is None:
            yield (
                f"reward.judge_url is {reward.judge_url!r}, but reward.{key} is not set: give {meaning} to "
                f"--reward.{key}."
            )
    if reward.judge_rubric_key is not None and reward.judge_range is None:
        yield (
            f"reward.judge_rubric_key is {reward.judge_rubric_key!r}, whose criteria are met from 0 to 1, but between "
            "which numbers the judge answers is not set: set --reward.judge_range LOWEST HIGHEST, such as 0 1."
        )


def eval_problems(config: RLConfig, *, has_held_out: bool = False) -> Iterator[str]:
    """Yields the problems of evaluation; `has_held_out`: the caller brings the held-out prompts."""
    evaluation = config.eval
    of_all = ("failed", "response_length_mean", "truncated_share")
    names = summary_names(evaluation.n_samples_per_prompt)
    yield from best_metric_problems(config.ckpt, evaluation.dataset, evaluation.steps, names, of_all)
    changed = first_change(evaluation, EvalConfig())
    if not evaluation.dataset and not has_held_out and changed:
        yield (
            f"eval.{changed} is {getattr(evaluation, changed)!r}, but there is nothing to evaluate on: set "
            f"--eval.dataset, or leave --eval.{changed} out (over a file: --eval.{changed} "
            f"{getattr(EvalConfig(), changed)})."
        )
    if evaluation.n_samples_per_prompt > 1 and evaluation.temperature == 0:
        yield (
            f"eval.n_samples_per_prompt is {evaluation.n_samples_per_prompt} with eval.temperature 0, which draws the "
            "same reply each time: set --eval.temperature above 0, or --eval.n_samples_per_prompt 1."
        )


def best_metric_problems(
    ckpt: CheckpointConfig, held_out: str | None, every: int, names: Sequence[str], of_all: Sequence[str] = ()
) -> Iterator[str]:
    """Yields what is wrong with keeping the best model, and with ending a run by it.

    Args:
        ckpt: names the metric.
        held_out: what is evaluated, if anything is.
        every: number of steps after each of which it is.
        names: metrics that an evaluation may have, of all datasets together and of each, without `eval/`.
        of_all: those that it may have of all together alone.
    """
    metric, patience = ckpt.best_metric, ckpt.early_stopping_patience
    if metric is not None and held_out and patience is not None and every < 1:
        yield (
            f"ckpt.early_stopping_patience is {patience}, but with eval.steps {every} there is no evaluation before "
            "the end: set --eval.steps, or leave --ckpt.early_stopping_patience out."
        )
    if metric is not None and not metric.startswith("eval/"):
        yield (
            f"ckpt.best_metric is {metric!r}, but the metrics of evaluations begin with eval/, such as eval/pass@1 or "
            "eval/loss: set --ckpt.best_metric to one of them, or leave it out."
        )
    elif metric is not None and held_out and not _is_measured(metric.removeprefix("eval/"), names, of_all):
        known = ", ".join(f"eval/{name}" for name in (*names, *of_all))
        yield (
            f"ckpt.best_metric is {metric!r}, but evaluations give {known}, and eval/NAME/{names[0]} and the like of "
            "each of several datasets: set --ckpt.best_metric to one of them."
        )
    if metric is not None and not held_out:
        yield (
            f"ckpt.best_metric is {metric!r}, but there is nothing to evaluate on: set --eval.dataset, or leave "
            "--ckpt.best_metric out."
        )


def _is_measured(metric: str, names: Sequence[str], of_all: Sequence[str]) -> bool:
    """Returns whether an evaluation may have a metric; the names of datasets are in its rows, and may be any."""
    data_set, slash, name = metric.rpartition("/")
    return name in names if data_set else not slash and name in (*names, *of_all)


def _is_generated(name: str) -> bool:
    return name.startswith(REASONING_GYM)
