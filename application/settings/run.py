"""Everything a reinforcement-learning run can be told, as attrs classes: one field, one docstring.

Importable without torch. `entrypoints` builds the command line from these classes and reads them from YAML;
`application.validation` holds the rules across fields.
"""

from attrs import Factory, define, field

from rollgrad.application.settings.agents import AgentConfig
from rollgrad.application.settings.choices import (
    CorrectionGate,
    CorrectionLevel,
    CorrectionMode,
    Engine,
    JudgeIsolation,
    KLAgainst,
    KLEstimator,
    Normalise,
    OldLogprobs,
    Overlong,
    Resume,
    Verifier,
    Whiten,
)
from rollgrad.application.settings.cluster import ClusterConfig, DeepSpeedConfig, VLLMConfig
from rollgrad.application.settings.models import ActorConfig, CriticConfig, RefConfig
from rollgrad.application.settings.training import TrainConfig


@define(kw_only=True)
class AdvantageConfig:
    """From rewards to advantages."""

    estimator: str = "gae"
    """gae (PPO), turn_gae, reinforce (REINFORCE++), reinforce_baseline, rloo, rloo_sequence, group_norm (GRPO),
    dr_grpo, opo, gpg, maxrl, gdpo, turn_group_norm, process_group_norm, remax, flash_reinforce, on_policy_distill, or
    a name that algo.extension_path defines."""
    gamma: float = 1.0
    """Discount per action token (per turn for the turn estimators)."""
    lambd: float = 1.0
    """GAE's lambda per action token."""
    critic_lambd: float | None = None
    """Lambda of the critic's targets; default: lambd (VAPO's decoupled GAE sets 1)."""
    length_adaptive_alpha: float | None = None
    """GAE's lambda becomes 1 - 1 / (alpha x length) for each reply (VAPO: 0.05); none keeps lambd."""
    whiten: Whiten | None = None
    """Centre and scale advantages over nothing, the batch's action tokens or each group's; default: the estimator's own
    (batch for gae, reinforce and reinforce_baseline, else none)."""
    no_std_norm: bool = False
    """Whiten by the mean only."""


@define(kw_only=True)
class KLConfig:
    """Keeping near the reference."""

    init_coef: float = 0.0
    """Weight of the KL term; 0 loads no reference at all."""
    estimator: KLEstimator = KLEstimator.K1
    """k1, k2, k3 or k3_unbiased. In the reward use k1; as a loss use k2, k3 or k3_unbiased."""
    against: KLAgainst = KLAgainst.REFERENCE
    """The frozen reference, or the policy that sampled the rollout (as a loss; loads no reference)."""
    use_loss: bool = False
    """Add KL to the loss rather than to the reward."""
    target: float | None = None
    """KL per action token that an adaptive controller steers to; none keeps the weight fixed."""
    horizon: float = 10000.0
    """Samples over which the adaptive controller reacts."""


@define(kw_only=True)
class CorrectionConfig:
    """Off-policy correction: what a token weighs that another policy sampled."""

    level: CorrectionLevel = CorrectionLevel.AUTO
    """Where the importance ratio is taken: token, sequence (the product) or geometric (its geometric mean); off
    corrects nothing. auto is token where samples may be older than the weights (train.async_enable with max_staleness
    1 or more, over-sampling) and algo.old_logprobs does not correct for it, else off; --dry_run and the start of a run
    say which."""
    mode: CorrectionMode = CorrectionMode.TRUNCATE
    """truncate the ratio at high, clip it to low and high, or mask what lies outside."""
    gate: CorrectionGate = CorrectionGate.RATIO
    """What else leaves a token or sequence out: nothing, binary_kl, tv, or opsm (negative advantages only)."""
    low: float = 0.5
    """Lower bound of the ratio; clip and mask."""
    high: float = 2.0
    """Upper bound of the ratio."""
    threshold: float = 5e-3
    """Largest divergence that the gates binary_kl, tv and opsm let pass."""


