"""The draft of a translated command of verl."""

from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

from attrs import Factory, define

from rollgrad.domain.algorithms.catalogue import ESTIMATORS, EstimatorTraits, canonical_estimator
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.names.flags import Program
from rollgrad.entrypoints.names.names_of_verl_commands import IS, OFFLOADS, RS, SAYS_ALWAYS, TEACHING
from rollgrad.entrypoints.names.names_of_verl_seldom_set import ACTOR, REF, ROLLOUT
from rollgrad.entrypoints.translation.draft import Draft
from rollgrad.entrypoints.verl.words import FULLY_ASYNC, ONE_STEP_OFF, Command, Override, known, read_overrides

MODES = ("sync", "colocate_async", "separate_async")
"""How verl's trainer shares time between rollouts and updates."""

TAIL = "forward_kl_topk_tail"
DISTRIBUTIONS = ("forward_kl_topk", TAIL)
"""verl's losses of a teacher's most likely tokens; `TAIL` counts all others, too."""

IDLE = ("False", "false", "null")
"""Values that ask for nothing, whatever the setting."""


@define(kw_only=True)
class VerlDraft(Draft):
    """A translation in progress. `file`: the name of the file that the configuration begins with."""

    file: str = ""
    submitted: bool = False
    """Whether the command goes to a Ray cluster that runs already."""
    options: dict[str, Override] = Factory(dict)  # type: ignore[assignment] # what is given here are overrides

    def value(self, name: str, default: Any = None) -> Any:
        """Returns the value of a setting, as `Draft.value` does; None where the command takes it away."""
        given = self.options.get(name)
        return None if given is not None and given.unset else super().value(name, default)

    def follow(self, name: str) -> None:
        """Does as `Draft.follow`, for a setting that is not taken away."""
        if name not in self.options or not self.options[name].unset:
            super().follow(name)

    def asks(self, name: str) -> bool:
        """Returns whether a setting was given with a value that turns something on."""
        given = self.options.get(name)
        if given is None or given.unset:
            return False
        if given.values in [(idle,) for idle in IDLE]:
            return SAYS_ALWAYS[0] in self.program.flags[name].idle  # some features are always on here
        return super().asks(name)

    def one_of(self, name: str, values: Sequence[str]) -> str:
        """Returns the value of a setting that has one of some values.

        Raises:
            ConfigurationError: it has another one.
        """
        value = str(self.value(name))
        if value not in values:
            raise ConfigurationError(f"{name} is {value}, but there are {', '.join(values)}: change it.")
        return value

    def positive(self, name: str) -> int:
        """Returns a number that others are divided by or multiplied with.

        Raises:
            ConfigurationError: it is below 1.
        """
        value = self.value(name)
        if not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name} is {value}, but it must be at least 1: change it.")
        return value


Kind = TypeVar("Kind", bound=VerlDraft)


def read_draft(kind: type[Kind], command: Command, program: Program) -> Kind:
    """Returns the draft of a command of a program, without settings.

    Raises:
        ConfigurationError: the program has not all of the settings.
    """
    overrides = read_overrides(command.words)
    lost = [f"{word}: set it in front of rollgrad" for word in command.environment]
    lost += overrides.told
    program, options = known(program, overrides.given, lost)
    return kind(program=program, options=options, lost=lost, file=overrides.file, submitted=command.submitted)


