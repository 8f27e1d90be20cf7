"""The private folder of a server that runs as processes: sockets, and patches of images on their way.

It lies in shared memory where there is some. A lock held by all processes of the server tells whether it is in use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = f"ftserve-{os.getuid()}-"
_LOCK = "lock"


def make_folder() -> Path:
    """Make a folder that only we can enter, and hold its lock until this process and all its children have ended.

    Raises:
        OSError: there is no place for it.
    """
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_root()))  # mode 0700
    descriptor = os.open(folder / _LOCK, os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # never closed, and inherited by forks
    return folder


def sweep() -> None:
    """Remove the folders of servers of ours that were killed."""
    for folder in _root().glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder / _LOCK, os.O_WRONLY)
        except OSError:  # not whole yet, or not ours
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _root() -> Path:
    shared = Path("/dev/shm")  # noqa: S108 - what is made there is ours alone
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
