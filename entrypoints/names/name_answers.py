"""Sentences about names of other tools that have no setting of the same meaning here."""

LOGGING = "metrics go to metrics.jsonl in --ckpt.output_dir, and to trackers with --logger.report_to."
MICRO_BATCHES = (
    "micro-batches are filled up to --train.max_tokens_per_micro_batch tokens, and gradients are accumulated."
)
PROCESSES = (
    "with --cluster.enable DeepSpeed divides the models over processes: see --ds.zero_stage and docs/cluster.md."
)
NO_HUB = "set --ckpt.push_to_hub to the name of the repository."
LOADER = "rows are read in the process itself, in an order that --train.seed decides."
KERNELS = "kernels are chosen for the machine."
PRECISION = "write --actor.dtype bfloat16, float16 or float32."
SAMPLING = "replies are sampled with --rollout.temperature, --rollout.top_p and --rollout.top_k alone."
EVALUATION = "--eval.dataset evaluates before and after training, and --eval.steps in between."
AGGREGATION = (
    "set --actor.loss_aggregation: token_mean is DAPO's, sequence_mean GRPO's, constant_length Dr. GRPO's, "
    "sequence_sum LUSPO's, and token_sum is no mean; the loss itself is --actor.policy_loss_type."
)
CORRECTION = (
    "--algo.preset tis, icepop or seq_mask_tis corrects for samples of other weights: see --algo.correction.level."
)
NO_REMOTE_CODE = "code of a model's repository is never run: docs/models.md has the models of transformers that train."
CHECKPOINTS = "models and states are kept in --ckpt.output_dir: see --ckpt.save_steps and --ckpt.state_steps."
RESUMING = "write --ckpt.resume, which continues the run in --ckpt.output_dir."
WARMUP = "write --actor.lr_warmup_ratio, a share of the optimizer steps."
OPTIMIZER = "write --actor.optim adam or muon."
VLLM = "write --rollout.engine vllm."
SERVER = "write --rollout.engine server --rollout.server_urls http://host:port."
REWARD_MODEL = "write --reward.model_name_or_path."
KL_LOSS = "write --algo.kl.use_loss, with --algo.kl.init_coef."
KL_REWARD = "KL is in the reward unless --algo.kl.use_loss is given, and on with --algo.kl.init_coef above 0."
NORMALISATION = (
    "it follows from --algo.advantage.estimator: group_norm divides by a group's deviation, dr_grpo and rloo do not; "
    "see --algo.advantage.whiten too."
)
AGENTS = "see --agent.tools, --agent.command and --train.agent_func_path."
PER_DEVICE = (
    "set --rollout.batch_size (prompts of a rollout), --rollout.n_samples_per_prompt and --train.batch_size (of an "
    f"optimizer step); {MICRO_BATCHES}"
)


def alike(names: str, answer: str) -> dict[str, str]:
    """Returns one answer for several names, which are separated by spaces."""
    return dict.fromkeys(names.split(), answer)