@define(kw_only=True)
class AlgoConfig:
    """The algorithm."""

    preset: str | None = None
    """Named recipes, several separated by commas (dapo,tis): vetted settings that a file and flags override, shown by
    --print_config. See docs/algorithms.md."""
    extension_path: str | None = None
    """Python file with estimators and policy losses of your own, registered by @estimator and @policy_loss."""
    advantage: AdvantageConfig = Factory(AdvantageConfig)
    """From rewards to advantages."""
    kl: KLConfig = Factory(KLConfig)
    """Keeping near the reference."""
    old_logprobs: OldLogprobs = OldLogprobs.RECOMPUTE
    """Log-probs in the ratio's denominator (proximal policy): the trainer's own before the update, the rollout's (one
    forward pass less), or interpolated between rollout and current policy by the age of each token. A single step on
    fresh samples needs none of them: the ratio is 1."""
    correction: CorrectionConfig = Factory(CorrectionConfig)
    """Off-policy correction."""
    dynamic_filtering_enable: bool = False
    """Train only on groups whose scores differ, so that they are neither all right nor all wrong; each other one is
    replaced by a new prompt at once (DAPO's dynamic sampling)."""
    dynamic_filtering_range: tuple[float, float] | None = None
    """Mean scores between which, both excluded, a group is kept instead; mind how scores are coded (0 1 finds no middle
    between -1 and 1)."""
    dynamic_filtering_spread: bool = False
    """Train only on groups whose rewards differ; each other one is replaced by a new prompt."""
    dynamic_filtering_budget: float = 10.0
    """Prompts that may be played for a rollout, as a multiple of rollout.batch_size; more is an error."""


@define(kw_only=True)
class RolloutConfig:
    """How episodes are sampled."""

    batch_size: int = 128
    """Prompts per rollout."""
    n_samples_per_prompt: int = 1
    """Samples of each prompt: one group."""
    generate_batch_size: int | None = None
    """Groups in flight at once; default: batch_size. More (over-sampling) keeps what a rollout does not need for the
    next one, where it is one update old, which algo.correction corrects. With train.async_enable the
    default, and the most, is all that the bound on staleness lets through."""
    temperature: float = 1.0
    """Sampling temperature, also used in training log-probs."""
    top_p: float = 1.0
    """Nucleus mass; 1 is the full distribution."""
    top_k: int = 0
    """Most likely tokens kept; 0 keeps all."""
    max_new_tokens: int = 1024
    """Sampled tokens per reply."""
    max_turns: int = 8
    """Turns after which an episode in an environment counts as truncated."""
    max_episode_tokens: int | None = None
    """Tokens of an episode in an environment, prompt and observations included; default: the model's positions."""
    max_episode_seconds: float | None = None
    """Wall clock of an episode in an environment, after which it counts as truncated; none sets no limit."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a reply, besides the model's own end token."""
    max_concurrent: int = 4096
    """Episodes in flight at once."""
    max_failures: int | None = None
    """Failed episodes tolerated per rollout (with train.async_enable from update to update), each named on the console;
    one more ends the run. Default: 5 % of a rollout's episodes."""
    engine: Engine = Engine.EMBEDDED
    """What samples: this process, vllm in processes of its own (pip install rollgrad[vllm]), or a server that is there
    already."""
    server_urls: tuple[str, ...] = ()
    """Addresses of rollout.engine server, which share the prompts: http://host:port each, as `vllm serve` listens. The
    environment variable ROLLGRAD_ENGINE_TOKEN is sent as a bearer token."""
    max_batch_size: int = 128
    """Sequences decoded together by the engine; requests in flight at each server."""


DEFAULT_PROMPT_TOKENS = 1024
"""Longest prompt where neither data.max_prompt_tokens nor data.max_len is set."""


