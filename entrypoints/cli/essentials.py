"""An example of each command that reads the settings of a run, and the settings to begin with, by topic: what `--help`
shows first."""

from collections.abc import Mapping, Sequence

RUN_EXAMPLE = """  rollgrad train rl --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.prompt_dataset reasoning_gym:basic_arithmetic --algo.preset grpo --ckpt.output_dir runs/first"""

EVAL_EXAMPLE = """  rollgrad eval --actor.model_name_or_path runs/first/model \\
      --eval.dataset reasoning_gym:basic_arithmetic --eval.max_samples 100"""

REWARD = {
    "The reward: one of these": (
        *("reward.function_path", "reward.verifier", "reward.model_name_or_path", "reward.remote_url"),
    )
}

RUN_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path", "actor.dtype", "actor.lora.rank"),
    "The prompts": ("data.prompt_dataset", "data.input_key", "data.label_key", "data.apply_chat_template"),
    **REWARD,
    "An agent, if it is one": ("agent.tools", "train.agent_func_path"),
    "The algorithm": ("algo.preset", "algo.advantage.estimator", "algo.kl.init_coef", "actor.adam.lr"),
    "Rollouts": (
        *("rollout.batch_size", "rollout.n_samples_per_prompt", "rollout.max_new_tokens", "rollout.temperature"),
        "rollout.engine",
    ),
    "Training": ("train.max_steps", "train.batch_size", "train.seed"),
    "Evaluation": ("eval.dataset", "eval.steps"),
    "Output": ("ckpt.output_dir", "ckpt.save_steps", "ckpt.resume"),
}
"""Settings that a newcomer needs, by topic."""

EVAL_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path", "actor.dtype"),
    "The prompts": ("eval.dataset", "eval.split", "eval.max_samples", "data.input_key", "data.label_key"),
    **REWARD,
    "Replies": (
        *("eval.temperature", "eval.top_p", "eval.top_k", "eval.n_samples_per_prompt", "eval.max_new_tokens"),
        "rollout.engine",
    ),
}

SFT_EXAMPLE = """  rollgrad train sft --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.dataset conversations.jsonl --ckpt.output_dir runs/sft"""

EXAMPLES: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path",),
    "The examples": ("data.dataset", "data.format", "data.train_on", "data.max_tokens", "data.overlong"),
}

OFFLINE: Mapping[str, Sequence[str]] = {
    "The optimizer": ("actor.adam.lr", "actor.lora.rank"),
    "Training": ("train.batch_size", "train.num_epochs", "train.max_steps", "train.seed"),
    "Evaluation": ("eval.dataset", "eval.steps"),
    "Output": ("ckpt.output_dir", "ckpt.save_steps", "ckpt.resume"),
}
"""Topics of all trainers over examples."""

SFT_ESSENTIALS: Mapping[str, Sequence[str]] = {
    **EXAMPLES,
    **OFFLINE,
    "The optimizer": (*OFFLINE["The optimizer"], "train.loss"),
}

DPO_EXAMPLE = """  rollgrad train dpo --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.dataset pairs.jsonl --ckpt.output_dir runs/dpo"""

DPO_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path", "ref.model_name_or_path"),
    "The pairs": ("data.dataset", "data.prompt_key", "data.chosen_key", "data.rejected_key", "data.max_tokens"),
    "The loss": ("dpo.loss", "dpo.beta", "dpo.label_smoothing"),
    **OFFLINE,
}

KTO_EXAMPLE = """  rollgrad train kto --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.dataset labelled.jsonl --ckpt.output_dir runs/kto"""

KTO_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path", "ref.model_name_or_path"),
    "The replies": ("data.dataset", "data.prompt_key", "data.completion_key", "data.label_key", "data.max_tokens"),
    "The loss": ("kto.loss", "kto.beta", "kto.balance"),
    **OFFLINE,
}

RM_EXAMPLE = """  rollgrad train rm --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.dataset pairs.jsonl --eval.dataset held_out_pairs.jsonl --ckpt.output_dir runs/rm"""

RM_ESSENTIALS: Mapping[str, Sequence[str]] = {
    **DPO_ESSENTIALS,
    "The model": ("actor.model_name_or_path",),
    "The loss": ("rm.margin", "rm.centring"),
}

KD_EXAMPLE = """  rollgrad train kd --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --teacher.model_name_or_path HuggingFaceTB/SmolLM2-360M-Instruct \\
      --data.dataset conversations.jsonl --ckpt.output_dir runs/kd"""

