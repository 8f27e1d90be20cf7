"""The commands that check this project, each defined once; `make test` and CI run these sessions.

scripts/bootstrap makes both environments with pinned versions, so no session makes one of its own.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import nox

ROOT = Path(__file__).parent
FREE_THREADED = ROOT / ".venv" / "bin"
WITH_GIL = ROOT / ".venv-gil" / "bin"

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "gate", "tests_gil", "tests"]

# CI reads the end of the log, which belongs to pytest. What fails is still said.
logging.getLogger("nox").setLevel(logging.WARNING)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests on the free-threaded interpreter with the GIL off."""
    session.run(str(FREE_THREADED / "python"), "-m", "pytest", *session.posargs, env={"PYTHON_GIL": "0"})


@nox.session
def tests_gil(session: nox.Session) -> None:
    """Run the server as processes on a Python with the GIL: its own tests, and those with the newest OpenAI SDK."""
    of_server = (f"tests/server/test_{name}.py" for name in ("processes", "api", "logprobs", "rich"))
    paths = ("tests/clients", "tests/engine/test_messages.py", *of_server)
    session.run(str(WITH_GIL / "python"), "-m", "pytest", *(session.posargs or paths))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, imports and formatting with ruff."""
    session.run(str(WITH_GIL / "ruff"), "check")
    session.run(str(WITH_GIL / "ruff"), "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy, against the packages that the server runs with."""
    mypy = str(WITH_GIL / "mypy")
    session.run(mypy, "noxfile.py", "scripts")
    installed = ("--python-executable", str(FREE_THREADED / "python"))
    session.env["MYPYPATH"] = str(importable(session))
    session.run(mypy, *installed, "--package", "ftserve")
    session.run(mypy, *installed, "tests", "benchmarks")


@nox.session
def gate(session: nox.Session) -> None:
    """Compare CPU time and memory with bare libraries and with the commit this one grew from."""
    undecided = 75  # the machine is too noisy to say; the gate has said so
    python = str(FREE_THREADED / "python")
    arguments = ("-m", "benchmarks.gate", *session.posargs)
    session.run(python, *arguments, env={"PYTHON_GIL": "0"}, success_codes=[0, undecided])


@nox.session
def micro(session: nox.Session) -> None:
    """Time the small steps of a request, with pytest-benchmark."""
    python = str(FREE_THREADED / "python")
    options = ("--benchmark-only", "--benchmark-columns=min,median,iqr,ops", "--benchmark-max-time=0.8")
    session.run(
        python, "-m", "pytest", *options, "benchmarks/bench_steps.py", *session.posargs, env={"PYTHON_GIL": "0"}
    )


@nox.session
def bench(session: nox.Session) -> None:
    """Print the tables of the README from scratch, with the alternatives beside ours; within ten minutes."""
    python, packages = str(FREE_THREADED / "python"), str(Path(session.create_tmp()) / "serve")
    install = ("pip", "install", "--quiet", "--python", python, "--no-deps", "--target", packages)
    session.run(str(WITH_GIL / "uv"), *install, "-r", "requirements/alternatives.txt")
    for module, *options in (
        ("bench_frontend",),
        ("bench_engine", "--quick"),
        ("bench_media", "--quick"),
        ("bench_alternatives", "--serve-packages", packages),
    ):
        session.run(python, "-m", f"benchmarks.{module}", *options, env={"PYTHON_GIL": "0"})


def importable(session: nox.Session) -> Path:
    """Return a folder in which the package lies as it is imported.

    mypy does not see the mapping of an editable install. Links, unlike a normal install, need no build and let its
    messages lead to the files themselves.
    """
    site = Path(session.create_tmp()) / "site"
    shutil.rmtree(site, ignore_errors=True)
    package = site / "ftserve"
    package.mkdir(parents=True)
    for folder in ("engine", "preprocess", "server"):
        (package / folder).symlink_to(ROOT / folder)
    for module in (ROOT / "server" / "ftserve").iterdir():
        (package / module.name).symlink_to(module)
    return site
