"""The map of the packages (docs/architecture.md) as a test: who may import whom, and which library lives where."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for package in ("edge", "calibration") for path in (ROOT / package).rglob("*.py"))

# Library -> where it may be imported. A folder allows what is in it.
ROOMS = {
    "calibration": ["calibration/"],
    "cv2": ["edge/image.py", "edge/sources/", "edge/tasks/", "calibration/annotate.py"],
    "jtop": ["edge/monitor/jtop.py"],
    "jinja2": ["calibration/report.py"],
    "onnx": ["calibration/graph.py", "calibration/segments.py", "calibration/typed.py"],
    "onnx_ir": [
        "calibration/graph.py",
        "calibration/qdq.py",
        "calibration/observe.py",
        "calibration/calibrate.py",
        "calibration/planning.py",
        "calibration/rules.py",
        "calibration/segments.py",
        "calibration/selftest.py",
        "calibration/trial.py",
        "calibration/typed.py",
    ],
    "onnxruntime": ["edge/engine/onnxruntime.py", "calibration/observe.py"],
    "paho": ["edge/publish/mqtt.py"],
    "prometheus_client": ["edge/metrics.py"],
    "pycuda": ["edge/engine/cuda.py"],
    "tensorrt": ["edge/engine/tensorrt.py"],
    "pycocotools": ["calibration/coco.py"],
    "rich": ["calibration/console.py"],
    "sqlite3": ["edge/publish/outbox.py"],
    "yaml": ["edge/strict.py"],
}
# Libraries that are imported by the function that needs them, since they are heavy or may be absent.
LAZY = {"jtop", "onnxruntime", "pycuda", "rich", "tensorrt"}
EXEMPT_FROM_LAZY = {"calibration/observe.py"}  # is itself imported by the function that needs it


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(tree: ast.AST) -> list[tuple[str, ast.stmt]]:
    found: list[tuple[str, ast.stmt]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name.split(".")[0], node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append(((node.module or "").split(".")[0], node))
    return found


def for_types_only(tree: ast.Module) -> set[ast.stmt]:
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {statement for block in blocks for statement in ast.walk(block) if isinstance(statement, ast.stmt)}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_libraries_stay_in_their_rooms(path: Path) -> None:
    name, tree = name_of(path), ast.parse(path.read_text())
    lazy_ok = for_types_only(tree)

    for library, node in imports_of(tree):
        if library in ROOMS and node not in lazy_ok:
            rooms = ROOMS[library]
            assert any(name == room or (room.endswith("/") and name.startswith(room)) for room in rooms), (
                f"{name}:{node.lineno} imports {library}, which belongs in {', '.join(rooms)}"
            )
        if library in LAZY and node in tree.body:
            assert name in EXEMPT_FROM_LAZY, f"{name}:{node.lineno} imports {library} when it is itself imported"


def test_every_row_of_the_map_is_true() -> None:
    used = {(library, name_of(path)) for path in MODULES for library, _ in imports_of(ast.parse(path.read_text()))}

    for library, rooms in ROOMS.items():
        for room in rooms:
            found = [
                n for user, n in used if user == library and (n == room or (room[-1] == "/" and n.startswith(room)))
            ]
            assert found, f"nothing in {room} imports {library}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_say_what_they_are_for(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))

    assert docstring, f"{name_of(path)} has no docstring"


def test_relative_imports_and_module_state_are_not_used() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{name_of(path)}:{node.lineno}"
            assert not isinstance(node, ast.Global), f"{name_of(path)}:{node.lineno} uses 'global'"
