"""An example of each command that reads the settings of a run, and the settings to begin with, by topic: what `--help`
shows first."""

from collections.abc import Mapping, Sequence

Topics = Mapping[str, Sequence[str]]
"""Settings that a newcomer needs, by topic."""

REWARD: Topics = {
    "The reward: one of these": (
        *("reward.function_path", "reward.verifier", "reward.model_name_or_path", "reward.remote_url"),
    )
}

EXAMPLES: Topics = {
    "The model": ("actor.model_name_or_path",),
    "The examples": ("data.dataset", "data.format", "data.train_on", "data.max_tokens", "data.overlong"),
}

OFFLINE: Topics = {
    "The optimizer": ("actor.adam.lr", "actor.lora.rank"),
    "Training": ("train.batch_size", "train.num_epochs", "train.max_steps", "train.seed"),
    "Evaluation": ("eval.dataset", "eval.steps"),
    "Output": ("ckpt.output_dir", "ckpt.save_steps", "ckpt.resume"),
}
"""Topics of all trainers over examples."""

PAIRS: Topics = {
    "The pairs": ("data.dataset", "data.prompt_key", "data.chosen_key", "data.rejected_key", "data.max_tokens")
}

JUDGED: Topics = {**REWARD, "The tokenizer": ("actor.model_name_or_path",)}

LOOP: Topics = {
    "The model": ("actor.model_name_or_path",),
    "The prompts": ("data.prompt_dataset", "data.input_key", "data.label_key"),
    **REWARD,
    "Replies": (
        *("rollout.batch_size", "rollout.n_samples_per_prompt", "rollout.max_new_tokens", "rollout.temperature"),
        "rollout.engine",
    ),
    "Training": ("actor.adam.lr", "actor.lora.rank", "train.batch_size", "train.num_epochs", "train.seed"),
    "Evaluation": ("eval.dataset", "eval.max_samples"),
    "Output": ("ckpt.output_dir",),
}


def _example(command: str, *lines: str) -> str:
    """Returns a command line with a small model, in lines."""
    first = f"  rollgrad {command} --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct"
    return " \\\n      ".join((first, *lines))


def _loop_example(name: str) -> str:
    return _example(
        f"loop {name}",
        "--data.prompt_dataset reasoning_gym:basic_arithmetic --rollout.batch_size 64 --rollout.n_samples_per_prompt 8",
        f"--ckpt.output_dir runs/{name}",
    )


