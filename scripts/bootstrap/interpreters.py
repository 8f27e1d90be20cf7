"""Find the two interpreters, or build the free-threaded one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import sys
from pathlib import Path

from .steps import CACHE, Failure, Step, answer, digest, publish, workplace
from .system import mirror, need_packages, release

BUILD_PACKAGES = (
    *("build-essential", "patch", "xz-utils", "libbz2-dev", "libffi-dev", "liblzma-dev", "libreadline-dev"),
    *("libsqlite3-dev", "libssl-dev", "uuid-dev", "zlib1g-dev"),
)
CONFIGURE = ("--disable-gil", "--enable-optimizations", "--without-ensurepip")
# A profile is as good where one of the tests that make it fails, for lack of a network for example.
PROFILE_TASK = "-m test --pgo --timeout=600 || true"

# Debian 13 keeps its 3.13.5 secure with patches. Those that repair something apply to the plain source; the others
# move files to the distribution's places.
SUITE = {"debian": "trixie", "ubuntu": "questing"}
REPAIRS = re.compile(r"CVE-|ssl-|dict-use-after-free|traverse-managed-dicts")


def find_free_threaded(uv: str) -> Path:
    """Return CPython 3.13t: the one in $FTSERVE_PYTHON, else one found or installed, else one built here."""
    wish = os.environ.get("FTSERVE_PYTHON")
    if wish:
        if python := free_threaded(wish):
            return python
        raise Failure(f"FTSERVE_PYTHON={wish} is not a free-threaded CPython 3.13")
    if python := free_threaded("python3.13t") or free_threaded(ask_uv(uv, "3.13t")) or built():
        return python
    with contextlib.suppress(Failure), Step("uv-python", "let uv install CPython 3.13t", "10 s") as step:
        step.run(uv, "python", "install", "3.13t", UV_HTTP_RETRIES="0")
    return free_threaded(ask_uv(uv, "3.13t")) or build()


def find_with_gil(uv: str) -> Path:
    """Return a CPython from 3.11 that has the GIL: this one, one on PATH, or one that uv finds or installs."""
    for candidate in (sys.executable, "python3", "python3.14", "python3.13", "python3.12", "python3.11"):
        if python := with_gil(candidate):
            return python
    with contextlib.suppress(Failure), Step("uv-python-gil", "let uv install CPython 3.13", "10 s") as step:
        step.run(uv, "python", "install", "3.13")
    if python := with_gil(ask_uv(uv, "3.13")):
        return python
    raise Failure("there is no Python from 3.11 here and uv cannot install one; please install one")


def free_threaded(python: str | Path | None) -> Path | None:
    return _inspect(python, "hasattr(sys, '_is_gil_enabled') and no_gil and sys.version_info[:2] == (3, 13)")


def with_gil(python: str | Path | None) -> Path | None:
    return _inspect(python, "not no_gil and sys.version_info >= (3, 11)")


def _inspect(python: str | Path | None, condition: str) -> Path | None:
    """Return where an interpreter really lies if it starts and meets a condition: a name may be a shim that fails."""
    look = "import sys, sysconfig; no_gil = sysconfig.get_config_var('Py_GIL_DISABLED')"
    path = answer(python, "-c", f"{look}; assert {condition}; print(sys._base_executable)") if python else None
    return Path(path).resolve() if path else None


def ask_uv(uv: str, version: str) -> str | None:
    return answer(uv, "python", "find", "--system", "--no-project", "--no-python-downloads", version)


def built() -> Path | None:
    builds = sorted((CACHE / "python").glob(f"*-{recipe()}/bin/python3.13t"), reverse=True)
    return next(filter(None, map(free_threaded, builds)), None)


def recipe() -> str:
    """Return a hash of what makes the interpreter, but for the version, which only the source tells."""
    tarball = os.environ.get("FTSERVE_PYTHON_SOURCE")
    source = hashlib.sha256(Path(tarball).read_bytes()).hexdigest() if tarball else SUITE
    return digest(CONFIGURE, REPAIRS.pattern, platform.machine(), source)


def build() -> Path:
    """Build CPython 3.13t from the tarball in $FTSERVE_PYTHON_SOURCE or from the distribution's source package."""
    need_packages(*BUILD_PACKAGES)
    with Step("interpreter", "build CPython 3.13t, optimized with a profile", "5 to 11 min") as step:
        work = workplace("interpreter")
        tarball = os.environ.get("FTSERVE_PYTHON_SOURCE")
        tree = unpack(step, Path(tarball), work) if tarball else distribution_source(step, work)
        version = re.findall(r'PY_VERSION\s+"(.+)"', (tree / "Include" / "patchlevel.h").read_text())[0]
        prefix = CACHE / "python" / f"{version}-{recipe()}"
        step.run("./configure", f"--prefix={prefix}", *CONFIGURE, cwd=tree)
        step.run("make", f"-j{len(os.sched_getaffinity(0))}", f"PROFILE_TASK={PROFILE_TASK}", cwd=tree)
        # The prefix is compiled in, so it is installed for its final place, but in another one until it is whole.
        step.run("make", "install", f"DESTDIR={work / 'root'}", cwd=tree)
        publish(work / "root" / prefix.relative_to("/"), prefix)
    return prefix / "bin" / "python3.13t"


def unpack(step: Step, tarball: Path, work: Path) -> Path:
    """Unpack a tarball and return the one folder in it."""
    into = work / tarball.name.split(".tar")[0]
    into.mkdir()
    step.run("tar", "--extract", "--file", tarball.absolute(), "--directory", into)
    (tree,) = into.iterdir()
    return tree


def distribution_source(step: Step, work: Path) -> Path:
    """Fetch the source package python3.13 from the system's mirror, checked with its keys, and repair it.

    apt gets a source list, package lists and an archive of its own; the system's stay as they are.
    """
    address, keyring = mirror()
    for folder in ("sources", "lists/partial", "archives/partial", "package"):
        (work / folder).mkdir(parents=True)
    entry = f"Types: deb-src\nURIs: {address}\nSuites: {SUITE[release()['ID']]}\nComponents: main\n"
    (work / "sources" / "python.sources").write_text(entry + (f"Signed-By: {keyring}\n" if keyring else ""))
    private = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": work / "sources",
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work,
    }
    apt = ("apt-get", *(f"--option={name}={value}" for name, value in private.items()))
    step.run(*apt, "update")
    step.run(*apt, "source", "--download-only", "python3.13", cwd=work / "package")
    (source,) = (work / "package").glob("*.orig.tar.xz")
    (packaging,) = (work / "package").glob("*.debian.tar.xz")
    tree, patches = unpack(step, source, work), unpack(step, packaging, work) / "patches"
    for name in filter(REPAIRS.match, (patches / "series").read_text().split()):
        step.run("patch", "-p1", "--input", patches / name, cwd=tree)
    return tree
