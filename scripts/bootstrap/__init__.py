"""Prepare a bare machine for `make serve` and `make test`, or see in a blink that it is ready.

    python3 -m scripts.bootstrap env           make .venv and .venv-gil, and fetch the default model
    python3 -m scripts.bootstrap clean-env     remove the two environments
    python3 -m scripts.bootstrap clean-cache   remove what was built and fetched for every checkout

Any Python from 3.9 runs it, with nothing but the standard library. What takes long is made once per user and kept
in `$FTSERVE_CACHE` (default `~/.cache/ftserve`):

    bin/      uv, where PATH has none
    python/   free-threaded CPython built from source, where none was found
    wheels/   packages that have no wheel for it
    models/   the default model
    logs/     what each step printed
    tmp/      work in progress

A thing is named by its version and a hash of what made it, and takes that name in one rename when it is whole. So a
run can be interrupted anywhere, and the next one goes on from there.
"""
