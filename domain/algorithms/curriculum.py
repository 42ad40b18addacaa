"""Curriculum by pass rate: most visits to prompts that the policy always or never solves are skipped."""

from collections.abc import Mapping

from attrs import evolve, field, frozen


@frozen(kw_only=True)
class Curriculum:
    """Pass rates of the prompts seen so far, and the rule by which prompts are skipped.

    A prompt whose latest mean score lies outside `limits` is played only every `revisit`-th time it comes up. Prompts
    not yet seen are never skipped. `rates`: latest mean score by prompt; `skips`: times skipped in a row."""

    limits: tuple[float, float]
    revisit: int = 8
    rates: Mapping[str, float] = field(factory=dict)
    skips: Mapping[str, int] = field(factory=dict)

    def record(self, prompt: str, score: float) -> "Curriculum":
        """Returns the curriculum with the mean score of the prompt's latest group."""
        return evolve(self, rates={**self.rates, prompt: score}, skips={**self.skips, prompt: 0})

    def draw(self, prompt: str) -> tuple[bool, "Curriculum"]:
        """Returns whether to play the prompt now, and the curriculum after that."""
        rate = self.rates.get(prompt)
        if rate is None or self.limits[0] <= rate <= self.limits[1]:
            return True, self
        skipped = self.skips.get(prompt, 0) + 1
        play = skipped >= self.revisit
        return play, evolve(self, skips={**self.skips, prompt: 0 if play else skipped})

    def state_dict(self) -> dict[str, Mapping[str, float]]:
        """Returns the scores and skips of the prompts seen so far, JSON-serialisable."""
        return {"rates": dict(self.rates), "skips": dict(self.skips)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> "Curriculum":
        """Returns this curriculum with the scores and skips of `state`."""
        skips = {prompt: int(count) for prompt, count in state["skips"].items()}
        return evolve(self, rates=dict(state["rates"]), skips=skips)
