"""Preparation: every row of a dataset once to tokens and weights, before the first step, and kept for later runs.

Invariants: a row becomes an example or is counted under a reason. The key of the cache holds all that tokens depend on
(rows, tokenizer, template and its variables, settings, this module's `VERSION`), so that old tokens are never found
after a change. Does not own: what rows say (`formats`), nor how templates write (`adapters/chat/training_text`).
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import date
from pathlib import Path
from typing import Any

import numpy
import structlog
from attrs import asdict

from rollgrad.adapters.chat.image_marks import listed_images
from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.chat.training_text import TokenBranch, shared_prompt
from rollgrad.adapters.data.datasets.columns import has_value, value_at
from rollgrad.adapters.data.examples.prepared import PreparedExamples
from rollgrad.adapters.data.examples.preparer import PreparationSettings, PreparedRow, Preparer, Refusal
from rollgrad.adapters.data.examples.recognition import ReadingSettings
from rollgrad.adapters.data.examples.report import DataReport
from rollgrad.adapters.data.examples.rows import overlong_row
from rollgrad.adapters.data.examples.sources import Mixture
from rollgrad.adapters.data.passing import passing
from rollgrad.application.settings.sections.examples import ExampleFormat, LongRows
from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.errors import DataError

log = structlog.get_logger(__name__)

VERSION = 5
"""Raised when the same rows and settings become other tokens."""
CHUNK = 256
"""Rows handed to a process together."""
LARGE = 1000
"""Rows from which a terminal is shown a progress bar."""
ARRAYS: Mapping[str, Any] = {
    "tokens": numpy.int32,  # of all branches, end to end, and so are weights
    "weights": numpy.float32,
    **dict.fromkeys(("lengths", "prompt_lengths", "branch_counts", "rows"), numpy.int64),
    **dict.fromkeys(("row_weights", "margins"), numpy.float32),
    "labels": bool,
}
"""The arrays of prepared data, and the types of their numbers."""
REPORT_FILE = "report.json"


def prepare_examples(
    mixture: Mixture,
    tokenizer: Any,
    settings: PreparationSettings,
    *,
    cache_dir: Path | None,
    num_workers: int = 1,
    setting: str = "data.dataset",
    images: ImageRenderer | None = None,
) -> PreparedExamples:
    """Prepares all rows, or finds them prepared. Rows with images are never found, for their files may have changed.

    Args:
        mixture: the rows.
        tokenizer: a transformers tokenizer with its chat template.
        settings: how rows become tokens.
        cache_dir: where prepared data are kept; None keeps none.
        num_workers: processes; 1 is this one.
        setting: names the data in errors.
        images: renders the images of rows, in this process; None where no row has any.

    Raises:
        DataError: rows are too long, and that is an error; or a process died.
        ConfigurationError: the tokenizer has no chat template, or cannot say where its tokens lie.
    """
    day = date.today().isoformat() if writes_date(tokenizer) else None
    origin = cache_key(mixture, tokenizer, settings)
    key = origin if day is None else cache_key(mixture, tokenizer, settings, day=day)
    if images is not None:
        return _with_images(mixture, Preparer(tokenizer, settings, images), settings, setting, (origin, key, day))
    place = None if cache_dir is None else cache_dir / key
    if place is not None and (found := _load(place)) is not None:
        return PreparedExamples(**found, fingerprint=key, origin=origin, written_on=day)
    results = _results(mixture, tokenizer, settings, num_workers)
    arrays, report = _prepare_all(mixture, results, settings, setting)
    if place is not None:
        _save(arrays, report, place)
    return PreparedExamples(**arrays, report=report, fingerprint=key, origin=origin, written_on=day)


def writes_date(tokenizer: Any) -> bool:
    """Returns whether the chat template writes the date, so that it writes other tokens tomorrow."""
    return "strftime_now" in json.dumps(tokenizer.chat_template)


def cache_key(mixture: Mixture, tokenizer: Any, settings: PreparationSettings, *, day: str | None = None) -> str:
    """Returns a hash of all that the tokens depend on; `day` is the date that the template writes."""
    template = tokenizer.chat_template
    backend = getattr(tokenizer, "backend_tokenizer", None)
    reading = {key: value for key, value in asdict(settings.reading).items() if key not in ("known_role", "fetched")}
    parts = {
        "version": VERSION,
        "rows": mixture.fingerprint,
        "tokenizer": hashlib.sha256((backend.to_str() if backend else repr(tokenizer)).encode()).hexdigest(),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": template,
        "template_kwargs": dict(settings.template_kwargs),
        "reading": reading,
        "max_tokens": settings.max_tokens,
        "overlong": settings.overlong,
        "date": day,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _with_images(
    mixture: Mixture,
    preparer: Preparer,
    settings: PreparationSettings,
    setting: str,
    keys: tuple[str, str, str | None],
) -> PreparedExamples:
    """Returns the examples of rows with images. Their fingerprints are of the images, too, which are not kept: they are
    read again when an example is taken."""
    digests: list[str] = []

    def results() -> Iterator[PreparedRow | Refusal]:
        for index in range(len(mixture)):  # one at a time, for the tensors of images take megabytes
            if index % CHUNK == 0:
                _fetch_ahead(mixture, range(index, min(index + CHUNK, len(mixture))), settings.reading)
            (result,) = _prepared(preparer, [_read(mixture, index)])
            digests.append("" if isinstance(result, Refusal) else _digest(result.branches))
            yield result

    def read_again(index: int) -> Sequence[PlacedImages]:
        row, kind = _read(mixture, index)
        if isinstance(row, RowError):
            raise row
        branches = preparer.prepare(row, kind).branches
        if _digest(branches) != digests[index]:
            source, number = mixture.source(index)
            raise DataError(
                f"{source.place(number)}: the files of its images have changed since the run began. Start again."
            )
        return [branch.images for branch in branches]

    arrays, report = _prepare_all(mixture, results(), settings, setting)
    origin, key, day = keys
    fingerprint, origin = (hashlib.sha256(f"{each} {digests}".encode()).hexdigest()[:32] for each in (key, origin))
    return PreparedExamples(
        **arrays, report=report, fingerprint=fingerprint, origin=origin, written_on=day, read_again=read_again
    )


def _fetch_ahead(mixture: Mixture, indices: range, reading: ReadingSettings) -> None:
    """Fetches the images of rows that are URLs, many at the same time."""
    key = reading.image_key
    if reading.fetched is None or key is None:
        return
    rows = (_read(mixture, index)[0] for index in indices)
    images = (value_at(row, key) for row in rows if not isinstance(row, RowError) and has_value(row, key))
    reading.fetched.ahead(source for value in images for source in listed_images(value))


def _digest(branches: Sequence[TokenBranch]) -> str:
    """Returns a hash of all images of a row."""
    return hashlib.sha256(
        " ".join(placed.image.digest for branch in branches for placed in branch.images).encode()
    ).hexdigest()


def _prepare_all(
    mixture: Mixture, results: Iterable[PreparedRow | Refusal], settings: PreparationSettings, setting: str
) -> tuple[dict[str, Any], DataReport]:
    """Returns the arrays of all rows that become examples, and the report of all rows."""
    unread = sorted({column for part in mixture.parts for column in part.unread})
    report = DataReport(max_tokens=settings.max_tokens, unread=unread)
    columns: dict[str, list[Any]] = {name: [] for name in ARRAYS}
    row_lengths: list[int] = []
    doing = f"preparing {len(mixture):,} rows of {setting}"
    for index, result in enumerate(passing(results, doing, len(mixture), bar_from=LARGE)):
        report.rows += 1
        report.over_limit += result.overlong
        if isinstance(result, Refusal):
            source, number = mixture.source(index)
            if result.overlong and settings.overlong is LongRows.ERROR:
                raise overlong_row(source.place(number), result.sentence)
            report.drop(result.reason, source.place(number), result.sentence)
            continue
        _append(columns, index, result)
        row_lengths.append(sum(len(branch.token_ids) for branch in result.branches))
        report.used += 1
        report.branches += len(result.branches)
        report.branched_rows += len(result.branches) > 1 and not result.labels  # two replies are no branches
        report.trained_tokens += sum(branch.trained for branch in result.branches)
        report.notice(result.anomalies)
    report.tokens = sum(row_lengths)
    report.measure(row_lengths)
    return _arrays(columns), report


def _arrays(columns: dict[str, list[Any]]) -> dict[str, Any]:
    """Returns the arrays of columns, and empties the columns."""
    arrays = {}
    for name, kind in ARRAYS.items():
        column = columns.pop(name)  # popped, so that two copies of a column exist only while one is made
        joined = numpy.concatenate(column or [[]]) if name in ("tokens", "weights") else column
        arrays[name] = numpy.asarray(joined, dtype=kind)
    return arrays


def _append(columns: Mapping[str, list[Any]], index: int, row: PreparedRow) -> None:
    """Appends the row of that number to the columns of the arrays."""
    shared = shared_prompt(row.branches)
    for branch in row.branches:
        columns["tokens"].append(numpy.asarray(branch.token_ids, dtype=ARRAYS["tokens"]))
        columns["weights"].append(numpy.asarray(branch.weights, dtype=ARRAYS["weights"]))
        columns["lengths"].append(len(branch.token_ids))
        columns["prompt_lengths"].append(shared)
    columns["branch_counts"].append(len(row.branches))
    columns["rows"].append(index)
    columns["row_weights"].append(row.weight)
    columns["margins"].append(row.margin)
    columns["labels"].extend(row.labels or (False,) * len(row.branches))


Task = tuple[Mapping[str, Any] | RowError, ExampleFormat]


def _results(
    mixture: Mixture, tokenizer: Any, settings: PreparationSettings, num_workers: int
) -> Iterator[PreparedRow | Refusal]:
    chunks = (range(start, min(start + CHUNK, len(mixture))) for start in range(0, len(mixture), CHUNK))
    if num_workers <= 1 or len(mixture) <= CHUNK:
        preparer = Preparer(tokenizer, settings)
        for chunk in chunks:
            yield from _prepared(preparer, [_read(mixture, index) for index in chunk])
        return
    try:
        yield from _results_of_processes(mixture, chunks, (tokenizer, settings), num_workers)
    except BrokenProcessPool as error:
        raise DataError(
            "A process that prepares data died: memory ran out, something killed it, or it ran your script again, as "
            f"every such process does. --data.num_workers is {num_workers}: lower it (1 is this process alone), or put "
            "what your script does below `if __name__ == '__main__':`."
        ) from error


def _results_of_processes(
    mixture: Mixture, chunks: Iterable[range], preparing: tuple[Any, PreparationSettings], num_workers: int
) -> Iterator[PreparedRow | Refusal]:
    # Not forked: the threads of tokenizers and torch do not survive that.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _begin_worker, preparing) as pool:
        waiting: list[Any] = []
        for chunk in chunks:
            waiting.append(pool.submit(_work, [_read(mixture, index) for index in chunk]))
            if len(waiting) > 2 * num_workers:  # no more rows in memory than are worked on
                yield from waiting.pop(0).result()
        for future in waiting:
            yield from future.result()


def _read(mixture: Mixture, index: int) -> Task:
    source, number = mixture.source(index)
    try:
        return source.rows[number], source.kind
    except RowError as error:
        return error, source.kind


def _prepared(preparer: Preparer, tasks: Sequence[Task]) -> list[PreparedRow | Refusal]:
    results: list[PreparedRow | Refusal] = []
    for row, kind in tasks:
        try:
            if isinstance(row, RowError):
                raise row
            results.append(preparer.prepare(row, kind))
        except RowError as error:
            overlong = error.reason in (Reason.OVERLONG, Reason.CUT)
            results.append(Refusal(error.reason, error.sentence, overlong))
    return results


_worker: Preparer | None = None


def _begin_worker(tokenizer: Any, settings: PreparationSettings) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = Preparer(tokenizer, settings)


def _work(tasks: Sequence[Task]) -> list[PreparedRow | Refusal]:
    assert _worker is not None
    return _prepared(_worker, tasks)


def _save(arrays: Mapping[str, Any], report: DataReport, place: Path) -> None:
    """Keeps prepared data, in place of a copy that could not be read. What cannot be kept is prepared again the next
    time."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        written = Path(tempfile.mkdtemp(prefix=f"{place.name}.", dir=place.parent))
        try:
            for name, array in arrays.items():
                numpy.save(written / f"{name}.npy", array)
            (written / REPORT_FILE).write_text(json.dumps(report.to_json()), encoding="utf-8")
            written.rename(place)
        finally:
            shutil.rmtree(written, ignore_errors=True)  # renamed, or left behind by an error or by another run's haste
    except OSError as error:
        if not (place / REPORT_FILE).is_file():  # else another run was faster
            log.warning("prepared data are not kept", place=str(place), reason=str(error))


def _load(place: Path) -> dict[str, Any] | None:
    """The arrays and the report that an earlier run kept; None without any, or if they are damaged."""
    if not (place / REPORT_FILE).is_file():
        return None
    try:
        arrays = {name: numpy.load(place / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        report = DataReport.from_json(json.loads((place / REPORT_FILE).read_text(encoding="utf-8")))
        whole = len(arrays["tokens"]) == len(arrays["weights"]) == int(arrays["lengths"].sum())
        if not whole or len(arrays["rows"]) != report.used:
            raise ValueError("its parts do not fit together")
    except (OSError, ValueError, TypeError, KeyError, EOFError) as error:
        log.warning("prepared data are damaged, and prepared again", place=str(place), reason=str(error))
        return None
    log.info("prepared data found", place=str(place))
    return {**arrays, "report": report}
