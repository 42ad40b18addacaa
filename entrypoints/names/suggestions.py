"""Suggestions for flags and settings that do not exist.

A suggestion means the same as the given name, or there is none: names of TRL, OpenRLHF and verl are looked up in
`other_names`, and only a name that is very similar to ours counts as misspelt.
"""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from rollgrad.entrypoints.names.name_answers import alike
from rollgrad.entrypoints.names.names_of_verl import verl_answer
from rollgrad.entrypoints.names.other_names import OTHER_NAMES, openrlhf_name

_REINFORCE = "rollgrad train rl trains by reinforcement learning"

OTHER_COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("rl", "train ppo", "train grpo", "train rlhf", "ppo", "grpo", "rloo", "train rloo"),
        f"{_REINFORCE}, with --algo.preset grpo or another one.",
    ),
    "sft": "write rollgrad train sft.",
    **dict.fromkeys(("dpo", "orpo", "train orpo"), "write rollgrad train dpo."),
    "kto": "write rollgrad train kto.",
    "kd": "write rollgrad train kd.",
    "prm": "write rollgrad train prm.",
    **dict.fromkeys(("train reward", "rm", "reward"), "write rollgrad train rm, or rollgrad serve reward."),
    **dict.fromkeys(
        ("train distill", "distill", "train gkd", "gkd"),
        "write rollgrad train kd, or rollgrad train rl --algo.preset on_policy_distill.",
    ),
    **dict.fromkeys(("opd", "train opd"), "write rollgrad train rl --algo.preset on_policy_distill."),
    "sdft": "write rollgrad train rl --algo.preset sdft.",
    "sdpo": "write rollgrad train rl --algo.preset sdpo.",
    "gold": "write rollgrad train kd, with --kd.spans where the teacher has other tokens than the model.",
    **dict.fromkeys(("rs", "rejection_sampling", "best_of_n"), "write rollgrad loop rs."),
    **dict.fromkeys(("iter_dpo", "iterative_dpo", "online_dpo"), "write rollgrad loop iter_dpo."),
    **dict.fromkeys(("batch_inference", "inference", "sample"), "write rollgrad generate, and rollgrad score."),
    "interactive_chat": "write rollgrad chat.",
    "serve model": "write rollgrad serve agent or rollgrad serve reward.",
    "serve rm": "write rollgrad serve reward.",
    "vllm_serve": "start an engine with `vllm serve`, and name it with --rollout.engine server --rollout.server_urls.",
    **dict.fromkeys(("evaluate", "test"), "write rollgrad eval."),
    **dict.fromkeys(("env", "check", "info"), "write rollgrad doctor."),
    **dict.fromkeys(
        ("plan", "estimate", "memory"),
        "add --dry_run to rollgrad train rl or another trainer, and --cluster.plan_for where machines are elsewhere.",
    ),
    **dict.fromkeys(("compare", "diff"), "write rollgrad ui DIR, where the runs are below DIR, and tick two."),
    **dict.fromkeys(("merge", "merge_adapter"), "write rollgrad merge-lora."),
    "help": "write rollgrad --help.",
    "version": "write rollgrad --version.",
}
"""Commands of other tools, and of this one some day."""

VLLM_SERVE: Mapping[str, str] = {
    "api_key": "write --token_file FILE, or set ROLLGRAD_TOKEN.",
    "served_model_name": "requests are answered whatever model they name.",
    **alike(
        "allowed_origins allowed_headers allowed_methods allow_credentials",
        "pages in browsers are refused: have a server of yours ask this one.",
    ),
    **alike("max_num_seqs", "max_batch_size"),
    **alike("data_parallel_size", "num_engines"),
    **alike(
        "enable_auto_tool_choice tool_call_parser reasoning_parser enable_reasoning",
        "calls and thinking are read in the form that the chat template shows.",
    ),
    "chat_template": "the template is that of the model's directory.",
    "tokenizer": "the tokenizer is that of the model's directory.",
    **alike("enable_lora lora_modules", "merge adapters into their model first: rollgrad merge-lora."),
    **alike(
        "quantization kv_cache_dtype enforce_eager max_num_batched_tokens enable_prefix_caching speculative_config",
        "write it as an argument of vLLM's, --vllm_extra.NAME VALUE, with --engine vllm.",
    ),
}
"""Flags of `vllm serve`: that of `rollgrad serve agent`, or a sentence."""

