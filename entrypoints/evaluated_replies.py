"""The file of replies of `rollgrad eval --output`, which continues an evaluation that ended early.

Does not own: what a line has (`tracking.samples`), nor which lines are kept (`tracking.kept_replies`).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import structlog

from rollgrad.adapters.chat.template_file import read_chat_template
from rollgrad.adapters.checkpoints.fingerprint import model_fingerprint
from rollgrad.adapters.data.datasets.survey import rows_fingerprint
from rollgrad.adapters.data.reply_log import continued, has_rows, read_description, writing
from rollgrad.adapters.tracking.kept_replies import kept_results
from rollgrad.adapters.tracking.samples import ReplyWriter
from rollgrad.application.rollouts.results import PromptResult
from rollgrad.application.settings.rules.resume import may_differ
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.entrypoints.composition.outputs import make_reply_log
from rollgrad.entrypoints.composition.rl.container import RLContainer
from rollgrad.entrypoints.description import code_fingerprint, flat_settings, reward_fingerprint

PLAYED = (
    *("actor.dtype", "actor.float32_head", "train.seed"),
    *("eval.temperature", "eval.top_p", "eval.top_k", "eval.n_samples_per_prompt", "eval.max_new_tokens"),
    *("rollout.max_new_tokens", "rollout.max_turns", "rollout.max_episode_tokens", "rollout.max_episode_seconds"),
    "rollout.stop_strings",
)
"""Settings on which an evaluation depends, besides those of `agent`, `data` and `reward`."""
TRAINED = ("data.prompt_dataset", "data.prompt_probs", "data.prompt_split", "data.max_samples", "data.curriculum_range")
"""Settings of `data` that evaluation does not read."""
WEIGHTS = "weights of "

log = structlog.get_logger(__name__)


@contextmanager
def evaluated_replies(
    container: RLContainer, config: RLConfig, path: Path
) -> Iterator[tuple[ReplyWriter, list[PromptResult]]]:
    """Yields the writer of the file `path`, and the results of the prompts that it has already.

    Raises:
        CheckpointError: the file is of other settings, prompts or weights, or another process writes it; or it cannot
            be written.
        DataError: it has lines that are none of an evaluation.
    """
    path, model, prompts = path.absolute(), config.actor.model_name_or_path, container.eval_prompts()
    weights = {f"{WEIGHTS}{model}": model_fingerprint(model)}
    begun = (read_description(path) or {}) if has_rows(path) else {}
    others = {name: value for name, value in begun.items() if name.startswith(WEIGHTS)}
    description = {**_evaluated_by(config, prompts), **others, **weights}
    with continued(path, description, defaults={**flat_settings(RLConfig()), **weights}):
        with writing(path):
            kept = kept_results(path, model, config.eval.n_samples_per_prompt) if has_rows(path) else []
            path.open("ab").close()
        if kept:
            log.info("the evaluation continues", model=model, done=len(kept), of=len(prompts), file=str(path))
        with closing(make_reply_log(config, container.codec(), path)) as writer:
            try:
                yield writer, kept
            except BaseException:  # an interruption, too
                log.warning("what has been played is kept: the same command continues the evaluation", file=str(path))
                raise


def _evaluated_by(config: RLConfig, prompts: Sequence[Prompt]) -> Mapping[str, Any]:
    """Returns all that replies and their rewards depend on but the model, as far as this machine knows it."""
    settings, reward, template = flat_settings(config), config.reward, config.data.chat_template
    agent = config.train.agent_func_path
    texts = {
        "data.chat_template": None if template is None else read_chat_template(template),
        "reward.judge_prompt": None if reward.judge_prompt is None else Path(reward.judge_prompt).read_text(),
    }
    return {
        "command": "eval",
        **{name: value for name, value in settings.items() if _matters(name)},
        **{f"content of {name}": text and hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
        "content of reward.function_path": reward_fingerprint(reward.function_path),
        "content of train.agent_func_path": agent and code_fingerprint(agent, flag="--train.agent_func_path"),
        "reward weights": reward.model_name_or_path and model_fingerprint(reward.model_name_or_path),
        "prompts": rows_fingerprint(prompts),
    }


def _matters(name: str) -> bool:
    """Returns whether an evaluation depends on a setting; what prompts are read from counts by its content."""
    section = name.partition(".")[0]
    return name in PLAYED or (section in ("agent", "data", "reward") and name not in TRAINED and not may_differ(name))
