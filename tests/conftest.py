"""What tests of both packages share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parent / "data"

# The machines of CI are shared: an example may take long for reasons of its neighbours'.
hypothesis.settings.register_profile("edge", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("edge")


@pytest.fixture
def data() -> Path:
    """The folder of real models and photographs; see its README.md."""
    return DATA


@pytest.fixture
def deployment_file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a deployment file and gives its path."""

    def write(text: str) -> Path:
        path = tmp_path / "line3.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write