@define(kw_only=True)
class DataConfig:
    """The prompts."""

    prompt_dataset: str = ""
    """File (.json, .jsonl, .csv, .parquet), saved dataset folder, hub name (NAME:CONFIGURATION where it has several,
    such as openai/gsm8k:main), or reasoning_gym:TASK; several separated by commas. Required."""
    prompt_probs: tuple[float, ...] | None = None
    """Mixing probabilities, one for each dataset; default: concatenate."""
    prompt_split: str = "train"
    """Split to read."""
    input_key: str | None = None
    """Column with the prompt: text, or a list of chat messages; a dot leads into a nested column. Default: prompt,
    question, problem, input or instruction, whichever there is."""
    label_key: str | None = None
    """Column with what the reward compares against; a dot leads into a nested column (reward_model.ground_truth).
    Default: verl's reward_model.ground_truth, or else answer, solution, label, ground_truth, final_answer or target,
    whichever there is."""
    apply_chat_template: bool = True
    """Render prompts with the model's chat template."""
    chat_template: str | None = None
    """Chat template in place of the model's: a Jinja file, or the template itself. It is saved with the trained
    model."""
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Variables for the chat template, such as enable_thinking False: name value name value; the values true and false
    are booleans."""
    system_prompt: str | None = None
    """System message put before every prompt; needs the chat template."""
    input_template: str | None = None
    """Text with {} where the prompt goes, e.g. 'Question: {}\\nAnswer:'; only without the chat template."""
    max_prompt_tokens: int | None = None
    """Longest prompt, in tokens; default: 1024, or with max_len all but one token of it."""
    max_len: int | None = None
    """Tokens of prompt and reply together (of the whole history where there are several turns, in each of its
    branches): a reply gets what the prompt leaves, up to rollout.max_new_tokens. None bounds each by itself."""
    overlong: Overlong = Overlong.DROP
    """What becomes of prompts that are longer: drop them before the first step (they are counted and reported), or
    error."""
    max_samples: int | None = None
    """Read at most this many prompts."""
    size: int = 1000
    """Prompts to generate for a reasoning_gym task."""
    curriculum_range: tuple[float, float] | None = None
    """Skip prompts whose latest mean score lies outside, but for every eighth time; none plays all alike."""

    @property
    def prompt_limit(self) -> int:
        """Longest prompt that is played, in tokens."""
        if self.max_prompt_tokens is not None:
            return self.max_prompt_tokens
        return DEFAULT_PROMPT_TOKENS if self.max_len is None else self.max_len - 1


@define(kw_only=True)
class RewardConfig:
    """What a reply is worth."""

    function_path: str | None = None
    """Python file with a function reward_func or compute_score, or FILE:NAME. It gets what its parameters are called:
    queries, prompts, completions, labels, messages, tokens, metadata, step, any column of the row: docs/guide.md."""
    model_name_or_path: str | None = None
    """Reward model that scores prompt and reply: Hugging Face name or directory of a sequence classifier with one
    label."""
    num_nodes: int | None = None
    """Machines that hold the reward model, with cluster.enable; default: as many as the actor's."""
    num_gpus_per_node: int | None = None
    """Processes on each of them, each with the whole reward model; default: as many as the actor's."""
    remote_url: str | None = None
    """Reward server, POST {query, prompts, labels} -> {rewards, scores, extra_logs}; several separated by commas share
    the work. The environment variable ROLLGRAD_REWARD_TOKEN is sent as a bearer token."""
    remote_batch_size: int = 64
    """Replies sent to a reward server together, at most."""
    failure_value: float | None = None
    """Reward of a reply that no reward server judged in time; none makes it a failed episode (see
    rollout.max_failures)."""
    judge_url: str | None = None
    """Language model that judges: base address of an OpenAI-compatible server, http://host:8000/v1; several separated
    by commas share the work. The environment variable ROLLGRAD_JUDGE_TOKEN is sent as a bearer token."""
    judge_model: str | None = None
    """Name under which the judge's server knows the model."""
    judge_prompt: str | None = None
    """Text file that asks the judge, with {prompt}, {response}, {query}, {label} and {column} of the row. The reward is
    the last number of the answer."""
    judge_range: tuple[float, float] | None = None
    """Lowest and highest number that counts as a judgement; another is a failed one. Default: any number counts."""
    verifier: Verifier | None = None
    """Built-in reward: last_number, exact_match, math (math-verify) or format."""
    format_pattern: str | None = None
    """Regular expression that the whole reply must match, for the format verifier."""
    isolation: JudgeIsolation = JudgeIsolation.SANDBOX
    """What the math and format verifiers and the scorers of reasoning_gym tasks run in: a sandbox without network,
    files or environment, or none, where a reply that a scorer runs as code may do all that you may do."""
    timeout: float = 10.0
    """Seconds one judgement may take: on a reward server all attempts together; of a reward model up to 64 replies that
    it scores together, their waiting not counted."""
    weights: dict[str, float] | None = None
    """Weight of each named reward, for functions that return several: name weight name weight; default: 1 each."""
    pass_threshold: float = 1.0
    """A reply passes when its score reaches this."""
    clip_range: tuple[float, float] | None = None
    """The reward of a whole episode, summed over its turns, is clamped to this range before any baseline."""
    normalize: Normalise = Normalise.NONE
    """Centre and scale rewards: by the running mean and deviation of all so far, by those of a dataset, or those that
    the reward model's config.json names (mean and std, as OpenRLHF saves them)."""
    normalize_mean_std: tuple[float, float] | None = None
    """Mean and standard deviation of rewards over a dataset, for normalize dataset."""
    overlong_buffer_len: int | None = None
    """Last tokens before the limit over which a length penalty grows (DAPO); none turns it off. The limit is
    rollout.max_new_tokens, in episodes of several turns rollout.max_episode_tokens; sampled tokens count."""
    overlong_penalty_factor: float = 1.0
    """Penalty at full length."""
    stop_properly_penalty_coef: float | None = None
    """What a truncated reply is worth at most: this share of its reward, or this reward if negative; none turns it
    off."""
    cosine_length: bool = False
    """Reward by outcome and length along half a cosine, in place of the reward itself; full length is the limit of
    overlong_buffer_len."""
    cosine_passed: tuple[float, float] = (2.0, 1.0)
    """Reward of a reply that passed, at no and at full length."""
    cosine_failed: tuple[float, float] = (-10.0, 0.0)
    """Reward of a reply that failed, at no and at full length."""
    cosine_exceeded: float = -10.0
    """Reward of a reply that was cut off."""


