"""`rollgrad.loop`: sample, judge, select and learn, again and again, and continue wherever it was cut off.

Invariant: `loop.json` names the stage that is not finished; each stage can be repeated, and continues what is there of
its files, so that a killed loop ends as one that nothing disturbed.

A loop's directory holds `loop.json`, `config.yaml`, `metrics.jsonl`, the report, and in `iteration_N` the replies
(`replies.jsonl`), their rewards (`scored.jsonl`), what is learned from (`examples.jsonl`) and the training (`run`).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from attrs import define, evolve, field, frozen

from rollgrad.adapters.checkpoints.files import replace_file
from rollgrad.adapters.checkpoints.lock import keep_locked, locked
from rollgrad.adapters.checkpoints.names import METRICS_FILE
from rollgrad.adapters.data.datasets.prompt_builder import with_suffix
from rollgrad.adapters.data.replies import Row, read_rows, rows_text
from rollgrad.adapters.system.unwritable import remedy
from rollgrad.application.settings.dpo import DPORun
from rollgrad.application.settings.loop import (
    IMAGES,
    CSFTRun,
    IterDPORun,
    LoopRun,
    RSRun,
    sampling_run,
    target_suffix,
    training_run,
)
from rollgrad.application.settings.loop_rules import loop_errors, may_change
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.ckpt import Resume
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.algorithms.selection import Judged, best, best_against_worst, standardised, usable
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import PromptCursor
from rollgrad.domain.errors import CheckpointError, DataError, raise_together
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.entrypoints.composition.lifetimes import shut_down
from rollgrad.entrypoints.description import flat_settings, settings_file
from rollgrad.entrypoints.dry_run import eval_file_problems, generation_file_problems
from rollgrad.entrypoints.generation import generate_chosen, score
from rollgrad.entrypoints.inputs import check_inputs
from rollgrad.entrypoints.kinds import settle
from rollgrad.entrypoints.library import container_with, evaluate
from rollgrad.entrypoints.offline import train_dpo, train_sft
from rollgrad.entrypoints.reporting import report_run
from rollgrad.entrypoints.run_directory import check_output, has_state, remove_states, write_config
from rollgrad.entrypoints.training import TrainResult

log = structlog.get_logger(__name__)

STATE_FILE = "loop.json"
STAGES = ("generate", "score", "select", "train", "evaluate")
"""Stages of an iteration, in order. Iteration 0 has the last one alone."""


@frozen(kw_only=True)
class LoopResult:
    """Result of a loop."""

    output_dir: Path
    model: Path | None
    """Directory of the last trained model."""
    history: Sequence[Mapping[str, float]]
    """Metrics of each iteration; the first entry is that of the first model."""
    report: Path | None = None
    stopped_by: int | None = None
    """Signal that interrupted it; None if it came to its end."""


@define
class _State:
    """Contents of `loop.json`: settings; the iteration and stage that are not finished; the `position` of the
    iteration's first prompt in the order of all; and the metrics of finished iterations, and of this one so far."""

    settings: Mapping[str, Any]
    iteration: int = 0
    stage: str = "evaluate"
    position: int = 0
    history: list[dict[str, float]] = field(factory=lambda: [{}])


def loop(run: LoopRun, *, reward: RewardSource | Callable[..., Any] | None = None) -> LoopResult:
    """Runs rejection sampling (`RSRun`), iterated DPO (`IterDPORun`) or conditional fine-tuning (`CSFTRun`), or
    continues it where it was cut off, by the same call.

    Args:
        run: the settings; see `rollgrad loop rs --help`.
        reward: the reward, as for `train`.

    Raises:
        RollgradError: a setting, a file or a reply is wrong, or the directory holds a loop of other settings. What was
            made until then is kept.
    """
    settle(run)
    files = sampling_run(run)  # a reward that is not there would be missed after hours of sampling
    wrong_files = [*generation_file_problems(files), *eval_file_problems(files).values()]
    raise_together([*loop_errors(run, has_reward=reward is not None), *wrong_files])
    output = Path(run.ckpt.output_dir).absolute()
    if not (output / STATE_FILE).exists():
        check_output(run)
    with locked(output, "--ckpt.output_dir"):
        _check(run, files, reward)
        state = _begin(run, output)
        stopped_by = None
        while stopped_by is None and state.iteration <= run.loop.iterations:
            stopped_by = _stage(run, output, state, reward)
            if stopped_by is None:
                _advance(run, output, state)
        model = _model(output, min(state.iteration, run.loop.iterations + 1) - 1)
        return LoopResult(
            output_dir=output,
            model=None if model is None else Path(model),
            history=tuple(state.history[: state.iteration]),
            report=report_run(output, f"{Path(run.actor.model_name_or_path).name} on {run.data.prompt_dataset}"),
            stopped_by=stopped_by,
        )


