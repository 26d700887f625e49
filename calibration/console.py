"""What ``edge-calibrate`` shows: tables and results on stdout; progress and warnings on stderr.

rich draws on terminals and nowhere else: a pipe or a file gets plain text, whole lines only. ``-q`` and ``-v`` have set
the level of this package's logger; progress is silent where that silences information.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from calibration.agreement import Agreement
    from calibration.evaluate import Evaluation

__all__ = ["Progress", "activity", "progress", "show_evaluation", "status", "table", "warn"]

logger = logging.getLogger(__name__)


class Progress(Protocol):
    """How far a piece of work is."""

    def advance(self, steps: int = 1) -> None:
        """So many more are done."""

    def begin(self, title: str) -> None:
        """Something of unknown length begins."""


@contextmanager
def progress(title: str, total: int) -> Iterator[Progress]:
    """Show how many of ``total`` steps are done: a bar on a terminal, else a line each tenth."""
    if not logger.isEnabledFor(logging.INFO):
        yield _Silent()
    elif sys.stderr.isatty():
        yield from _bar(title, total)
    else:
        yield _Lines(title, total)


@contextmanager
def status(title: str) -> Iterator[None]:
    """Show that something of unknown length is going on; nothing where nobody watches."""
    if not (logger.isEnabledFor(logging.INFO) and sys.stderr.isatty()):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(title), _logging_above_it():
        yield


@contextmanager
def activity(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show what long work is at: a bar on a terminal, with the time that has passed; elsewhere a line for each thing.

    What is given takes what the work is at, how many steps of that are done, and how many there are, or 0.
    """
    if not logger.isEnabledFor(logging.INFO):
        yield lambda *_: None
    elif sys.stderr.isatty():
        yield from _changing_bar(title)
    else:
        told: set[str] = set()

        def tell(what: str, _done: int, _total: int) -> None:
            if what not in told:
                told.add(what)
                logger.info("%s: %s", title, what)

        yield tell


