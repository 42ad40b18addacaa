"""The draft of a translation: the flags of an OpenRLHF command, and the settings that they become."""

from typing import Any

from attrs import Factory, define

from rollgrad.domain.algorithms.catalogue import ESTIMATORS, EstimatorTraits
from rollgrad.entrypoints.names.names_of_openrlhf import FLAGS
from rollgrad.entrypoints.openrlhf.words import Given, read_values


@define
class Draft:
    """A translation in progress. Flags have their dotted names, settings ours."""

    options: dict[str, Given]
    """Flags of the command, with their values."""
    submitted: bool = False
    """Whether the command goes to a Ray cluster that runs already."""
    settings: dict[str, Any] = Factory(dict)
    """Settings so far, nested, for `structure_config`."""
    lost: list[str] = Factory(list)
    """Flags that have no effect, and why."""
    changed: list[str] = Factory(list)
    """Flags that mean something else here, and the difference."""

    def value(self, name: str, default: Any = None) -> Any:
        """Returns the value of a flag.

        Raises:
            ConfigurationError: it is not of the flag's kind.
        """
        given = self.options.get(name)
        return default if given is None else read_values(FLAGS[name], given)

    def asks(self, name: str) -> bool:
        """Returns whether a flag was given with a value that turns something on."""
        given = self.options.get(name)
        if given is None:
            return False
        flag = FLAGS[name]
        return read_values(flag, given) is not False and given.values not in [(idle,) for idle in flag.idle]

    def set(self, name: str, value: Any) -> None:
        """Sets one of our settings."""
        *sections, key = name.split(".")
        branch = self.settings
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[key] = value

    def lose(self, name: str, reason: str) -> None:
        """Notes that a flag has no effect, if it was given."""
        if name in self.options:
            self.lost.append(f"{self.options[name]}: {reason}")

    def change(self, name: str, difference: str) -> None:
        """Notes that a flag means something else here, if it was given."""
        if name in self.options:
            self.changed.append(f"{self.options[name]}: {difference}")

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
    def kl_coef(self) -> float:
        """The weight of KL; 0 loads no reference."""
        return float(self.value("algo.kl.init_coef", 0.01))

    @property
    def reward_model(self) -> str | None:
        """The reward model that OpenRLHF loads, the first if there are several."""
        outside = {"reward.remote_url", "train.agent_func_path"} & set(self.options)
        names = None if outside else self.value("reward.model_name_or_path")
        return names and str(names).split(",")[0]
