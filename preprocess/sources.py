"""Where the bytes of a content part come from, short of the network: `data:` URLs and files under one folder."""

from __future__ import annotations

import binascii
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from ftserve.engine.errors import InvalidRequestError, MediaError
from ftserve.engine.types import Modality

Payload = tuple[bytes, ...]  # one file; or several: the frames of a video as pictures

_FRAMES = "video/jpeg"  # the media type of a list of pictures, base64 joined by commas


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSource:
    """One part of a message that is not text."""

    modality: Modality
    param: str  # where it stands in the body
    url: str = ""  # data:, http:, https: or file:; empty if only a name is given
    uuid: str | None = None  # the client's own name for it
    options: tuple[tuple[str, float], ...] = field(default=())  # what the request asks of its processing


def read_data_url(url: str, max_bytes: int) -> Payload:
    """Return the bytes in a `data:` URL.

    Raises:
        InvalidRequestError: it is no such URL, or holds more than `max_bytes`.
    """
    head, comma, content = url.partition(",")
    if not comma:
        raise InvalidRequestError("A 'data:' URL needs a comma before its data.")
    media_type, *parameters = head[len("data:") :].lower().split(";")
    if len(content) > max_bytes // 3 * 4 + 4:
        raise InvalidRequestError(f"The data has more than {max_bytes} bytes.")
    if "base64" not in (parameter.strip() for parameter in parameters):
        return (unquote_to_bytes(content),)
    pieces = content.split(",") if media_type.strip() == _FRAMES else (content,)
    try:
        return tuple(map(binascii.a2b_base64, pieces))
    except ValueError as exc:  # odd padding, or not ASCII; what is no base64 between is skipped, as browsers do
        raise InvalidRequestError("The data is not valid base64.") from exc


class LocalFiles:
    """Files under one folder, for `file:` URLs."""

    def __init__(self, root: Path | None) -> None:
        """Allow `root` and what is below it; None allows nothing."""
        self._root = None if root is None else root.resolve()

    def read(self, url: str, max_bytes: int) -> Payload:
        """Return the file's bytes.

        Raises:
            InvalidRequestError: the file lies elsewhere, or is too large.
            MediaError: it cannot be read.
        """
        if self._root is None:
            raise InvalidRequestError("This server reads no 'file:' URLs.")
        parts = urlsplit(url)
        path = os.fsdecode(unquote_to_bytes(parts.path))
        if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
            raise InvalidRequestError("A 'file:' URL is written file:///absolute/path.")
        try:
            return (self._read(path, self._root, max_bytes),)
        except OSError as exc:
            raise MediaError("The file cannot be read.") from exc

    def _read(self, path: str, root: Path, max_bytes: int) -> bytes:
        resolved = Path(path).resolve()
        if not resolved.is_relative_to(root):
            raise InvalidRequestError("The file is not in the folder that this server reads from.")
        # Opened without following a link that took its place, and without waiting for the writer of a pipe.
        with open(os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123 - of a descriptor
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise MediaError("The file cannot be read.")
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise InvalidRequestError(f"The file has more than {max_bytes} bytes.")
        return data