KD_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The models": ("actor.model_name_or_path", "teacher.model_name_or_path"),
    "The examples": EXAMPLES["The examples"],
    "The loss": ("kd.weight", "kd.beta", "kd.temperature", "kd.top_k", "kd.cache"),
    **OFFLINE,
}

PRM_EXAMPLE = """  rollgrad train prm --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.dataset labelled_steps.jsonl --ckpt.output_dir runs/prm"""

PRM_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path",),
    "The steps": ("data.dataset", "data.placeholder", "data.separator", "data.up_to_first_error", "data.max_tokens"),
    "The loss": ("prm.reward_tokens",),
    **OFFLINE,
}

DATA_EXAMPLE = """  rollgrad data show --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.dataset conversations.jsonl --n 5"""

GENERATE_EXAMPLE = """  rollgrad generate --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.prompt_dataset reasoning_gym:basic_arithmetic --rollout.n_samples_per_prompt 8 --output replies.jsonl"""

GENERATE_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path", "actor.dtype"),
    "The prompts": ("data.prompt_dataset", "data.prompt_split", "data.input_key", "data.max_samples"),
    "Replies": (
        *("rollout.n_samples_per_prompt", "rollout.max_new_tokens", "rollout.temperature", "rollout.top_p"),
        *("rollout.engine", "train.seed"),
    ),
}

REPLAY_EXAMPLE = """  rollgrad replay runs/first --step 1"""
REPLAY_ESSENTIALS: Mapping[str, Sequence[str]] = {}
RESCORE_EXAMPLE = """  rollgrad rescore runs/first --reward.function_path reward.py"""
SCORE_EXAMPLE = """  rollgrad score --input replies.jsonl --reward.verifier last_number --output scored.jsonl"""

SCORE_ESSENTIALS: Mapping[str, Sequence[str]] = {
    **REWARD,
    "The tokenizer": ("actor.model_name_or_path",),
}

LOOP_EXAMPLE = """  rollgrad loop {} --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.prompt_dataset reasoning_gym:basic_arithmetic --rollout.batch_size 64 --rollout.n_samples_per_prompt 8 \\
      --ckpt.output_dir runs/{}"""

LOOP_ESSENTIALS: Mapping[str, Sequence[str]] = {
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
RS_ESSENTIALS = {"The loop": ("loop.iterations", "loop.top_k", "loop.min_reward", "loop.min_margin"), **LOOP_ESSENTIALS}
ITER_DPO_ESSENTIALS = {
    "The loop": ("loop.iterations", "loop.min_margin", "loop.reference"),
    **LOOP_ESSENTIALS,
    "The loss": ("dpo.loss", "dpo.beta"),
}
CSFT_ESSENTIALS = {
    "The loop": ("loop.iterations", "loop.suffix", "loop.normalize", "loop.target"),
    **LOOP_ESSENTIALS,
}

ESSENTIALS = {
    "train rl": (RUN_EXAMPLE, RUN_ESSENTIALS),
    "eval": (EVAL_EXAMPLE, EVAL_ESSENTIALS),
    "generate": (GENERATE_EXAMPLE, GENERATE_ESSENTIALS),
    "score": (SCORE_EXAMPLE, SCORE_ESSENTIALS),
    "replay": (REPLAY_EXAMPLE, REPLAY_ESSENTIALS),
    "rescore": (RESCORE_EXAMPLE, SCORE_ESSENTIALS),
    "loop rs": (LOOP_EXAMPLE.format("rs", "rs"), RS_ESSENTIALS),
    "loop iter_dpo": (LOOP_EXAMPLE.format("iter_dpo", "iter_dpo"), ITER_DPO_ESSENTIALS),
    "loop csft": (LOOP_EXAMPLE.format("csft", "csft"), CSFT_ESSENTIALS),
    "train sft": (SFT_EXAMPLE, SFT_ESSENTIALS),
    "train dpo": (DPO_EXAMPLE, DPO_ESSENTIALS),
    "train kto": (KTO_EXAMPLE, KTO_ESSENTIALS),
    "train prm": (PRM_EXAMPLE, PRM_ESSENTIALS),
    "train rm": (RM_EXAMPLE, RM_ESSENTIALS),
    "train kd": (KD_EXAMPLE, KD_ESSENTIALS),
    "data show": (DATA_EXAMPLE, EXAMPLES),
}
"""The example and the essential settings of each command that reads the settings of a run."""
