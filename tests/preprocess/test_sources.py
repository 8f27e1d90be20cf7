"""`data:` URLs and local files: what is read, and what is refused without reading it."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from ftserve.engine.errors import InvalidRequestError, MediaError
from ftserve.preprocess.sources import LocalFiles, read_data_url

ABC = base64.b64encode(b"abcdef").decode()


@pytest.mark.parametrize(
    ("url", "payload"),
    [
        (f"data:image/png;base64,{ABC}", (b"abcdef",)),
        (f"data:;base64,{ABC}", (b"abcdef",)),
        (f"data:image/png;name=x;BASE64,{ABC[:4]}\n{ABC[4:]}", (b"abcdef",)),
        ("data:image/svg+xml,%00a%20b", (b"\0a b",)),
        (f"data:video/jpeg;base64,{ABC},{ABC[:4]}", (b"abcdef", b"abc")),
        ("data:image/png;base64,", (b"",)),
    ],
)
def test_data_urls_are_read(url: str, payload: tuple[bytes, ...]) -> None:
    assert read_data_url(url, 100) == payload


@pytest.mark.parametrize("url", ["data:", "data:image/png;base64", "data:;base64,abc", "data:;base64,ab\u00e9d"])
def test_data_urls_without_data_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError):
        read_data_url(url, 100)


def test_data_urls_are_measured_before_they_are_decoded() -> None:
    with pytest.raises(InvalidRequestError, match="more than 100 bytes"):
        read_data_url("data:;base64," + "A" * 1000, 100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret.png").write_bytes(b"secret")
    inside = tmp_path / "media"
    inside.mkdir()
    (inside / "a b.png").write_bytes(b"picture")
    (inside / "out").symlink_to(tmp_path / "secret.png")
    os.mkfifo(inside / "pipe")
    return inside


def test_files_below_the_folder_are_read(folder: Path) -> None:
    assert LocalFiles(folder).read(f"file://{folder}/a%20b.png", 100) == (b"picture",)
    assert LocalFiles(folder).read(f"file://localhost{folder}/../media/a%20b.png", 100) == (b"picture",)


@pytest.mark.parametrize("name", ["../secret.png", "out", "%2e%2e/secret.png", "../missing.png", "x/../../secret.png"])
def test_files_elsewhere_are_refused_whether_they_exist_or_not(folder: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="not in the folder"):
        LocalFiles(folder).read(f"file://{folder}/{name}", 100)


@pytest.mark.parametrize("name", ["missing.png", "", "pipe"])
def test_what_is_no_file_is_refused_without_waiting(folder: Path, name: str) -> None:
    with pytest.raises(MediaError) as error:
        LocalFiles(folder).read(f"file://{folder}/{name}", 100)
    assert str(folder) not in error.value.message


@pytest.mark.parametrize("url", ["file:relative.png", "file://host/a.png", "file:///a%00b"])
def test_malformed_file_urls_are_refused(folder: Path, url: str) -> None:
    with pytest.raises(InvalidRequestError, match="is written"):
        LocalFiles(folder).read(url, 100)


def test_large_files_and_servers_without_a_folder_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="more than 6 bytes"):
        LocalFiles(folder).read(f"file://{folder}/a%20b.png", 6)
    with pytest.raises(InvalidRequestError, match="reads no"):
        LocalFiles(None).read(f"file://{folder}/a%20b.png", 100)
