from __future__ import annotations

from pathlib import Path

import pytest

from edge import config
from edge.errors import ConfigError
from edge.sources.credential import find_password

URL = "rtsp://camera/1"


def find(section: config.Rtsp, **environ: str) -> str | None:
    return find_password(section, stream="gate-2.left", key="k", environ=environ)


def test_the_file_comes_before_the_credential_and_that_before_the_environment(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("from file\nsecond line\n")
    (tmp_path / "camera_gate-2.left_password").write_text("from systemd")
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path), "EDGE_CAMERA_GATE_2_LEFT_PASSWORD": "from environment"}
    with_file = config.Rtsp(url=URL, username="me", password_file=str(tmp_path / "password"))
    without = config.Rtsp(url=URL, username="me")

    assert find(with_file, **environ) == "from file"
    assert find(without, **environ) == "from systemd"
    (tmp_path / "camera_gate-2.left_password").unlink()
    assert find(without, **environ) == "from environment"
    assert find(without) is None
    assert find(config.Rtsp(url=URL), **environ) is None


def test_a_password_does_not_show() -> None:
    environ = {"EDGE_CAMERA_GATE_2_LEFT_PASSWORD": "Sesam7"}

    found = find(config.Rtsp(url=URL, username="me"), **environ)

    assert repr(found) == "Password(***)"


@pytest.mark.parametrize(("content", "says"), [(None, "No such file"), (b"", "is empty"), (b"\xff\xfe", "not UTF-8")])
def test_a_file_that_holds_none_names_its_key(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=rf"^k\.password_file: .*password: .*{says}"):
        find(config.Rtsp(url=URL, username="me", password_file=str(path)))
