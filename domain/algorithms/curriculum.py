"""Curriculum by pass rate: prompts that the policy always or never solves are mostly passed over."""

from collections.abc import Mapping

from attrs import evolve, field, frozen


@frozen(kw_only=True)
class Curriculum:
    """`limits`: a prompt whose latest mean score lies outside is skipped, but for every `revisit`-th time it comes up.
    Prompts not yet seen are never skipped. `rates`: latest mean score by prompt; `skips`: times skipped in a row."""

    limits: tuple[float, float]
    revisit: int = 8
    rates: Mapping[str, float] = field(factory=dict)
    skips: Mapping[str, int] = field(factory=dict)

    def record(self, prompt: str, score: float) -> "Curriculum":
        """With the mean score of the prompt's latest group."""
        return evolve(self, rates={**self.rates, prompt: score}, skips={**self.skips, prompt: 0})

    def draw(self, prompt: str) -> tuple[bool, "Curriculum"]:
        """(whether to play the prompt now, the curriculum after that)."""
        rate = self.rates.get(prompt)
        if rate is None or self.limits[0] <= rate <= self.limits[1]:
            return True, self
        skipped = self.skips.get(prompt, 0) + 1
        play = skipped >= self.revisit
        return play, evolve(self, skips={**self.skips, prompt: 0 if play else skipped})

    def state_dict(self) -> dict[str, Mapping[str, float]]:
        """What has been seen, JSON-serialisable."""
        return {"rates": dict(self.rates), "skips": dict(self.skips)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> "Curriculum":
        """This curriculum with what `state` has seen."""
        skips = {prompt: int(count) for prompt, count in state["skips"].items()}
        return evolve(self, rates=dict(state["rates"]), skips=skips)
