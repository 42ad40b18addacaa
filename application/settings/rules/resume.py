"""Rules about the parts of a run's description that may change when the run continues.

Invariant: every setting is either in `MAY_DIFFER` or refused by name with both values; what a name leads to (models,
data, files of code and of text) counts by its content. Importable without torch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

MAY_DIFFER = (
    # how long it goes on, what is written, and what is only looked at
    "train.max_steps",
    "train.num_episodes",
    "train.profile_steps",
    "ckpt.*",
    "logger.*",
    "eval.*",
    # where it is computed, and in what portions
    "cluster.*",
    "ds.*",
    "vllm.*",
    "actor.num_nodes",
    "actor.num_gpus_per_node",
    "critic.num_nodes",
    "critic.num_gpus_per_node",
    "ref.num_nodes",
    "ref.num_gpus_per_node",
    "ref.offload",
    "reward.offload",
    "reward.num_nodes",
    "reward.num_gpus_per_node",
    "train.colocate_all",
    "train.optimizer_sleeps",
    "train.colocate_actor_ref",
    "train.colocate_critic_reward",
    "train.max_tokens_per_micro_batch",
    "train.max_tokens_per_scoring_pass",
    "actor.gradient_checkpointing",
    "actor.offload_activations",
    "actor.compile",
    "actor.deterministic",
    "actor.lora.sync",
    "rollout.engine",
    "rollout.server_urls",
    "rollout.server_sync",
    "rollout.server_sync_delta",
    "rollout.max_batch_size",
    "rollout.max_concurrent",
    "rollout.adaptive_concurrency",
    "agent.python_isolation",
    "reward.isolation",
    # what ends a run that somebody then mends
    "rollout.max_failures",
    "algo.dynamic_filtering_budget",
    "reward.timeout",
    "actor.adam.lr",
    "actor.muon.lr",
    "critic.adam.lr",
    "critic.muon.lr",
    # addresses, and files of code: what they hold is yours to keep alike
    "reward.remote_url",
    "reward.remote_batch_size",
    "reward.judge_url",
    "ref.url",
    "ref.urls",
    "reward.function_path",
    "train.agent_func_path",
    "agent.command",
    "train.on_step_path",
    "algo.extension_path",
)
"""Settings that may change between a run's beginning and its continuation; .* stands for a whole section."""

OF_EXAMPLES = (
    *("train.num_epochs", "data.num_workers", "data.cache_dir", "data.max_dropped"),
    *("teacher.url", "teacher.urls"),
)
"""Further settings of runs over examples that may change: their length, the preparation of data, and the addresses of
teachers."""

MODELS = (
    "actor.model_name_or_path",
    "critic.model_name_or_path",
    "ref.model_name_or_path",
    "reward.model_name_or_path",
    "teacher.model_name_or_path",
)
CODE = (
    "reward.function_path",
    "train.agent_func_path",
    "algo.extension_path",
    "algo.dynamic_filtering_path",
    "actor.optim_path",
    "actor.lr_scheduler_path",
    "critic.optim_path",
    "critic.lr_scheduler_path",
    "agent.tools",
    "reward.judge_prompt",
)
"""Settings that name files of code, and what a judge is asked, which may move. Another content of them is told, not
refused: a run may end by a mistake in them, which is then mended."""
TEXTS = ("data.chat_template", "algo.kl.teacher_template")
"""Settings that name files of text, or are it: what they hold counts, not where it is."""
DATA = "data.prompt_dataset"
EXAMPLES = "data.dataset"


def may_differ(name: str) -> bool:
    """Whether a setting may change.

    >>> [may_differ(name) for name in ("train.max_steps", "eval.steps", "train.seed")]
    [True, True, False]
    """
    return name in (*MAY_DIFFER, *OF_EXAMPLES) or f"{name.partition('.')[0]}.*" in MAY_DIFFER


def refusals(begun: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each thing in which a run's description keeps it from continuing.

    Args:
        begun: `trainer`, `settings` by dotted name, `models` and `files` (fingerprints) by the setting that names them,
            `data` (a fingerprint, or None), as they were when the run began.
        now: the same of the run that is to continue it.
        defaults: values of settings that were not there yet when the run began.
    """
    if begun.get("trainer", now["trainer"]) != now["trainer"]:  # earlier states do not say
        yield (
            f"The run to continue is one of rollgrad train {begun['trainer']}, not of train {now['trainer']}: continue "
            "it by that command, or begin another run in another --ckpt.output_dir (--actor.model_name_or_path may be "
            "the model that this one saved)."
        )
        return
    for name, value in now["settings"].items():
        before = begun["settings"].get(name, defaults[name])
        if name in MODELS:
            same = _same_model(begun["models"].get(name), now["models"].get(name), names_alike=before == value)
        elif name in (DATA, EXAMPLES):
            same = before == value if None in (begun["data"], now["data"]) else begun["data"] == now["data"]
        elif name in TEXTS:
            held = _holds(name, begun), _holds(name, now)
            same = before == value if None in held else held[0] == held[1]
        else:
            moved = name in CODE and _holds(name, now) is not None and _holds(name, begun) == _holds(name, now)
            same = before == value or moved or may_differ(name)
        if same:
            continue
        if before == value:
            yield (
                f"{name} is {value!r} as when the run began, but holds something else than then: bring back what it "
                f"held, or begin another run in another --ckpt.output_dir."
            )
        else:
            yield (
                f"{name} is {value!r}, but was {before!r} when the run began: continue with --{name} as it was, or "
                "begin another run in another --ckpt.output_dir (--actor.model_name_or_path may be the model that "
                "this one saved)."
            )


def changes(begun: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, str]:
    """Returns the changes that are allowed: names, and both values."""
    pairs = {
        name: (begun["settings"].get(name, defaults[name]), value)
        for name, value in now["settings"].items()
        if (may_differ(name) or name in (*CODE, *TEXTS)) and not name.startswith("ckpt.")
    }
    pairs |= {name: (begun["versions"].get(name), version) for name, version in now["versions"].items()}
    return {name: f"{before} -> {value}" for name, (before, value) in pairs.items() if before != value}


def changed_code(begun: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the settings of `CODE` whose files hold something else than when the run began."""
    held = {name: (_holds(name, begun), _holds(name, now)) for name in CODE}
    return [name for name, (before, after) in held.items() if None not in (before, after) and before != after]


def _holds(name: str, description: Mapping[str, Any]) -> str | None:
    """Returns the fingerprint of what a setting names; None where it names nothing, or an earlier version wrote the
    description."""
    found: str | None = description.get("files", {}).get(name)
    return found


def _same_model(begun: Mapping[str, Any] | None, now: Mapping[str, Any] | None, *, names_alike: bool) -> bool:
    """Whether two models are one: by their files where both were there to be looked at, else by their names."""
    known = [part for part in begun or () if now is not None and begun and None not in (begun[part], now[part])]
    if begun is None or now is None or not known:
        return names_alike
    return all(begun[part] == now[part] for part in known)