@define(kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts, before, during and after training."""

    dataset: str | None = None
    """Held-out prompts, in the same forms as data.prompt_dataset; none turns evaluation off."""
    split: str = "test"
    """Split to read."""
    steps: int = -1
    """Rollouts between evaluations; -1 evaluates only at the start and the end."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    n_samples_per_prompt: int = 1
    """Samples of each prompt, for pass@k and mean@k."""
    max_new_tokens: int | None = None
    """Sampled tokens per episode; default: rollout.max_new_tokens."""
    max_samples: int | None = None
    """Evaluate at most this many prompts."""


@define(kw_only=True)
class CheckpointConfig:
    """What is written where."""

    output_dir: str = "./runs/rollgrad"
    """Directory of the run: model, metrics, report. One that holds another run is refused."""
    overwrite: bool = False
    """Remove the run that output_dir holds, when the new one begins."""
    save_steps: int = -1
    """Rollouts between model checkpoints; -1 saves only at the end, however the run ends."""
    state_minutes: float | None = 30.0
    """Minutes between training states (weights, optimizer, position; about 12 bytes a parameter), from which resume
    continues. The last one is of the run's end, however it ends. None, without state_steps, saves none."""
    state_steps: int = -1
    """Rollouts between training states, besides state_minutes; -1 goes by time alone."""
    state_dir: str | None = None
    """Directory of the training states; default: output_dir."""
    keep_states: int = 2
    """Newest training states that are kept; there is one more while one is written. Of two, the one before is there if
    the newest is broken."""
    keep_models: int | None = None
    """Newest models of save_steps that are kept; None keeps all."""
    resume: Resume = field(default=Resume.NEVER, converter=Resume)
    """Continue the run in output_dir from its training state: never, always (an error without one), or auto: if there
    is one. The bare flag means always."""


@define(kw_only=True)
class LoggerConfig:
    """Where metrics go besides metrics.jsonl in the output directory."""

    tensorboard_dir: str | None = None
    """TensorBoard log directory (extra: tracking)."""
    console: bool = True
    """Progress bar on a terminal and a table at the end."""
    log_samples: int = 1
    """Sampled texts written to samples.jsonl each step."""


@define(kw_only=True)
class RLConfig:
    """A reinforcement-learning run."""

    actor: ActorConfig = Factory(ActorConfig)
    """The policy that is trained."""
    critic: CriticConfig = Factory(CriticConfig)
    """The value model of PPO."""
    ref: RefConfig = Factory(RefConfig)
    """The frozen reference."""
    algo: AlgoConfig = Factory(AlgoConfig)
    """The algorithm."""
    rollout: RolloutConfig = Factory(RolloutConfig)
    """How episodes are sampled."""
    agent: AgentConfig = Factory(AgentConfig)
    """Tools, attempts, and programs that play episodes."""
    vllm: VLLMConfig = Factory(VLLMConfig)
    """The engines of rollout.engine vllm."""
    train: TrainConfig = Factory(TrainConfig)
    """How samples become optimizer steps."""
    cluster: ClusterConfig = Factory(ClusterConfig)
    """Processes of their own for models and engines, on this machine or many."""
    ds: DeepSpeedConfig = Factory(DeepSpeedConfig)
    """How models are divided over their processes."""
    data: DataConfig = Factory(DataConfig)
    """The prompts."""
    reward: RewardConfig = Factory(RewardConfig)
    """What a reply is worth."""
    eval: EvalConfig = Factory(EvalConfig)
    """Evaluation."""
    ckpt: CheckpointConfig = Factory(CheckpointConfig)
    """What is written where."""
    logger: LoggerConfig = Factory(LoggerConfig)
    """Where metrics go."""
