"""Names of threads as the kernel shows them, so that `top -H` and `perf` tell roles apart."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path


def name_this_thread(name: str) -> int:
    """Set the calling thread's kernel name, 15 characters at most, and return its native id."""
    native_id = threading.get_native_id()
    with contextlib.suppress(OSError):  # not on Linux, or /proc is not ours: a name is no necessity
        Path(f"/proc/self/task/{native_id}/comm").write_text(name[:15])
    return native_id