def _check(run: LoopRun, config: RLConfig, reward: Any) -> None:
    """Checks what the stages read, as `check_inputs`: the first that judges comes after hours of sampling."""
    container = container_with(config, reward, None, {}, "loop")
    try:
        check_inputs(container, trains=run)
    finally:
        shut_down(container)


def _begin(run: LoopRun, output: Path) -> _State:
    """Returns the state from which the loop goes on.

    Raises:
        CheckpointError: the directory holds another loop.
    """
    settings = {"kind": type(run).__name__, **flat_settings(run)}
    path = output / STATE_FILE
    try:
        state = _State(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        state = _State(settings)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): choose another --ckpt.output_dir.") from error
    differ = [
        f"{name} ({state.settings.get(name)!r}, now {value!r})"
        for name, value in json.loads(json.dumps(settings)).items()
        if state.settings.get(name) != value and not may_change(name)
    ]
    if differ:
        raise CheckpointError(
            f"{path} is of a loop with other settings, which differ in {', '.join(differ)}: set them back to continue "
            "it, or choose another --ckpt.output_dir."
        )
    state.settings = settings
    _save(output, state)
    write_config(output, settings_file(run))
    return state


def _stage(run: LoopRun, output: Path, state: _State, reward: Any) -> int | None:
    """Does the stage that `state` names; returns the signal that interrupted it, if one did."""
    number, metrics = state.iteration, state.history[-1]
    log.info("loop", iteration=f"{number}/{run.loop.iterations}", stage=state.stage)
    before = _model(output, number - 1)
    sampling = sampling_run(run, model=before, trained=before is not None)
    here = _folder(output, number)
    match state.stage:
        case "generate":
            seed = run.train.seed + number
            chosen = _slice(run.rollout.batch_size, run.train.seed, state.position)
            generate_chosen(sampling, here / "replies.jsonl", choose=chosen, seed=seed, retry_failed=True)
        case "score":
            score(sampling, here / "replies.jsonl", here / "scored.jsonl", reward=reward, retry_failed=True)
        case "select":
            metrics |= _select(run, here, trained=before is not None)
        case "train":
            settings = training_run(
                run,
                examples=str(here / "examples.jsonl"),
                model=before,
                output_dir=str(here / "run"),
            )
            result = _train(settings)
            return result.stopped_by if result.interrupted else None
        case "evaluate":
            remove_states(here / "run")  # several times the model's size, which nothing continues from any more
            if run.eval.dataset is None:
                return None
            model = _model(output, number)
            evaluated = sampling_run(run, model=model, trained=model is not None)
            metrics |= evaluate(evaluated, reward=reward)
    return None


def _advance(run: LoopRun, output: Path, state: _State) -> None:
    """Moves `state` to the next stage, and keeps it."""
    following = STAGES.index(state.stage) + 1
    if following < len(STAGES):
        state.stage = STAGES[following]
    else:
        _keep_metrics(output, state.history)
        state.iteration, state.stage = state.iteration + 1, STAGES[0]
        state.position = (state.iteration - 1) * run.rollout.batch_size
        state.history.append({})
    _save(output, state)


def _slice(size: int, seed: int, position: int) -> Callable[[Sequence[int]], list[int]]:
    """Returns the function that chooses an iteration's rows: `size` of all, from `position` on in the order that `seed`
    gives, and from the beginning again after the last; no row twice."""

    def chosen(rows: Sequence[int]) -> list[int]:
        order = PromptCursor(seed).order(len(rows)).tolist()
        return [rows[order[(position + index) % len(rows)]] for index in range(min(size, len(rows)))]

    return chosen


def _select(run: LoopRun, here: Path, *, trained: bool) -> dict[str, float]:
    """Writes what is learned from; returns the metrics of the selection.

    Raises:
        DataError: there is nothing to learn from.
    """
    rows = {(row["row"], row["sample"]): row for row in read_rows(here / "scored.jsonl", flag="--input")}
    replies = [
        Judged(
            row=row["row"],
            sample=row["sample"],
            text=row["completion"],
            reward=row["reward"],
            truncated=StopReason(row["stop_reason"]).truncated,
        )
        for row in rows.values()
    ]
    examples, dropped = _examples(run, replies, rows, target_suffix(run) if trained else None)
    if not examples:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise DataError(
            f"None of the {len(replies)} replies in {here / 'scored.jsonl'} can be learned from ({reasons}): raise "
            "--rollout.max_new_tokens if they are cut off, --rollout.n_samples_per_prompt or --rollout.temperature if "
            "they are all alike, in a loop with another --ckpt.output_dir, whose --actor.model_name_or_path may be the "
            "last model of this one."
        )
    replace_file(here / "examples.jsonl", rows_text(examples))
    log.info(
        "selected", examples=len(examples), replies=len(replies), **{k.replace(" ", "_"): v for k, v in dropped.items()}
    )
    rewards = [reply.reward for reply in replies if reply.reward is not None]
    return {
        "reward/mean": sum(rewards) / len(rewards),
        "rollout/truncated_share": sum(reply.truncated for reply in replies) / len(replies),
        "rollout/response_length_mean": sum(len(row["tokens"]) for row in rows.values()) / len(rows),
        "loop/examples": float(len(examples)),
        **{f"loop/dropped/{reason.replace(' ', '_')}": float(count) for reason, count in dropped.items()},
    }