def warn(text: str) -> None:
    """Tell of something that a person should look at, on stderr."""
    logger.warning("%s", text)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout. Columns whose cells are all numbers are set flush right.

    An empty name for each column leaves the header out.
    """
    right = [bool(rows) and all(_is_number(row[index]) for row in rows) for index in range(len(columns))]
    if sys.stdout.isatty():
        _rich_table(title, columns, rows, right)
    else:
        sys.stdout.write(_plain_table(title, columns, rows, right))


def show_evaluation(evaluation: Evaluation) -> None:
    """Print what INT8 costs and how it stands to the limits; warnings first."""
    for text in evaluation.warnings:
        warn(text)
    agreed = evaluation.agreement
    rows: list[tuple[str, str, str]] = []
    if evaluation.fp32 is not None and evaluation.int8 is not None:
        rows += [
            ("mAP 0.50:0.95", f"{evaluation.fp32.map:.3f}", f"{evaluation.int8.map:.3f}"),
            ("mAP 0.50", f"{evaluation.fp32.map50:.3f}", f"{evaluation.int8.map50:.3f}"),
        ]
    if not agreed.answers:
        rows += [
            ("objects", str(agreed.reference_objects), str(agreed.candidate_objects)),
            ("before the threshold", str(agreed.reference_candidates), str(agreed.candidate_candidates)),
        ]
    title = f"{evaluation.model}: {evaluation.images} pictures"
    if rows:
        table(title, ("", "FP32", "INT8"), rows)
    columns = ("agreement with FP32", "INT8", "FP32 again")
    table(
        "" if rows else title, columns, [(name, f(agreed), f(evaluation.noise)) for name, f in _agreement_rows(agreed)]
    )
    for check in evaluation.limits:
        found = "nothing to measure" if check.found is None else f"{check.found:.4f}"
        verdict = "exceeded" if check.exceeded else "kept"
        sys.stdout.write(f"limit {check.name} {check.limit:g}: {found}, {verdict}\n")


def _agreement_rows(agreed: Agreement) -> list[tuple[str, Callable[[Agreement], str]]]:
    rows: list[tuple[str, Callable[[Agreement], str]]] = [
        ("pictures with the same answer", lambda a: f"{a.images_identical} of {a.images}"),
    ]
    if agreed.answers:
        rows += [("near-ties among the others", lambda a: str(a.borderline_flipped))]
    else:
        rows += [
            ("objects found as well", lambda a: f"{a.firm_matched} of {a.firm}{_percent(a.share)}"),
            ("objects only it finds", lambda a: str(a.new)),
            ("borderline objects flipped", lambda a: f"{a.borderline_flipped} of {a.borderline}"),
            ("IoU of boxes, mean", lambda a: _ratio(a.box_iou_sum, a.matched)),
        ]
    if agreed.masks_matched:
        rows += [
            ("IoU of masks, mean", lambda a: _ratio(a.mask_iou_sum, a.masks_matched)),
            ("IoU of all masks together", lambda a: "-" if a.mask_iou is None else f"{a.mask_iou:.4f}"),
            ("mask pixels that differ", lambda a: _ratio(a.mask_pixels_different, a.mask_pixels)),
        ]
    return [
        *rows,
        ("score difference, mean", lambda a: _ratio(a.score_difference_sum, a.score_differences)),
        ("score difference, max", lambda a: f"{a.score_difference_max:.4f}"),
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f" ({100 * share:.1f} %)"


def _ratio(total: float, number: int) -> str:
    return f"{total / number:.4f}" if number else "-"


class _Silent:
    def advance(self, steps: int = 1) -> None:
        pass

    def begin(self, title: str) -> None:
        pass


class _Lines:
    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0

    def advance(self, steps: int = 1) -> None:
        before, self._done = self._done, self._done + steps
        if 10 * self._done // self._total > 10 * before // self._total:
            logger.info("%s: %d of %d", self._title, self._done, self._total)

    def begin(self, title: str) -> None:
        logger.info("%s", title)


def _bar(title: str, total: int) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    class Bar:
        def __init__(self) -> None:
            self._task = bar.add_task(title, total=total)

        def advance(self, steps: int = 1) -> None:
            bar.advance(self._task, steps)

        def begin(self, title: str) -> None:
            bar.update(self._task, description=title)

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with RichProgress(*columns, console=Console(stderr=True)) as bar, _logging_above_it():
        yield Bar()


def _changing_bar(title: str) -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, SpinnerColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (SpinnerColumn(), "{task.description}", BarColumn(20), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar, _logging_above_it():
        task = bar.add_task(escape(title), total=None)

        def show(what: str, done: int, total: int) -> None:
            count = f" {done}/{total}" if total else ""
            bar.tasks[0].total = total or None  # update() cannot take a total away
            bar.update(task, description=escape(f"{title}: {what}{count}"), completed=done)

        yield show


@contextmanager
def _logging_above_it() -> Iterator[None]:
    """Send log lines through the stderr that rich has put in place, so that they appear above what it draws."""
    handlers = [h for h in logging.getLogger().handlers if isinstance(h, logging.StreamHandler)]
    moved = [(h, h.setStream(sys.stderr)) for h in handlers if h.stream is sys.__stderr__]
    try:
        yield
    finally:
        for handler, stream in moved:
            if stream is not None:  # None: rich has put nothing in place
                handler.setStream(stream)


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title or None, box=box.SIMPLE_HEAD, show_header=any(columns), title_justify="left")
    for name, flush in zip(columns, right, strict=True):
        drawn.add_column(Text(name), justify="right" if flush else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))  # Text: brackets in file and tensor names are no markup
    Console().print(drawn)


def _plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    lines = [list(columns), *map(list, rows)] if any(columns) else [list(row) for row in rows]
    widths = [max((len(line[index]) for line in lines), default=0) for index in range(len(columns))]
    text = [title] if title else []
    for line in lines:
        cells = [
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(line, widths, right, strict=True)
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text) + "\n"


def _is_number(cell: str) -> bool:
    try:
        float(cell.rstrip("%"))
    except ValueError:
        return cell == "-"
    return True