ESSENTIALS: Mapping[str, tuple[str, Topics]] = {
    "train rl": (
        _example(
            "train rl",
            "--data.prompt_dataset reasoning_gym:basic_arithmetic --algo.preset grpo --ckpt.output_dir runs/first",
        ),
        {
            "The model": ("actor.model_name_or_path", "actor.dtype", "actor.lora.rank"),
            "The prompts": ("data.prompt_dataset", "data.input_key", "data.label_key", "data.apply_chat_template"),
            **REWARD,
            "An agent, if it is one": ("agent.tools", "train.agent_func_path"),
            "The algorithm": ("algo.preset", "algo.advantage.estimator", "algo.kl.init_coef", "actor.adam.lr"),
            "Rollouts": LOOP["Replies"],
            "Training": ("train.max_steps", "train.batch_size", "train.seed"),
            "Evaluation": OFFLINE["Evaluation"],
            "Output": OFFLINE["Output"],
        },
    ),
    "eval": (
        "  rollgrad eval --actor.model_name_or_path runs/first/model \\\n"
        "      --eval.dataset reasoning_gym:basic_arithmetic --eval.max_samples 100",
        {
            "The model": ("actor.model_name_or_path", "actor.dtype"),
            "The prompts": ("eval.dataset", "eval.split", "eval.max_samples", "data.input_key", "data.label_key"),
            **REWARD,
            "Replies": (
                *("eval.temperature", "eval.top_p", "eval.top_k", "eval.n_samples_per_prompt", "eval.max_new_tokens"),
                "rollout.engine",
            ),
        },
    ),
    "generate": (
        _example(
            "generate",
            "--data.prompt_dataset reasoning_gym:basic_arithmetic --rollout.n_samples_per_prompt 8 "
            "--output replies.jsonl",
        ),
        {
            "The model": ("actor.model_name_or_path", "actor.dtype"),
            "The prompts": ("data.prompt_dataset", "data.prompt_split", "data.input_key", "data.max_samples"),
            "Replies": (
                *("rollout.n_samples_per_prompt", "rollout.max_new_tokens", "rollout.temperature", "rollout.top_p"),
                *("rollout.engine", "train.seed"),
            ),
        },
    ),
    "score": (
        "  rollgrad score --input replies.jsonl --reward.verifier last_number --output scored.jsonl",
        JUDGED,
    ),
    "replay": ("  rollgrad replay runs/first --step 1", {}),
    "rescore": ("  rollgrad rescore runs/first --reward.function_path reward.py", JUDGED),
    "loop rs": (
        _loop_example("rs"),
        {"The loop": ("loop.iterations", "loop.top_k", "loop.min_reward", "loop.min_margin"), **LOOP},
    ),
    "loop iter_dpo": (
        _loop_example("iter_dpo"),
        {
            "The loop": ("loop.iterations", "loop.min_margin", "loop.reference"),
            **LOOP,
            "The loss": ("dpo.loss", "dpo.beta"),
        },
    ),
    "loop csft": (
        _loop_example("csft"),
        {"The loop": ("loop.iterations", "loop.suffix", "loop.normalize", "loop.target"), **LOOP},
    ),
    "train sft": (
        _example("train sft", "--data.dataset conversations.jsonl --ckpt.output_dir runs/sft"),
        {**EXAMPLES, **OFFLINE, "The optimizer": (*OFFLINE["The optimizer"], "train.loss")},
    ),
    "train dpo": (
        _example("train dpo", "--data.dataset pairs.jsonl --ckpt.output_dir runs/dpo"),
        {
            "The model": ("actor.model_name_or_path", "ref.model_name_or_path"),
            **PAIRS,
            "The loss": ("dpo.loss", "dpo.beta", "dpo.label_smoothing"),
            **OFFLINE,
        },
    ),
    "train kto": (
        _example("train kto", "--data.dataset labelled.jsonl --ckpt.output_dir runs/kto"),
        {
            "The model": ("actor.model_name_or_path", "ref.model_name_or_path"),
            "The replies": (
                *("data.dataset", "data.prompt_key", "data.completion_key", "data.label_key", "data.max_tokens"),
            ),
            "The loss": ("kto.loss", "kto.beta", "kto.balance"),
            **OFFLINE,
        },
    ),
    "train prm": (
        _example("train prm", "--data.dataset labelled_steps.jsonl --ckpt.output_dir runs/prm"),
        {
            "The model": ("actor.model_name_or_path",),
            "The steps": (
                *("data.dataset", "data.placeholder", "data.separator", "data.up_to_first_error", "data.max_tokens"),
            ),
            "The loss": ("prm.reward_tokens",),
            **OFFLINE,
        },
    ),
    "train rm": (
        _example(
            "train rm", "--data.dataset pairs.jsonl --eval.dataset held_out_pairs.jsonl --ckpt.output_dir runs/rm"
        ),
        {
            "The model": ("actor.model_name_or_path",),
            **PAIRS,
            "The loss": ("rm.margin", "rm.centring"),
            **OFFLINE,
        },
    ),
    "train kd": (
        _example(
            "train kd",
            "--teacher.model_name_or_path HuggingFaceTB/SmolLM2-360M-Instruct",
            "--data.dataset conversations.jsonl --ckpt.output_dir runs/kd",
        ),
        {
            "The models": ("actor.model_name_or_path", "teacher.model_name_or_path"),
            "The examples": EXAMPLES["The examples"],
            "The loss": ("kd.weight", "kd.beta", "kd.temperature", "kd.top_k", "kd.cache"),
            **OFFLINE,
        },
    ),
    "data show": (_example("data show", "--data.dataset conversations.jsonl --n 5"), EXAMPLES),
}
"""The example and the essential settings of each command that reads the settings of a run."""