@define(kw_only=True)
class RLDraft(VerlDraft):
    """A translation in progress of verl's trainer by reinforcement learning. `module`: which of its programs."""

    module: str = ""

    @property
    def megatron(self) -> bool:
        """Whether Megatron divides the models."""
        engines = (self.value("model_engine"), self.value(f"{ACTOR}.strategy"), self.file)
        return any("megatron" in str(engine) for engine in engines)

    @property
    def gpus(self) -> int:
        """GPUs of the models, and of the engines too unless these have their own."""
        return self.positive("trainer.nnodes") * self.positive("trainer.n_gpus_per_node")

    @property
    def trainer_mode(self) -> str:
        """How rollouts and updates share time: `sync`, `colocate_async`, `separate_async`, or the name of a program of
        its own."""
        own = self.module in (ONE_STEP_OFF, FULLY_ASYNC)
        return self.module if own else self.one_of("trainer.v1.trainer_mode", MODES)

    @property
    def overlaps(self) -> bool:
        """Whether engines have GPUs of their own, and sample while models train."""
        return self.trainer_mode in (ONE_STEP_OFF, FULLY_ASYNC, "separate_async")

    @property
    def engine_gpus(self) -> int:
        """GPUs of the engines."""
        if not self.overlaps:
            return self.gpus
        section = ROLLOUT if self.trainer_mode == "separate_async" else "rollout"
        each = self.value(f"{section}.n_gpus_per_node", self.value("trainer.n_gpus_per_node"))
        return self.positive(f"{section}.nnodes") * int(each)

    @property
    def counts_prompts(self) -> bool:
        """Whether the run is as long as a number of prompts says."""
        return self.module == FULLY_ASYNC and self.value("rollout.total_rollout_steps") is not None

    @property
    def prompts(self) -> int:
        """Prompts of a rollout: those between two pushes of the weights."""
        if self.module != FULLY_ASYNC:
            return self.positive("data.train_batch_size")
        batches = ("trigger_parameter_sync_step", "require_batches")
        return self.positive(f"{ACTOR}.ppo_mini_batch_size") * prod(
            self.positive(f"async_training.{key}") for key in batches
        )

    @property
    def distils(self) -> bool:
        """Whether the policy learns from a teacher."""
        return bool(self.value(f"{TEACHING}.enabled", False))

    @property
    def rewarded(self) -> bool:
        """Whether it learns from rewards, too."""
        return bool(self.value(f"{TEACHING}.distillation_loss.use_task_rewards"))

    @property
    def by_policy_gradient(self) -> bool:
        """Whether the teacher's log-ratio is an advantage, not a loss."""
        return bool(self.value(f"{TEACHING}.distillation_loss.use_policy_gradient"))

    @property
    def teaches_distributions(self) -> bool:
        """Whether the loss is of the teacher's most likely tokens, not of the sampled ones."""
        return not self.by_policy_gradient and self.value(f"{TEACHING}.distillation_loss.loss_mode") in DISTRIBUTIONS

    @property
    def estimator(self) -> str:
        """The advantage estimator, by our name."""
        if self.distils and not self.rewarded:
            return "on_policy_distill"
        name = canonical_estimator(str(self.value("algorithm.adv_estimator")))
        return "dr_grpo" if name == "group_norm" and not self.value("algorithm.norm_adv_by_std_in_grpo") else name

    @property
    def traits(self) -> EstimatorTraits:
        """Traits of the advantage estimator."""
        return ESTIMATORS.get(self.estimator, EstimatorTraits())

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return "critic" in self.traits.needs

    @property
    def kl(self) -> tuple[float, bool]:
        """The weight of KL, of which 0 loads no reference, and whether it is in the loss."""
        if self.distils:
            coef = float(self.value(f"{TEACHING}.distillation_loss.distillation_loss_coef") or 0)
            return (coef, True) if self.rewarded else (1.0, self.teaches_distributions)
        if self.value(f"{ACTOR}.use_kl_loss", False):
            return float(self.value(f"{ACTOR}.kl_loss_coef") or 0), True
        if self.value("algorithm.use_kl_in_reward", False):
            return float(self.value("algorithm.kl_ctrl.kl_coef") or 0), False
        return 0.0, False

    @property
    def penalises_rewards(self) -> bool:
        """Whether KL is in the reward."""
        coef, in_loss = self.kl
        return coef != 0 and not in_loss and not self.distils

    @property
    def corrects(self) -> bool:
        """Whether the command asks for an off-policy correction."""
        return self.asks(IS) or self.asks(RS)

    @property
    def has_reward_model(self) -> bool:
        """Whether a reward model is loaded."""
        return bool(self.value("reward_model.enable", False))

    @property
    def plays(self) -> bool:
        """Whether episodes have several turns."""
        multi = f"{ROLLOUT}.multi_turn"
        return bool(self.value(f"{multi}.enable", False)) or any(
            self.asks(f"{multi}.{key}_path") for key in ("tool_config", "function_tool", "interaction_config")
        )

    def sleepers(self) -> list[str]:
        """Returns the switches given that move what trains out of the GPUs while engines sample."""
        trained = [name for name in OFFLOADS if self.has_critic or not name.startswith("critic.")]
        return [name for name in trained if self.asks(name)]

    def ref_offload(self) -> str | None:
        """Returns the switch that keeps the reference in the CPU's memory, if it was given."""
        names = (f"{REF}.fsdp_config.param_offload", f"{REF}.megatron.param_offload")
        return next((name for name in names if self.asks(name)), None)