LAUNCHED: Mapping[str, str] = {
    "openrlhf": "write rollgrad openrlhf before it, which translates it.",
    "trl": "write rollgrad trl before it, which translates it.",
    "verl": "write rollgrad verl before it, which translates it.",
}
"""Advice on a line that starts a program of another tool, by its package."""

VERL_ROOTS = frozenset(
    {
        *("actor_rollout_ref", "algorithm", "custom_reward_function", "reward_model", "sandbox_fusion", "distillation"),
        *("global_profiler", "ray_kwargs", "ray_init", "transfer_queue"),
    }
)
"""Sections that only verl's trainers have: only the table of verl's names answers what is in them."""

ALIKE = 0.82
"""Least similarity of a misspelt name: `lr_warmup_ration` is one, `learning_rate` (of anything here) is not."""

APART = ("critic", "ref", "reward", "eval")
"""Sections whose settings are never meant by those of another: `critic.learning_rate` is not the actor's."""

BROUGHT = ("algo.losses.", "algo.estimators.")
"""Sections of settings that losses and estimators of users bring."""
BY_EXTENSION = "it is known where --algo.extension_path names the file or module that brings it."

MOST_CANDIDATES = 4
"""Largest number of settings with one last name that are listed; of more, none is likelier than the others."""


TAKING: Mapping[str, tuple[str, ...]] = {"config": (".yaml", ".yml"), "model": ("",)}
"""Flags that a file or directory without a flag is likely to belong to, by the end of its name."""

PLAIN_VALUE = re.compile(r"(?!(null|None)$)[\w.][\w./:@-]*")
"""A value that is written in our flags as it is in verl's overrides: a number or a name, no list and no template."""

LONGEST_LAUNCHER = 20
"""Words among which the program is looked for that a line starts."""


def unknown_flag(word: str, known: Collection[str], command: str) -> str:
    """Returns one sentence about a word that is neither a flag of the command nor a value."""
    from rollgrad.adapters.data.datasets.files import file_format  # logs, which help does not

    name, equals, value = word.lstrip("-+").partition("=")
    plain = name.replace("-", "_")
    if not word.startswith("-") and (not equals or advice(plain, known) is None):
        flag = next((flag for flag, suffixes in TAKING.items() if flag in known and word.endswith(suffixes)), None)
        if flag is not None and Path(word).exists():
            return f"{word!r} belongs to no flag: did you mean --{flag} {word}?"
        if file_format(Path(word)) and Path(word).is_file():  # as a shell writes a pattern
            return (
                f"{word!r} belongs to no flag: datasets stand in one word, with commas between them, and a pattern of "
                "files in quotes."
            )
        if command == "eval" and Path(word).exists():
            return (
                f"{word!r} belongs to no flag: models stand before all flags, as in rollgrad eval {word} --config ..."
            )
        return f"{word!r} belongs to no flag: see rollgrad {command} --help."
    if not word.startswith("-"):  # verl's own form
        clause = _advice_clause(plain, known, "--")
        if clause.startswith("did you mean") and PLAIN_VALUE.fullmatch(value):
            clause = f"write {clause.removeprefix('did you mean ').rstrip('?')} {value}."
        return f"{word!r} is no flag of ours: {clause}"
    hint = _advice_clause(plain, known, "--") or f"see rollgrad {command} --help."
    return f"{word.partition('=')[0]} is not a flag; {hint}"


def unknown_command(words: Sequence[str], commands: Sequence[str]) -> str:
    """Returns one sentence about a command that does not exist."""
    given = " ".join(word for word in words[:2] if not word.startswith("-")) or words[0]
    for name in (given, given.split()[0]):
        known = OTHER_COMMANDS.get(name.lower().replace("-", "_"))
        if known is not None:
            return f"{name} is not a command; {known}"
    packages = (part for word in words[:LONGEST_LAUNCHER] for part in re.split(r"[./]", word))
    if (package := next((part for part in packages if part in LAUNCHED), None)) is not None:
        return f"{words[0]} is not a command; {LAUNCHED[package]}"
    first = given.split()[0]
    similar, group = nearest(given.lower(), commands), [name for name in commands if name.split()[0] == first]
    if given == first and group:
        return f"{given} is not a command by itself; write rollgrad {' or rollgrad '.join(group)}."
    if not similar and group:
        return f"{given} is not a command; those of {first} are {', '.join(group)}."
    known = f"did you mean rollgrad {similar}?" if similar else f"the commands are {', '.join(commands)}."
    return f"{given} is not a command; {known}"


