"""`PreparedSteps`: prepared data as solutions with labelled steps."""

from attrs import frozen

from rollgrad.adapters.data.examples.preparation import PreparedExamples
from rollgrad.domain.episodes.examples import StepLabels


@frozen(eq=False)
class PreparedSteps:
    """The solutions of a data set, by index: weights above 0 are 1 + the label of the step that ends there."""

    examples: PreparedExamples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> StepLabels:
        example = self.examples[index]
        (solution,) = example.branches
        ends_K = solution.weights_T.nonzero()[:, 0]
        return StepLabels(
            token_ids_T=solution.token_ids_T,
            ends=ends_K.tolist(),
            labels=(solution.weights_T[ends_K] - 1).tolist(),
            row=example.row,
            weight=example.weight,
        )
