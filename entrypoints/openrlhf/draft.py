"""The draft of a translated run of reinforcement learning."""

from attrs import define

from rollgrad.domain.algorithms.catalogue import ESTIMATORS, EstimatorTraits
from rollgrad.entrypoints.translation.draft import Draft


@define(kw_only=True)
class RLDraft(Draft):
    """A translation in progress of OpenRLHF's trainer by reinforcement learning."""

    submitted: bool = False
    """Whether the command goes to a Ray cluster that runs already."""

    @property
    def estimator(self) -> str:
        """The advantage estimator."""
        return str(self.value("algo.advantage.estimator", "gae"))

    @property
    def traits(self) -> EstimatorTraits:
        """Traits of the advantage estimator."""
        return ESTIMATORS.get(self.estimator, EstimatorTraits())

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return "critic" in self.traits.needs

    @property
    def corrects(self) -> bool:
        """Whether samples are corrected for the policy that drew them."""
        prefix = "algo.advantage.is_correction"
        return bool(self.value(f"{prefix}_level", "off") != "off" or self.value(f"{prefix}_enable", False))

    @property
    def kl_coef(self) -> float:
        """The weight of KL; 0 loads no reference."""
        return float(self.value("algo.kl.init_coef", 0.01))

    @property
    def reward_model(self) -> str | None:
        """The reward model that OpenRLHF loads, the first if there are several."""
        outside = {"reward.remote_url", "train.agent_func_path"} & set(self.options)
        names = None if outside else self.value("reward.model_name_or_path")
        return names and str(names).split(",")[0]