def _examples(
    run: LoopRun, replies: Iterable[Judged], rows: Mapping[tuple[int, int], Row], suffix: str | None
) -> tuple[list[Row], "Counter[str]"]:
    """Returns the rows that are learned from, and what was left out; `suffix` stood after the prompts."""

    def row_of(reply: Judged) -> Row:
        return rows[reply.row, reply.sample]

    if isinstance(run, IterDPORun):
        pairs = best_against_worst(replies, min_margin=run.loop.min_margin)
        return [
            {
                "prompt": row_of(chosen)["messages"] or row_of(chosen)["prompt"],
                "chosen": chosen.text,
                "rejected": rejected.text,
                "chosen_reward": chosen.reward,
                "rejected_reward": rejected.reward,
                "row": chosen.row,
                **_images(row_of(chosen)),
            }
            for chosen, rejected in pairs.kept
        ], pairs.dropped
    if isinstance(run, CSFTRun):
        kept = usable(replies)
        rewards = [reply.reward for reply in kept.kept if reply.reward is not None]
        told = standardised(rewards) if run.loop.normalize and rewards else rewards
        return [
            {**_conditioned(row_of(reply), run.loop.suffix.format(reward=value), suffix), "reward": reply.reward}
            for reply, value in zip(kept.kept, told, strict=True)
        ], kept.dropped
    assert isinstance(run, RSRun)
    top = best(replies, top_k=run.loop.top_k, min_reward=run.loop.min_reward, min_margin=run.loop.min_margin)
    return [_as_sampled(row_of(reply)) for reply in top.kept], top.dropped


def _as_sampled(row: Row) -> Row:
    """Returns a reply with the tokens that were sampled, which no template writes again."""
    prompt, tokens = row["prompt_tokens"], row["tokens"]
    return {
        "input_ids": [*prompt, *tokens],
        "labels": [-100] * len(prompt) + tokens,
        "prompt": row["prompt"],
        "completion": row["completion"],
        "reward": row["reward"],
        "row": row["row"],
        **_images(row),
        **({"image_places": row["image_places"]} if "image_places" in row else {}),
    }


def _images(row: Row) -> Row:
    """Returns the images of a reply's prompt as a part of a row that is learned from."""
    return {IMAGES: row["images"]} if "images" in row else {}


def _conditioned(row: Row, told: str, suffix: str | None) -> Row:
    """Returns a prompt that says what its reply is worth, in place of `suffix`, and the reply."""
    messages = row["messages"]
    if not messages:
        return {"prompt": row["prompt"].removesuffix(suffix or "") + told, "completion": row["completion"]}
    last = max(place for place, message in enumerate(messages) if message["role"] == "user")
    asked = messages[last]
    if suffix is not None:
        content = asked["content"]
        plain = content.removesuffix(suffix) if isinstance(content, str) else content[:-1]
        asked = {**asked, "content": plain}
    prompt = [*messages[:last], with_suffix(asked, told), *messages[last + 1 :]]
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": row["completion"]}], **_images(row)}


def _train(settings: Any) -> TrainResult:
    if not has_state(settings.ckpt):  # what one that was killed before its first state left is no reason to refuse
        settings = evolve(settings, ckpt=evolve(settings.ckpt, resume=Resume.NEVER, overwrite=True))
    if isinstance(settings, DPORun):
        return train_dpo(settings)
    assert isinstance(settings, SFTRun)
    return train_sft(settings)


def _folder(output: Path, iteration: int) -> Path:
    return output / f"iteration_{iteration}"


def _model(output: Path, iteration: int) -> str | None:
    """Returns the directory of the model that an iteration trained; None before the first."""
    return str(_folder(output, iteration) / "run" / "model") if iteration > 0 else None


def _save(output: Path, state: _State) -> None:
    content = {
        "settings": state.settings,
        "iteration": state.iteration,
        "stage": state.stage,
        "position": state.position,
        "history": state.history,
    }
    _replace(output / STATE_FILE, json.dumps(content, indent=2))


def _keep_metrics(output: Path, history: Sequence[Mapping[str, float]]) -> None:
    lines = (json.dumps({"step": step, **metrics}) for step, metrics in enumerate(history))
    _replace(output / METRICS_FILE, "\n".join(lines))


def _replace(path: Path, text: str) -> None:
    try:
        keep_locked(path.parent)
        replace_file(path, f"{text}\n".encode())
    except CheckpointError:  # an OSError too
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror or error}): {remedy(error)}.") from error
