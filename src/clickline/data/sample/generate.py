"""`clickline sample`: generates a synthetic click log of any length.

    plan ──▶ parts (train and eval, or hours) ──▶ blocks of rows, generated and formatted in threads
                                                      └──▶ log file, truth file, AUC, in row order

Files have temporary names until they are complete.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clickline.data.input_blocks import map_in_order
from clickline.data.sample.click_model import START, ClickModel, build_model, generate_rows
from clickline.data.sample.text_formats import FORMATS, PADDLEREC_SCALES, TextFormat
from clickline.data.sample.truth import AucCounter, TruthFile
from clickline.errors import ConfigError, Mistake, StorageError
from clickline.machine import cores
from clickline.progress import Progress

_SPAN = 30
"""Hours that train and eval cover together: with the default share, a day and the six hours after it."""
_BLOCK_ROWS = 8192
_BLOCK_BYTES = 8 << 20
_THREADS = 8  # more would only wait for the writer


@dataclass(frozen=True)
class SampleOptions:
    """What to generate. The same options give the same bytes on every machine."""

    format: str  # criteo, slots, paddlerec or csv
    rows: int
    out: Path
    hours: int | None = None  # folders YYYYMMDD/HH instead of train and eval
    seed: int = 0
    slots: int = 26
    dense: int = 13
    cardinality: int = 100_000  # ids of the largest slot, without those born later
    eval_share: float = 0.2


@dataclass(frozen=True)
class SampleReport:
    """What was generated. With hours, the eval rows are those of the last hour."""

    files: list[Path]  # logs in order of time, then slot.conf if the format has one
    train_rows: int
    eval_rows: int
    click_rate: float  # of all rows
    best_auc: float | None  # of the true probabilities on the eval rows; None if these have only one label
    seconds: float


@dataclass(frozen=True)
class _LogPart:
    """One log file: its rows, and the files beside it."""

    log: Path
    truth: Path
    first: int
    end: int
    is_eval: bool
    donefile: Path | None = None


_Block = tuple[_LogPart, int, int]
"""First row and end of a block, with the part that it belongs to."""


@dataclass(frozen=True)
class _GeneratedRows:
    """A block of generated rows: their text, click probabilities and clicks."""

    text: NDArray[np.uint8]
    probability_B: NDArray[np.float64]
    clicks_B: NDArray[np.int8]


def generate(
    options: SampleOptions, progress: Progress, *, block_rows: int | None = None, threads: int | None = None
) -> SampleReport:
    """Write the log. `block_rows` and `threads` affect the speed, but not the output."""
    _check(options)
    started = time.perf_counter()
    try:
        return _generate(options, progress, block_rows, threads, started)
    except OSError as error:
        raise StorageError(
            f"cannot write the sample under {options.out}: {error}. "
            "Free some space, check the permissions, or choose another --out."
        ) from error


def _generate(
    options: SampleOptions, progress: Progress, block_rows: int | None, threads: int | None, started: float
) -> SampleReport:
    text_format = FORMATS[options.format]
    parts = _plan(options, text_format)
    _check_files(parts)
    progress.begin("sample", total_rows=options.rows)
    model = build_model(
        options.seed, options.slots, options.dense, options.cardinality, options.hours or _SPAN
    )
    options.out.mkdir(parents=True, exist_ok=True)
    if options.hours is not None:
        _clear_hours(options.out)

    files = [part.log for part in parts]
    counter = AucCounter()
    clicks = 0
    header = text_format.header(options.dense, options.slots)
    with (
        _TemporaryFiles() as temporaries,
        closing(_row_blocks(options, model, text_format, parts, block_rows, threads)) as blocks,
    ):
        if text_format.slot_conf is not None:
            files.append(options.out / "slot.conf")
            temporaries.begin(files[-1]).write_bytes(text_format.slot_conf(options.dense, options.slots))
        for part, generated in groupby(blocks, key=lambda pair: pair[0][0]):
            with (
                temporaries.begin(part.log).open("wb") as log,
                TruthFile(temporaries.begin(part.truth)) as truth,
            ):
                log.write(header)
                for _, rows in generated:
                    log.write(rows.text.data)
                    truth.add(rows.probability_B, rows.clicks_B)
                    if part.is_eval:
                        counter.add(rows.probability_B, rows.clicks_B)
                    clicks += int(rows.clicks_B.sum())
                    progress.advance(rows=rows.clicks_B.size, size=rows.text.size)
            if part.donefile is not None:
                temporaries.finish()
                part.donefile.touch()
        temporaries.finish()
    progress.end()

    eval_rows = sum(part.end - part.first for part in parts if part.is_eval)
    return SampleReport(
        files=files,
        train_rows=options.rows - eval_rows,
        eval_rows=eval_rows,
        click_rate=clicks / options.rows,
        best_auc=counter.auc(),
        seconds=time.perf_counter() - started,
    )


def _plan(options: SampleOptions, text_format: TextFormat) -> list[_LogPart]:
    out, rows, extension = options.out, options.rows, text_format.extension
    if options.hours is None:
        first_eval = rows - _eval_rows(options)
        return [
            _LogPart(out / f"train.{extension}", out / "train.truth.parquet", 0, first_eval, is_eval=False),
            _LogPart(out / f"eval.{extension}", out / "eval.truth.parquet", first_eval, rows, is_eval=True),
        ]
    parts = []
    for hour in range(options.hours):
        moment = datetime.fromtimestamp(START + 3600 * hour, UTC)
        folder = out / f"{moment:%Y%m%d}" / f"{moment:%H}"
        parts.append(
            _LogPart(
                log=folder / f"part-00000.{extension}",
                truth=out / "truth" / f"{moment:%Y%m%d-%H}.parquet",
                first=hour * rows // options.hours,
                end=(hour + 1) * rows // options.hours,
                is_eval=hour == options.hours - 1,
                donefile=folder / "donefile",
            )
        )
    return parts


def _eval_rows(options: SampleOptions) -> int:
    return int(options.rows * options.eval_share)


def _clear_hours(out: Path) -> None:
    """Remove the hours of an earlier sample, known by their truth files: some may not be written again.

    The donefile is removed first, so that no process takes a folder for complete while it is emptied.
    """
    for truth in sorted((out / "truth").glob("????????-??.parquet")):
        date, _, hour = truth.stem.partition("-")
        folder = out / date / hour
        (folder / "donefile").unlink(missing_ok=True)
        for extension in sorted({text_format.extension for text_format in FORMATS.values()}):
            (folder / f"part-00000.{extension}").unlink(missing_ok=True)
        truth.unlink()


class _TemporaryFiles(AbstractContextManager["_TemporaryFiles"]):
    """Files being written under temporary names. They are renamed together, or removed."""

    def __init__(self) -> None:
        self._finals: dict[Path, Path] = {}

    def begin(self, final: Path) -> Path:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = final.with_name(f".{final.name}.partial")
        self._finals[temporary] = final
        return temporary

    def finish(self) -> None:
        for temporary, final in self._finals.items():
            temporary.replace(final)
        self._finals.clear()

    def __exit__(self, *_: object) -> None:
        for temporary in self._finals:
            temporary.unlink(missing_ok=True)


def _row_blocks(
    options: SampleOptions,
    model: ClickModel,
    text_format: TextFormat,
    parts: Sequence[_LogPart],
    block_rows: int | None,
    threads: int | None,
) -> Generator[tuple[_Block, _GeneratedRows], None, None]:
    """The rows of all parts in order, generated ahead of the writer by a few threads."""
    line_bytes = (
        text_format.line_bytes
        + options.dense * text_format.dense_bytes
        + options.slots * text_format.slot_bytes
    )
    step = block_rows or max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // line_bytes))

    def generate_block(number: int, block: _Block) -> _GeneratedRows:
        _, first, end = block
        size = end - first
        ids_BS = np.empty((size, options.slots), np.int64)
        dense_BD = np.empty((size, options.dense), np.int64)
        times_B = np.empty(size, np.int64)
        probability_B = np.empty(size, np.float64)
        clicks_B = np.empty(size, np.int8)
        generate_rows(model, options.rows, first, ids_BS, dense_BD, times_B, probability_B, clicks_B)
        text = np.empty(size * line_bytes, np.uint8)
        length = text_format.write(clicks_B, times_B, dense_BD, ids_BS, text)
        return _GeneratedRows(text[:length], probability_B, clicks_B)

    generate_block(0, (parts[0], 0, 0))  # compile here, where Ctrl-C works, not in a thread
    blocks = (
        (part, first, min(first + step, part.end))
        for part in parts
        for first in range(part.first, part.end, step)
    )
    return map_in_order(generate_block, blocks, threads or min(cores(), _THREADS))


def _check_files(parts: Sequence[_LogPart]) -> None:
    """Never overwrite logs without a truth file beside them: they are not ours."""
    for part in parts:
        if part.log.exists() and not part.truth.exists():
            problem = f"would overwrite {part.log}, which `clickline sample` did not write."
            raise ConfigError(
                [Mistake("sample", 0, "--out", problem, "Choose another folder, or move the file away.")]
            )


def _check(options: SampleOptions) -> None:
    """Raise a ConfigError with all mistakes in the options."""
    mistakes: list[Mistake] = []

    def mistake(key: str, problem: str, remedy: str) -> None:
        mistakes.append(Mistake(file="sample", line=0, key=key, problem=problem, remedy=remedy))

    def out_of_range(key: str, value: float, low: int, high: int) -> bool:
        if low <= value <= high:
            return False
        mistake(key, f"is {value}.", f"Give a number from {low} to {high}.")
        return True

    if options.format not in FORMATS:
        mistake("--format", f"is {options.format!r}.", f"Choose one of {', '.join(FORMATS)}.")
    few_rows = out_of_range("--rows", options.rows, 2, 10**12)
    if not 0 < options.eval_share < 1:
        mistake("--eval-share", f"is {options.eval_share}.", "Give a number between 0 and 1, such as 0.2.")
    elif options.hours is None and not few_rows and not 0 < _eval_rows(options) < options.rows:
        empty = "train" if _eval_rows(options) else "eval"
        mistake(
            "--rows",
            f"is {options.rows}: with --eval-share {options.eval_share} no row is left for {empty}.",
            "Raise --rows or move --eval-share towards 0.5.",
        )
    if (
        options.hours is not None
        and not out_of_range("--hours", options.hours, 1, 8760)
        and not few_rows
        and options.rows < options.hours
    ):
        mistake(
            "--rows",
            f"is {options.rows}, fewer than the {options.hours} hours.",
            "Raise --rows or lower --hours: every hour needs a row.",
        )
    out_of_range("--seed", options.seed, 0, 2**63 - 1)
    out_of_range("--cardinality", options.cardinality, 10, 10**8)
    if options.format == "criteo":
        remedy = "Leave it out, or choose --format slots, paddlerec or csv."
        if options.slots != 26:
            mistake("--slots", f"is {options.slots}; a criteo line has exactly 26 slots.", remedy)
        if options.dense != 13:
            mistake("--dense", f"is {options.dense}; a criteo line has exactly 13 dense fields.", remedy)
    else:
        out_of_range("--slots", options.slots, 1, 1000)
        if options.format == "paddlerec" and options.dense > len(PADDLEREC_SCALES):
            mistake(
                "--dense",
                f"is {options.dense}; paddlerec scales are known for 13 dense fields.",
                "Give a number from 0 to 13, or choose --format slots or csv.",
            )
        else:
            out_of_range("--dense", options.dense, 0, 1000)
    if options.out.exists() and not options.out.is_dir():
        mistake(
            "--out",
            f"is {options.out}, which is a file.",
            "Name a folder; it is created if it does not exist.",
        )
    if mistakes:
        raise ConfigError(mistakes)
