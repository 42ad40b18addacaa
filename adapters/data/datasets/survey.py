"""Survey of every row before the first step: finds rows that cannot be read, and prompts that are too long.

Invariant: after a survey without an error, each kept row becomes a prompt within the limit. Does not own: making
prompts (`PromptBuilder`).
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import structlog
from attrs import field, frozen

from rollgrad.adapters.data.datasets.prompt_builder import Draft, PromptBuilder
from rollgrad.adapters.data.passing import passing
from rollgrad.application.foreign import foreign_code
from rollgrad.application.settings.sections.data import DataConfig, Overlong
from rollgrad.application.settings.sections.images import FetchImages
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import DataError

log = structlog.get_logger(__name__)

BATCH = 512
"""Rows tokenised together: enough for the tokenizer's threads, and few enough for a smooth bar."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
NAMED = 20
"""Numbers of rows that an error lists."""
LARGE = 2000
"""Number of rows from which on a survey takes seconds, so that a terminal gets a progress bar: 0.2 to 0.5 ms of
processor time a row."""


class Rows(Protocol):
    """A dataset by index: a `datasets.Dataset`, or a list of mappings."""

    def __len__(self) -> int:
        """Returns the number of rows."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Returns row `index`."""
        ...


@frozen
class Survey:
    """Result of a survey."""

    setting: str
    """Setting that names the dataset."""
    lengths: tuple[int, ...]
    """Tokens of each row's prompt."""
    limit: int
    """Tokens of the longest prompt that is kept."""
    fingerprint: str
    """Sha256 of all rows in their order, which does not depend on the name."""
    told: tuple[int, ...] = ()
    """Tokens that a teacher reads in the place of each row's prompt; empty if it reads the prompt."""
    texts: frozenset[int] = field(default=frozenset(), eq=False, repr=False)
    """Hashes, valid in this process, of the prompts that are texts alone."""
    tasks: frozenset[int] = field(default=frozenset(), eq=False, repr=False)
    """Hashes of the whole rows of these prompts."""
    datasources: frozenset[str] = frozenset()
    """Names of the datasets of all rows."""
    plain: int = 0
    """Number of prompts that are texts alone."""

    def repeated(self, *, whole: bool = False) -> int:
        """Returns how many rows have the text of an earlier one, or if `whole` all columns; those with images are not
        compared."""
        return self.plain - len(self.tasks if whole else self.texts)

    def has(self, prompt: Prompt, *, whole: bool = False) -> bool:
        """Returns whether a row has the text of a prompt, or if `whole` all columns of its row; unknown, and so false,
        of one with images."""
        found = hash(_task(prompt.metadata)) in self.tasks if whole else hash(prompt.text) in self.texts
        return not prompt.images and found

    def keeps(self, index: int) -> bool:
        """Returns whether row `index` is kept."""
        return self.lengths[index] <= self.limit

    @property
    def kept(self) -> int:
        """Number of kept rows."""
        return sum(self.keeps(index) for index in range(len(self.lengths)))

    @property
    def longest(self) -> int:
        """Number of tokens of the longest kept prompt."""
        return max(length for index, length in enumerate(self.lengths) if self.keeps(index))

    @property
    def longest_told(self) -> int:
        """Number of tokens that a teacher reads in the place of the longest kept prompt that it reads; 0 if it reads
        the prompts."""
        return max((length for index, length in enumerate(self.told) if self.keeps(index)), default=0)


@runtime_checkable
class Surveyed(Protocol):
    """A source of prompts that were surveyed."""

    @property
    def survey(self) -> Survey:
        """Returns the survey."""
        ...


def survey(rows: Rows, size: int, builder: PromptBuilder, *, setting: str) -> Survey:
    """Measures the first `size` rows, and reports those that are dropped; `setting` names the dataset.

    Raises:
        DataError: rows cannot become prompts (the first is named), all are too long, or one is and that is an error.
    """
    with foreign_code(lambda words: DataError(f"Row 1 of {setting} cannot be read: {words}")):
        first = rows[0]
    builder.columns(first, datasource_of(first))
    found = _Findings(rows, builder, setting)
    doing = f"measuring {size:,} prompts of {setting}"
    for start in passing(range(0, size, BATCH), doing, size, bar_from=LARGE, rows=BATCH):
        found.read(range(start, min(start + BATCH, size)))
    if found.broken:
        raise DataError(found.refusal(size))
    result = found.survey()
    if found.answered:
        log.warning(
            f"{found.answered} of {size} prompts of {setting} end with an assistant's message, so that the model reads "
            "a reply before it writes its own: end them with what it is to answer, such as the user's message"
        )
    _report(result, builder.data)
    return result


