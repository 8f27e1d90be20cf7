"""`python -X gil=0 -m ftserve`, and the console script `ftserve`."""

from __future__ import annotations

import os
import sys
import sysconfig


def main() -> None:
    """Run the command line with the GIL off, starting the interpreter anew if that is what it takes."""
    if sys.argv[1:2] == ["bench"]:  # a client: it runs on any Python
        from ftserve.server.bench.cli import main as bench

        raise SystemExit(bench(sys.argv[2:]))
    if sysconfig.get_config_var("Py_GIL_DISABLED") and not _gil_is_forced_off():
        # The GIL is off now, but triton, which transformers imports, would turn it on again.
        print("ftserve: restarting with -X gil=0", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, "-X", "gil=0", *sys.orig_argv[1:]])
    from ftserve.server.cli import run

    run(sys.argv[1:])


def _gil_is_forced_off() -> bool:
    return sys._xoptions.get("gil") == "0" or os.environ.get("PYTHON_GIL") == "0"  # noqa: SLF001 - documented, despite its name


if __name__ == "__main__":
    main()
