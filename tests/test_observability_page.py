"""docs/observability.md says what the code does: every event, every page, rules that Prometheus takes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from edge import config
from edge.events import KINDS
from edge.server import PATHS

TEXT = (Path(__file__).parents[1] / "docs" / "observability.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text under a heading, up to the next of its rank."""
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """What stands in backticks at the start of the rows of a table."""
    return re.findall(r"^\| `([^`]+)` ", text, re.MULTILINE)


def yaml_blocks() -> dict[str, str]:
    """The YAML examples by the file name in their first line."""
    blocks = re.findall(r"```yaml\n# (\S+)\n(.*?)```", TEXT, re.DOTALL)
    return dict(blocks)


def test_every_kind_of_event_has_its_meaning() -> None:
    assert first_cells(section("Events")) == list(KINDS)


def test_every_page_is_listed() -> None:
    assert sorted(first_cells(section("Over HTTP"))) == sorted(PATHS)


def test_defaults_are_those_of_the_deployment() -> None:
    default = config.Status()

    assert f"by default `{default.host}:{default.port}`" in section("Over HTTP").replace("\n", " ")


def test_the_examples_are_yaml_and_know_only_our_metrics() -> None:
    blocks = yaml_blocks()

    assert set(blocks) == {"prometheus.yml", "rules.yml"}
    rules = yaml.safe_load(blocks["rules.yml"])["groups"][0]["rules"]
    assert len(rules) >= 3
    assert all({"alert", "expr", "for", "annotations"} <= set(rule) for rule in rules)


def test_promtool_accepts_the_examples(tmp_path: Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed; apt-get install prometheus")

    for name, text in yaml_blocks().items():
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        what = "config" if name == "prometheus.yml" else "rules"
        done = subprocess.run([program, "check", what, path], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
