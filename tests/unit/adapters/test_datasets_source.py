"""DatasetPromptSource: order, limits and positions of another dataset."""

from typing import Any

import pytest

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.datasets.prompt_builder import PromptBuilder
from rollgrad.adapters.data.datasets.source import DatasetPromptSource
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.domain.errors import DataError


@pytest.fixture
def builder(tiny_tokenizer: Any) -> PromptBuilder:
    return PromptBuilder(TemplateCodec(tiny_tokenizer), DataConfig(apply_chat_template=False))


def rows(size: int) -> list[dict[str, str]]:
    return [{"input": str(index), "datasource": f"set{index % 2}"} for index in range(size)]


def test_all_prompts_in_file_order_leave_the_position_alone(builder: PromptBuilder) -> None:
    source = DatasetPromptSource(rows(3), builder, seed=1)
    source.take(2)
    before = source.state_dict()
    assert [(p.text, p.datasource) for p in source.prompts()] == [("0", "set0"), ("1", "set1"), ("2", "set0")]
    assert source.state_dict() == before


def test_max_samples_keeps_the_first(builder: PromptBuilder) -> None:
    source = DatasetPromptSource(rows(9), builder, seed=0, max_samples=4)
    assert len(source) == 4
    assert sorted(p.text for p in source.take(4)) == ["0", "1", "2", "3"]


def test_another_seed_is_another_order(builder: PromptBuilder) -> None:
    orders = {tuple(p.text for p in DatasetPromptSource(rows(8), builder, seed=s).take(8)) for s in range(5)}
    assert len(orders) == 5


@pytest.mark.parametrize(("size", "max_samples"), [(0, None), (3, 0)])
def test_no_prompts_are_an_error(builder: PromptBuilder, size: int, max_samples: int | None) -> None:
    with pytest.raises(DataError, match="at least one prompt"):
        DatasetPromptSource(rows(size), builder, seed=0, max_samples=max_samples)


def test_a_position_beyond_the_end_is_refused(builder: PromptBuilder) -> None:
    long, short = (DatasetPromptSource(rows(size), builder, seed=0) for size in (9, 3))
    long.take(5)
    with pytest.raises(DataError, match=r"stopped at row 5 .* only 3"):
        short.load_state_dict(long.state_dict())
