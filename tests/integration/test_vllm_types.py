"""vLLM computes models of several types with the weights that the trainer pushes.

`scripts/vllm_table.py` examines all that docs/models.md names.
"""

import pytest

from tests.model_sweep import TABLE
from tests.vllm_sweep import HEAD, TYPES, examine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def rows() -> dict[str, str]:
    table = TABLE.read_text(encoding="utf-8").partition(HEAD)[2].partition("\n\n")[0]
    return {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()[1:]}


@pytest.mark.usefixtures("vllm_host")
@pytest.mark.parametrize("name", ["gpt_oss", "falcon_h1", pytest.param("glm4_moe", marks=pytest.mark.wide)])
def test_a_type_takes_weights_as_the_table_says(name: str) -> None:
    """A loader that turns matrices, one that computes, and numbers that are no parameters; layers with states."""
    finding = examine(name)
    assert finding.exact, finding
    assert finding.row == rows()[name], "run scripts/vllm_table.py"


def test_the_table_has_every_type_that_is_examined() -> None:
    assert [*rows()] == [*TYPES], "run scripts/vllm_table.py"