class _Findings:
    """Findings about rows, which are read in batches."""

    def __init__(self, rows: Rows, builder: PromptBuilder, setting: str) -> None:
        self._rows = rows
        self._builder = builder
        self._setting = setting
        self._lengths: dict[int, int] = {}
        self._told: list[int] = []
        self._texts: set[int] = set()
        self._tasks: set[int] = set()
        self._datasources: set[str] = set()
        self._plain = 0
        self.answered = 0
        """Number of conversations that end with a reply."""
        self._content = hashlib.sha256()
        self.broken: dict[int, str] = {}
        """Why a row cannot be used, by its number from 1."""

    def read(self, indices: Sequence[int]) -> None:
        """Reads and measures rows."""
        if self._builder.data.fetch_images is not FetchImages.NEVER:
            with suppress(DataError), foreign_code(DataError):  # a row that cannot be read is named below
                self._builder.fetch_ahead(self._rows[index] for index in indices)
        drafts: dict[int, Draft] = {}
        for index in indices:
            try:
                draft = self._draft(index)
                if draft.has_images:  # at once: their files are large, and the processor may refuse them
                    (self._lengths[index],) = self._builder.lengths([draft])
                else:
                    drafts[index] = draft
            except DataError as error:
                self.broken[index + 1] = f"Row {index + 1} of {self._setting} cannot be used: {error}"
        self._lengths |= zip(drafts, self._builder.lengths([*drafts.values()]), strict=True)
        self._told += self._builder.told_lengths([*drafts.values()])

    def _draft(self, index: int) -> Draft:
        with foreign_code(DataError):  # a dataset decodes its pictures when a row is read
            row = self._rows[index]
        task = _task(row)
        self._content.update(task.encode())
        datasource = datasource_of(row)
        self._datasources.add(datasource)
        draft = self._builder.draft(row, datasource)
        self.answered += bool(draft.messages) and draft.messages[-1].get("role") == "assistant"
        if not draft.has_images:
            self._plain += 1
            self._tasks.add(hash(task))
            self._texts.add(hash(draft.written if isinstance(draft.written, str) else draft.written.text))
        return draft

    def refusal(self, size: int) -> str:
        """Returns what is wrong with the first row that cannot be used, and which of `size` rows cannot be, either."""
        numbers = sorted(self.broken)
        told = self.broken[numbers[0]]
        if len(numbers) == 1:
            return told
        named = ", ".join(map(str, numbers[:NAMED])) + (" ..." if len(numbers) > NAMED else "")
        return f"{told} ({len(numbers)} of {size} rows cannot be used: {named}. Mend them or leave them out.)"

    def survey(self) -> Survey:
        """Returns the survey of all rows, if none of them is broken."""
        return Survey(
            setting=self._setting,
            lengths=tuple(self._lengths[index] for index in range(len(self._lengths))),
            limit=self._builder.data.prompt_limit,
            fingerprint=self._content.hexdigest(),
            told=tuple(self._told),
            texts=frozenset(self._texts),
            tasks=frozenset(self._tasks),
            datasources=frozenset(self._datasources),
            plain=self._plain,
        )


def repeated(prompts: Sequence[Prompt], *, whole: bool = False) -> int:
    """Returns how many of `prompts` repeat an earlier one, as `Survey.repeated` counts them."""
    plain = [prompt for prompt in prompts if not prompt.images]
    return len(plain) - len({hash(_task(prompt.metadata) if whole else prompt.text) for prompt in plain})


def rows_fingerprint(prompts: Iterable[Prompt], *, named: bool = True) -> str:
    """Returns the sha256 of the rows that prompts are made of, in their order, and if `named` of the datasets they are
    from, whose names may be those of files."""
    content = hashlib.sha256()
    for prompt in prompts:
        row = {"datasource": prompt.datasource, **prompt.metadata}
        content.update((_stable_text(row) if named else _task(row)).encode(errors="replace"))
    return content.hexdigest()


def _task(row: Mapping[str, Any]) -> str:
    """Returns a text of all that a row says, but for the dataset that it is from."""
    return _stable_text({key: value for key, value in row.items() if key != "datasource"})


def _stable_text(value: Any) -> str:
    """Returns a text of a value that is the same in each process. The order of sets differs between processes, and so
    does the text of objects that contains their address (say, images of a column that is not read)."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_stable_text(key)}:{_stable_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_stable_text, value))}]"
    if isinstance(value, set | frozenset):
        return f"<{','.join(sorted(map(_stable_text, value)))}>"
    return _ADDRESS.sub("", repr(value))


def datasource_of(row: Mapping[str, Any]) -> str:
    """Returns the name of the dataset that a row comes from."""
    return str(row.get("datasource", "default"))


def _report(found: Survey, data: DataConfig) -> None:
    size, setting = len(found.lengths), found.setting
    dropped = size - found.kept
    if not dropped:
        return
    flag = "--data.max_prompt_tokens" if data.max_len is None or data.max_prompt_tokens else "--data.max_len"
    longest = max(range(size), key=found.lengths.__getitem__)
    if dropped == size or data.overlong is Overlong.ERROR:
        first = next(index for index in range(size) if not found.keeps(index))
        raise DataError(
            f"{dropped} of the {size} prompts of {setting} have more than {found.limit} tokens (row {first + 1} is the "
            f"first, row {longest + 1} the longest with {found.lengths[longest]}): raise {flag}"
            + (", or shorten them." if dropped == size else ", or let them be dropped with --data.overlong drop.")
        )
    log.warning(
        "over-long prompts dropped",
        setting=setting,
        dropped=dropped,
        of=size,
        limit=found.limit,
        longest=found.lengths[longest],
        flag=flag,
    )
