"""The command line: see the package's docstring."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from functools import partial

from . import __doc__ as usage
from .environments import FREE_THREADED, WITH_GIL, make_free_threaded, make_models, make_with_gil, models_are_ready
from .steps import CACHE, Failure, duration, end_all, only_run, say, seconds_taken, together
from .system import find_uv


def make_env() -> None:
    """Make what is missing. Mostly nothing is, and seeing that takes neither the lock nor the network."""
    if WITH_GIL.is_ready() and FREE_THREADED.is_ready() and models_are_ready():
        return
    started = time.monotonic()
    with only_run():
        uv = find_uv()
        together([partial(make_with_gil, uv), partial(make_free_threaded, uv)])
        make_models()
    times = ", ".join(f"{name} {duration(seconds)}" for name, seconds in seconds_taken.items())
    say(f"ready in {duration(time.monotonic() - started)}: {times or 'another run did it'}")


def clean_env() -> None:
    FREE_THREADED.remove()
    WITH_GIL.remove()


def clean_cache() -> None:
    shutil.rmtree(CACHE, ignore_errors=True)


TASKS = {"env": make_env, "clean-env": clean_env, "clean-cache": clean_cache}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bootstrap", description=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    task = TASKS[parser.parse_args().task]
    # SIGINT too, since a shell starts what runs in the background with SIGINT ignored, and so would our commands.
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    try:
        task()
    except Failure as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        end_all(interrupt)
        print("interrupted; run it again to go on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
