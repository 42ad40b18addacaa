"""The models of a run and their optimizers: the sections `actor`, `critic` and `ref`."""

from attrs import Factory, define

from rollgrad.application.settings.choices import Aggregation, DType, LoraSync, LRScheduler, Optim


@define(kw_only=True)
class AdamConfig:
    """AdamW on float32 master weights; biases and norm weights are not decayed."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""


@define(kw_only=True)
class MuonConfig:
    """Muon on hidden matrices, with optim muon: each step turns all directions of a matrix alike. Its weight decay is
    that of adam."""

    lr: float = 1e-5
    """Peak learning rate: about the length of a step in each direction. 1e-5 moves the weights of a model of a billion
    parameters about as far as AdamW does with 1e-6."""
    momentum: float = 0.95
    """Decay of the momentum, which is Nesterov's."""


ALL_LINEAR = ("all-linear",)
"""Stands for the names of all linear layers but the vocabulary's head."""


@define(kw_only=True)
class LoraConfig:
    """Adapters that are trained instead of the weights. They have no dropout: the ratio of two log-probs means nothing
    if chance decides both. The run saves the model with adapters merged, and in `adapter` below it the adapters."""

    rank: int = 0
    """Rows of the adapters' narrow matrices; 0 trains all weights."""
    alpha: int = 32
    """An adapter counts alpha / rank times."""
    target_modules: tuple[str, ...] = ALL_LINEAR
    """Linear layers that get adapters, by the last parts of their names (q_proj, mlp.up_proj); all-linear is all of
    them but the vocabulary's head."""
    load_in_4bit: bool = False
    """QLoRA: keep the weights beside the adapters in 4 bits (NF4 with double quantisation, pip install
    rollgrad[qlora]). Rollouts, the reference and the saved model then have the dequantised weights."""
    sync: LoraSync = LoraSync.MERGED
    """What engines get after an update: merged is all weights with the adapters added; adapter is the adapters alone,
    which vLLM then computes beside the weights of actor.model_name_or_path."""


@define(kw_only=True)
class ActorConfig:
    """The policy that is trained."""

    model_name_or_path: str = ""
    """Hugging Face name or directory of the model. Required."""
    num_nodes: int = 1
    """Machines that the actor is trained on, with cluster.enable."""
    num_gpus_per_node: int = 1
    """Processes on each of them, with one GPU each where there are any."""
    dtype: DType = DType.AUTO
    """Compute format of all models, and of the engines that the run starts; auto is bfloat16 where the hardware
    multiplies it natively, else float32. float16 rounds eight times less than bfloat16 but overflows early: its loss is
    scaled, and steps whose gradients overflow are skipped."""
    float32_head: bool = False
    """Compute logits in float32 from the hidden states and the output embedding, whatever dtype is: log-probs of the
    actor, the reference and the embedded engine are then free of the rounding of logits (0.02 on average with logits of
    a standard deviation of 5 in bfloat16). vLLM's stay as they are."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    policy_loss_type: str = "ppo"
    """ppo, gspo, gspo_token, sequence_ppo, gmpo, cispo, sapo, clip_cov, kl_cov, dppo_tv, dppo_kl, policy_gradient, or a
    name that algo.extension_path defines."""
    eps_clip: float | None = None
    """Clip range, both sides, in the loss's own measure; default: the loss's own (ppo 0.2, gspo 3e-4 and 4e-4, ...)."""
    eps_clip_low_high: tuple[float, float] | None = None
    """Separate lower and upper clip range (DAPO's clip-higher); replaces eps_clip."""
    dual_clip: float | None = None
    """Bound on the loss of negative advantages (dual-clip PPO); must exceed 1."""
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    """Temperatures of SAPO's gate for positive and negative advantages."""
    cov_share: float = 2e-4
    """Share of tokens that clip_cov and kl_cov treat apart."""
    cov_range: tuple[float, float] = (1.0, 5.0)
    """Covariance of log-prob and advantage from which and up to which clip_cov may choose a token."""
    cov_kl_coef: float = 1.0
    """Weight of kl_cov's penalty at the chosen tokens."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; with entropy_target its starting value."""
    entropy_target: float | None = None
    """Entropy per token, in nats, below which an adaptive bonus acts; none keeps the weight fixed."""
    entropy_coef_step: float = 5e-3
    """How much the adaptive weight moves each rollout."""
    positive_nll_coef: float = 0.0
    """Weight of the likelihood of replies that passed, as an additional loss (VAPO)."""
    aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts (Switch Transformers), over all tokens of an optimizer
    step; above 0 it takes one more forward pass."""
    loss_aggregation: Aggregation | None = None
    """How token losses become one number; default: the loss's own (ppo token_mean, gspo sequence_mean, ...);
    constant_length is Dr. GRPO's form."""
    lora: LoraConfig = Factory(LoraConfig)
    """Low-rank adapters; with a rank above 0 they alone are trained."""
    optim: Optim = Optim.ADAM
    """adam steps everything by AdamW, muon hidden matrices by Muon and the rest by AdamW."""
    adam: AdamConfig = Factory(AdamConfig)
    """AdamW."""
    muon: MuonConfig = Factory(MuonConfig)
    """Muon."""
    lr_scheduler: LRScheduler = LRScheduler.CONSTANT
    """Learning rate after warm-up."""
    lr_warmup_ratio: float = 0.0
    """Share of the run's optimizer steps spent warming up."""
    min_lr_ratio: float = 0.1
    """Floor of the decaying schedules, as a share of the peak."""
    max_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 turns clipping off."""


@define(kw_only=True)
class CriticConfig:
    """The value model of PPO; used by the gae and turn_gae estimators only."""

    model_name_or_path: str | None = None
    """Model the critic starts from; default: the actor's. A reward model (sequence classification with one label) also
    gives its head."""
    num_nodes: int | None = None
    """Machines that the critic is trained on; default: as many as the actor's."""
    num_gpus_per_node: int | None = None
    """Processes on each of them; default: as many as the actor's."""
    freezing_steps: int = 0
    """First rollouts that train the critic alone, with the actor frozen (value warm-up)."""
    optim: Optim = Optim.ADAM
    """As actor.optim."""
    adam: AdamConfig = Factory(lambda: AdamConfig(lr=9e-6))
    """AdamW."""
    muon: MuonConfig = Factory(lambda: MuonConfig(lr=9e-5))
    """Muon."""
    lr_scheduler: LRScheduler = LRScheduler.CONSTANT
    """Learning rate after warm-up."""
    lr_warmup_ratio: float = 0.0
    """Share of the run's optimizer steps spent warming up."""
    min_lr_ratio: float = 0.1
    """Floor of the decaying schedules, as a share of the peak."""
    max_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 turns clipping off."""
    value_clip: float | None = 0.5
    """Largest move of a value from its estimate before the update; none turns it off."""


@define(kw_only=True)
class RefConfig:
    """The frozen reference that KL is measured against."""

    model_name_or_path: str | None = None
    """Model of the reference; default: the actor's starting point."""
    num_nodes: int | None = None
    """Machines that hold the reference; default: as many as the actor's."""
    num_gpus_per_node: int | None = None
    """Processes on each of them, each with the whole reference; default: as many as the actor's."""


REWARD_TOKENS = 16384
"""Tokens of a reward model's forward pass, padding included: some GiB of activations in a model of eight billion."""