def unknown_key(name: str, value: Any, known: Sequence[str]) -> str:
    """Returns one sentence about a key of a configuration file that is neither a setting nor a section."""
    leaf = next((leaf for leaf in _leaves(name, value) if advice(leaf, known) is not None), None)
    if leaf is None:
        return f"{name} is not a setting; see `rollgrad train rl --help` for all settings."
    if leaf == name and name in known:  # one key with dots in it
        *sections, last = name.split(".")
        nested = reduce(lambda inner, outer: f"{outer}: {{{inner}}}", reversed(sections), f"{last}: VALUE")
        return f"{name} is one key with dots in it, but a file nests settings: write {nested}."
    return f"{leaf} is not a setting; {_advice_clause(leaf, known, '')}"


def advice(name: str, known: Collection[str]) -> str | None:
    """Returns the advice for an unknown name: names of settings, separated by commas, or a sentence, which has spaces;
    None if there is none.

    >>> settings = ["actor.adam.lr", "actor.muon.lr", "rollout.n_samples_per_prompt"]
    >>> advice("learning_rate", settings), advice("rollout.n_sample_per_prompt", settings), advice("zzz", settings)
    ('actor.adam.lr', 'rollout.n_samples_per_prompt', None)
    """
    name = name.lower()
    other = OTHER_NAMES.get(name, verl_answer(name))
    if other is not None and other in known:
        return other
    trains, serves_agents = "train.seed" in known, "drain_seconds" in known
    if trains and name.partition(".")[0] in VERL_ROOTS:
        return other
    if serves_agents and name in VLLM_SERVE:
        return VLLM_SERVE[name]
    has_sections = any("." in candidate for candidate in known)
    if not has_sections:  # a command that trains nothing, which no sentence is about
        same = (other or "").split(".")[-1]
        return same if same in known else nearest(name, known)
    return _setting_advice(name, other, known)


def _setting_advice(name: str, other: str | None, known: Collection[str]) -> str | None:
    """Returns `advice` among settings with sections; `other` is what tables of other tools say of the name."""
    same_last = [candidate for candidate in known if candidate.split(".")[-1] == name]
    if len(same_last) == 1:
        return same_last[0]
    if other is not None and " " in other:
        return other
    translated = openrlhf_name(name, known)
    if translated is not None:
        return translated
    if 1 < len(same_last) <= MOST_CANDIDATES:
        return ",".join(same_last)
    section, _, last = name.rpartition(".")
    means_another = last in OTHER_NAMES and not any(candidate.endswith(f".{last}") for candidate in known)
    similar = [] if means_another else difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)
    if similar:
        return similar[0]
    if name.startswith(BROUGHT) and "algo.extension_path" in known:
        return BY_EXTENSION
    found = advice(last, known) if section else None
    if found is None or section.split(".")[0] not in APART:
        return found
    return _in_section(found, section, known)


def _in_section(found: str, section: str, known: Collection[str]) -> str | None:
    """Returns the setting of `section` that corresponds to `found`, a setting of another section, if there is one."""
    moved = ".".join((section.split(".")[0], *found.split(".")[1:]))
    return moved if moved in known else None


def nearest(name: str, known: Collection[str]) -> str | None:
    """Returns the known name that is most similar to a misspelt one, if any is similar enough, or has the same words in
    another order."""
    words = sorted(name.split("_"))
    for candidate in known:
        if sorted(candidate.split("_")) == words:
            return candidate
    similar = difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)
    return similar[0] if similar else None


def _advice_clause(name: str, known: Collection[str], dashes: str) -> str:
    """Returns the advice as the end of a sentence; empty without any."""
    found = advice(name, known)
    if found is None:
        return ""
    if " " in found:
        return found
    return f"did you mean {' or '.join(dashes + candidate for candidate in found.split(','))}?"


def _leaves(name: str, value: Any) -> Iterator[str]:
    """Yields the dotted names in a section, the section's own last."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    yield name
