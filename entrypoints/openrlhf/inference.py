"""Translates OpenRLHF's sampling and judging of files (`openrlhf.cli.batch_inference`) to `rollgrad generate` and
`rollgrad score`."""

from collections.abc import Mapping, Sequence

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.names.flags import Flag, Kind, Program
from rollgrad.entrypoints.names.names_of_openrlhf import KERNELS, MICRO, PLACES
from rollgrad.entrypoints.openrlhf.shared import FORMATS
from rollgrad.entrypoints.translation.draft import Draft, TranslatedCommand
from rollgrad.entrypoints.translation.words import options, parse

SWITCH, INTEGER, NUMBER, TEXT = Kind.SWITCH, Kind.INTEGER, Kind.NUMBER, Kind.TEXT

LOOP = "a loop samples, judges, selects and learns in one command: rollgrad loop"
PROCESS = "replies are sampled and judged in one process, or by engines: rollout.engine vllm or server"

_FLAGS: dict[str, Flag] = {
    "eval_task": Flag(TEXT),
    "pretrain": Flag(TEXT),
    "output_path": Flag(TEXT, "output"),
    "dataset": Flag(TEXT),
    "dataset_probs": Flag(Kind.PROBABILITIES),
    "dataset_split": Flag(TEXT),
    "input_key": Flag(TEXT, default="input"),
    "output_key": Flag(TEXT, reason="a file of replies has the column completion, as rollgrad generate writes it"),
    "apply_chat_template": Flag(SWITCH, default=False),
    "input_template": Flag(TEXT),
    "max_samples": Flag(INTEGER),
    "max_len": Flag(INTEGER, reason="a reward model judges whole texts"),
    "prompt_max_len": Flag(INTEGER, default=1024),
    "max_new_tokens": Flag(INTEGER, default=1024),
    "greedy_sampling": Flag(SWITCH),
    "temperature": Flag(NUMBER, default=1.0),
    "top_p": Flag(NUMBER, default=1.0),
    "repetition_penalty": Flag(
        NUMBER, reason="replies are sampled with --temperature and --top_p alone", idle=("1.0", "1")
    ),
    "best_of_n": Flag(INTEGER, default=1),
    "seed": Flag(INTEGER, default=1234),
    "tp_size": Flag(INTEGER),
    "param_dtype": Flag(TEXT),
    "post_processor": Flag(TEXT, reason=f"{LOOP} rs, iter_dpo or csft", idle=("null", "None")),
    "normalize_reward": Flag(SWITCH, reason=f"{LOOP} csft"),
    "reward_template": Flag(TEXT, reason=f"{LOOP} csft, with loop.suffix"),
    "enable_csft": Flag(SWITCH, reason=f"{LOOP} csft, whose evaluation asks for the best replies"),
    "csft_prompt": Flag(TEXT, reason=f"{LOOP} csft, with loop.target"),
    "iter": Flag(INTEGER, reason=f"{LOOP}, each iteration of which takes the next prompts"),
    "rollout_batch_size": Flag(INTEGER, reason=f"{LOOP}, with rollout.batch_size"),
    "micro_batch_size": Flag(INTEGER, reason=MICRO),
    "max_num_seqs": Flag(INTEGER, reason="engines take what rollout.max_concurrent lets through"),
    "enable_prefix_caching": Flag(SWITCH, reason="engines always keep common beginnings of prompts"),
    "value_head_prefix": Flag(TEXT, reason="a reward model's head is found by itself"),
    "attn_implementation": Flag(TEXT, reason=KERNELS),
    "flash_attn": Flag(SWITCH, reason=KERNELS),
    "disable_fast_tokenizer": Flag(SWITCH, reason="transformers has one tokenizer for a model, the fast one"),
    "full_determinism": Flag(
        SWITCH, reason="a run repeats by its seed, but kernels are not forced to be deterministic"
    ),
    "use_ms": Flag(SWITCH, reason=PLACES),
    "zero_stage": Flag(INTEGER, reason=PROCESS, idle=("0",)),
    "local_rank": Flag(INTEGER, reason=PROCESS, idle=("-1",)),
}

INFERENCE = Program(
    name="openrlhf.cli.batch_inference",
    flags=_FLAGS,
    names={**{name: (name,) for name in _FLAGS}, "model_name_or_path": ("pretrain",)},
    implied={"bf16": ("param_dtype", "bf16")},
)
"""The program, and the flags of `rollgrad generate` and `rollgrad score` that its flags become."""

SAMPLING: Mapping[str, str] = {
    "pretrain": "actor.model_name_or_path",
    "dataset": "data.prompt_dataset",
    "dataset_split": "data.prompt_split",
    "input_key": "data.input_key",
    "apply_chat_template": "data.apply_chat_template",
    "input_template": "data.input_template",
    "max_samples": "data.max_samples",
    "prompt_max_len": "data.max_prompt_tokens",
    "max_new_tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "best_of_n": "rollout.n_samples_per_prompt",
    "seed": "train.seed",
}
"""Settings of `rollgrad generate`, by flag."""

JUDGING: Mapping[str, str] = {"pretrain": "reward.model_name_or_path", "dataset": "input"}
"""Settings of `rollgrad score`, by flag."""


def translate_inference(words: Sequence[str]) -> TranslatedCommand:
    """Translates the flags of `openrlhf.cli.batch_inference`.

    Raises:
        ConfigurationError: it has no such flag, task or value.
    """
    draft = Draft(program=INFERENCE, options=options(INFERENCE, parse(words)))
    for name in dict.fromkeys((*draft.options, *_FLAGS)):
        draft.follow(name)
    task = draft.value("eval_task")
    if task not in ("generate", "generate_vllm", "rm"):
        raise ConfigurationError(f"--eval_task is {task}, but it is generate, generate_vllm or rm: change --eval_task.")
    dtype = draft.value("param_dtype")
    if dtype is not None:
        draft.set("actor.dtype", FORMATS.get(dtype, dtype))
    if task == "rm":
        _read(draft, JUDGING)
        for name in (SAMPLING.keys() - JUDGING.keys()) | {"greedy_sampling", "tp_size"}:
            draft.lose(name, "--eval_task rm samples nothing")
        draft.set("reward.normalize", "model")
        draft.changed.append(
            "rows need prompt and completion, as rollgrad generate writes them, in OpenRLHF input and output"
        )
        return TranslatedCommand(["score", *draft.words()], draft.notes)
    if "{}" not in draft.value("input_template", "{}") or draft.value("apply_chat_template"):
        draft.lose("input_template", "the chat template is on, or it has no {} where the prompt goes")
        draft.options.pop("input_template", None)
    _read(draft, SAMPLING)
    probs = draft.value("dataset_probs")
    if probs and "," in str(draft.value("dataset", "")):
        draft.set("data.prompt_probs", probs)
    if draft.value("greedy_sampling", False):
        draft.set("rollout.top_k", 1)
    if task == "generate_vllm":
        draft.set("rollout.engine", "vllm")
        if "tp_size" in draft.options:
            draft.set("vllm.tensor_parallel_size", draft.value("tp_size"))
    else:
        draft.lose("tp_size", "vLLM samples with --eval_task generate_vllm only")
    return TranslatedCommand(["generate", *draft.words()], draft.notes)


def _read(draft: Draft, settings: Mapping[str, str]) -> None:
    """Sets what the task reads."""
    for name, setting in settings.items():
        value = draft.value(name)
        if value is not None:
            draft.set(setting, value)
