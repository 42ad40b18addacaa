"""vLLM computes models of several types with the weights that the trainer pushes.

`scripts/vllm_table.py` examines all that docs/models.md names.
"""

import pytest

from tests.vllm_sweep import TYPES, examine, rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.usefixtures("vllm_host")
@pytest.mark.parametrize(
    "name",
    [
        *("gpt_oss", "falcon_h1", "minimax_m2", "deepseek_v3"),
        *(pytest.param(each, marks=pytest.mark.wide) for each in ("glm4_moe", "lfm2_moe", "qwen3_next")),
    ],
)
def test_a_type_takes_weights_as_the_table_says(name: str) -> None:
    """A loader that turns matrices, one that computes, one without a name, and numbers that are no parameters; layers
    with states of three kinds; matrices that are taken out of weights; what is repaired on a CPU."""
    finding = examine(name)
    assert finding.exact, finding
    assert finding.row == rows()[name], "run scripts/vllm_table.py"


def test_the_table_has_every_type_that_is_examined() -> None:
    assert [*rows()] == [*TYPES], "run scripts/vllm_table.py"
