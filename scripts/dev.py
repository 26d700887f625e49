"""Makes the virtual environment, then runs a contributor's command in it. Standard library only.

``make`` calls it; without make, ``python3 scripts/dev.py demo`` does the same.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"

# Command -> the extra of setup.py it needs, and what it runs in the environment.
COMMANDS: dict[str, tuple[str, list[list[str]]]] = {
    "demo": ("demo", [["scripts/demo.py"]]),
    "test": ("dev", [["-m", "pytest"]]),
    "check": ("dev", [["-m", "ruff", "check"], ["-m", "ruff", "format", "--check"], ["-m", "mypy"]]),
    "format": ("dev", [["-m", "ruff", "check", "--fix"], ["-m", "ruff", "format"]]),
}
EXTRAS = {"demo": ("demo", "dev"), "dev": ("dev",)}
"""Extra -> the installed ones that contain it."""


def main() -> int:
    """Run the command named on the command line."""
    if sys.version_info < (3, 10):
        found = ".".join(map(str, sys.version_info[:3]))
        return _fail(f"this is Python {found}; jetson-edge needs 3.10 or later (JetPack 6 has it)")
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        return _fail(f"name one of: {', '.join(COMMANDS)}")
    name, *options = sys.argv[1:]
    extra, steps = COMMANDS[name]
    if not _installed(extra):
        code = _install(extra)
        if code:
            return code
    environment = os.environ | {"PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    for arguments in steps:
        try:
            code = subprocess.call([str(PYTHON), *arguments, *options], cwd=ROOT, env=environment)
        except KeyboardInterrupt:
            return 130
        if code:
            return code
    return 0


def _stamp(extra: str) -> Path:
    """A file whose presence says that this extra of this setup.py is installed, with the library built from this C."""
    digest = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in ("setup.py", "calibration/kernel.c")))
    return VENV / f".{extra}-{digest.hexdigest()[:16]}"


def _installed(extra: str) -> bool:
    return PYTHON.exists() and any(_stamp(name).exists() for name in EXTRAS[extra])


def _install(extra: str) -> int:
    print(f"making {VENV.relative_to(ROOT)} with jetson-edge[{extra}] (once; needs a package index)", flush=True)
    with_pip = importlib.util.find_spec("ensurepip") is not None
    if not with_pip and importlib.util.find_spec("pip") is None:
        return _fail("this Python has neither ensurepip nor pip; on Debian and Ubuntu: apt-get install python3-venv")
    if not PYTHON.exists():
        steps = [[sys.executable, "-m", "venv", *([] if with_pip else ["--without-pip"]), str(VENV)]]
    else:
        steps = []
    pip = [str(PYTHON), "-m", "pip"] if with_pip else [sys.executable, "-m", "pip", "--python", str(PYTHON)]
    steps.append([*pip, "install", "--quiet", "--disable-pip-version-check", "-e", f"{ROOT}[{extra}]"])
    for step in steps:
        code = subprocess.call(step, cwd=ROOT)
        if code:
            return _fail(f"failed with exit code {code}: {' '.join(step)}")
    _stamp(extra).touch()
    return 0


def _fail(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
