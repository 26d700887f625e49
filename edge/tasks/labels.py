"""Names of a model's classes, and which of them are wanted."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from edge.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Labels", "load"]

_BUILT_IN = ("coco80",)
"""Files of edge/labels."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Names by class id."""

    names: tuple[str, ...]
    wanted: frozenset[int] | None = None
    """Class ids to report; None for all."""

    def name(self, class_id: int) -> str:
        """The name of a class, 'class_7' where it has none."""
        return self.names[class_id] if class_id < len(self.names) else f"class_{class_id}"


def load(labels: Sequence[str] | str, *, keep: Sequence[str] = (), classes: int | None, source: str) -> Labels:
    """Read the labels of a deployment and check them against the model.

    Args:
        labels: the names, or a text file with one a line, or 'coco80'; empty for none.
        keep: those to report; empty for all.
        classes: how many the model has; None if its outputs don't say.
        source: what to call the model in messages.

    Raises:
        ConfigError: the file can't be read, the number differs from the model's, or ``keep`` names an unknown one.
    """
    names = tuple(_read(labels) if isinstance(labels, str) else labels)
    if names and classes is not None and len(names) != classes:
        problem = (
            f"task.labels: has {len(names)} names, but {source} has {classes} classes; give one name for each, in the"
            " model's order, or set task.layout if it was taken for another"
        )
        raise ConfigError([problem])
    if not names and classes is not None:
        names = tuple(f"class_{index}" for index in range(classes))
    return Labels(names, _wanted(keep, names, bounded=classes is not None) if keep else None)


def _read(name: str) -> list[str]:
    if name in _BUILT_IN:
        text = (resources.files("edge") / "labels" / f"{name}.txt").read_text(encoding="utf-8")
        return text.splitlines()
    try:
        # utf-8-sig: editors on Windows put a byte order mark before the first label
        lines = [line.strip() for line in Path(name).read_text(encoding="utf-8-sig").splitlines()]
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            [f"task.labels: {name}: cannot be read ({reason}); allowed: a list, a text file, coco80"]
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"task.labels: {name}: is not UTF-8 text ({error.reason} at byte {error.start})"]) from None
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise ConfigError([f"task.labels: {name}: is empty; expected one label a line"])
    if "" in lines:
        # Left out, it would silently shift the name of every class after it.
        raise ConfigError([f"task.labels: {name}:{lines.index('') + 1}: is empty; expected one label a line"])
    return lines


def _wanted(keep: Sequence[str], names: tuple[str, ...], *, bounded: bool) -> frozenset[int]:
    """Class ids of the labels to keep; a label that several classes share keeps them all."""
    wanted: set[int] = set()
    problems: list[str] = []
    for label in keep:
        ids = {index for index, name in enumerate(names) if name == label}
        number = re.fullmatch(r"class_(\d+)", label)
        if not bounded and number and int(number[1]) >= len(names):
            ids.add(int(number[1]))  # what Labels.name calls a class without a name
        if not ids:
            problems.append(f"task.keep: '{label}' is not a label of the model; {_nearest(label, names)}")
        wanted |= ids
    if problems:
        raise ConfigError(problems)
    return frozenset(wanted)


def _nearest(label: str, names: tuple[str, ...]) -> str:
    folded = {name.casefold(): name for name in names}
    close = difflib.get_close_matches(label.casefold(), folded, n=1)
    if close:
        return f"did you mean '{folded[close[0]]}'?"
    if not names:
        return "without task.labels classes are called class_0, class_1, ..."
    shown = ", ".join(names[:8])
    return f"allowed: {shown}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")
