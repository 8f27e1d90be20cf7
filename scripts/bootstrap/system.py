"""The system's packages, where apt finds them, and uv."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from .steps import CACHE, ROOT, Failure, Step, answer, publish, workplace


def need_packages(*names: str) -> None:
    """Install the missing Debian packages where that is allowed, else name the command that does."""
    if not shutil.which("dpkg-query"):
        return  # another distribution: what is missing shows in the log of the step that needs it
    missing = [name for name in names if answer("dpkg-query", "-Wf", "${db:Status-Status}", name) != "installed"]
    if not missing:
        return
    if os.geteuid() != 0:
        raise Failure(f"packages are missing; please run: sudo apt-get install {' '.join(missing)}")
    with Step("apt", f"install {' '.join(missing)}", "under 1 min") as step:
        step.run("apt-get", "update")
        install = ("apt-get", "install", "--yes", "--no-install-recommends", *missing)
        step.run(*install, DEBIAN_FRONTEND="noninteractive")


def release() -> dict[str, str]:
    """Return the fields of /etc/os-release."""
    return dict(re.findall(r'^(\w+)="?([^"\n]*)', Path("/etc/os-release").read_text(), re.MULTILINE))


def mirror() -> tuple[str, str]:
    """Return the address and the keyring (or "") of the apt source that serves this system's own release."""
    codename = release()["VERSION_CODENAME"]
    apt = Path("/etc/apt")
    for path in sorted(apt.glob("sources.list.d/*.sources")):
        for stanza in re.split(r"\n\s*\n", path.read_text()):
            field = dict(re.findall(r"^([\w-]+):[ \t]*(.*\S)", stanza, re.MULTILINE))
            if codename in field.get("Suites", "").split():
                keyring = field.get("Signed-By", "")
                return field["URIs"].split()[0], keyring if keyring.startswith("/") else ""
    for path in filter(Path.exists, (apt / "sources.list", *sorted(apt.glob("sources.list.d/*.list")))):
        for line in path.read_text().splitlines():
            entry = re.match(r"deb\s+(?:\[(.*?)\]\s*)?(\S+)\s+(\S+)", line)
            if entry and entry[3] == codename:
                signed_by = re.search(r"signed-by=(\S+)", entry[1] or "")
                return entry[2], signed_by[1] if signed_by else ""
    raise Failure("no apt source serves this release; name a tarball of CPython 3.13 in FTSERVE_PYTHON_SOURCE")


def find_uv() -> str:
    """Return uv from PATH, else a private one, installed with pip if need be."""
    if answer("uv", "--version"):
        return "uv"
    version = pins("gil")["uv"]
    uv = CACHE / "bin" / f"uv-{version}"
    if not uv.exists():
        if not importlib.util.find_spec("ensurepip"):
            need_packages("python3-venv")
        with Step("uv", f"install uv {version}", "10 s") as step:
            venv = workplace("uv")
            step.run(sys.executable, "-m", "venv", venv)
            step.run(venv / "bin" / "python", "-m", "pip", "install", f"uv=={version}")
            publish(venv / "bin" / "uv", uv)
    return str(uv)


def pins(name: str) -> dict[str, str]:
    """Return the versions that requirements/NAME.txt pins, by package."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return dict(line.split()[0].split("==") for line in lines if line and not line.startswith("#"))
