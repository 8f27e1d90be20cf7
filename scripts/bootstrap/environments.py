"""The two virtual environments, the wheels built for one of them, and the built-in models that tests use."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .interpreters import find_free_threaded, find_with_gil
from .steps import CACHE, ROOT, Failure, Step, answer, digest, publish, together, workplace
from .system import need_packages, pins

# How long they take on two cores, side by side, and the variables they are built with: tokenizers asks for the
# stable ABI, which free-threaded CPython 3.13 does not have.
BUILT_FROM_SOURCE: dict[str, tuple[str, dict[str, str]]] = {
    "tokenizers": ("4 to 8 min", {"MATURIN_PEP517_ARGS": "--no-default-features --features ext-module"}),
    "llguidance": ("4 to 8 min", {}),
    "fastokens": ("3 to 6 min", {}),
    "safetensors": ("1 to 2 min", {}),
}

IMPORT_ALL = """
import accelerate, av, fastokens, gguf, granian, hf_xet, httpx, jinja2, llguidance, numpy, PIL, psutil
import prometheus_client, pydantic, regex, safetensors.torch, tokenizers, torch, torchvision, transformers, yaml, zmq
"""
CHECK_GIL = """
import sys, ft_utils
assert not sys._is_gil_enabled(), "an import turned the GIL on"
"""

MODELS = ("smollm2-135m-instruct", "all-minilm-l6-v2")


@dataclass(frozen=True)
class Environment:
    """A virtual environment, the list of what it holds, and a stamp inside it that says it holds just that."""

    folder: Path
    pins: str

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def requirements(self) -> Path:
        return ROOT / "requirements" / f"{self.pins}.txt"

    @property
    def stamp(self) -> Path:
        return self.folder / "bootstrap-stamp"

    def is_ready(self) -> bool:
        stamped = self.stamp.exists() and self.stamp.read_text() == stamp_text()
        return stamped and answer(self.python, "-c", "") is not None

    def begin(self, step: Step, uv: str, interpreter: Path) -> None:
        """Void the stamp, and start the environment anew unless it stands on this interpreter."""
        self.stamp.unlink(missing_ok=True)
        base = answer(self.python, "-c", "import os, sys; print(os.path.realpath(sys._base_executable))")
        if base != str(interpreter):
            step.run(uv, "venv", "--clear", "--no-project", "--python", interpreter, self.folder)

    def finish(self) -> None:
        self.stamp.write_text(stamp_text())

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


FREE_THREADED = Environment(ROOT / ".venv", "free-threaded")
WITH_GIL = Environment(ROOT / ".venv-gil", "gil")


def stamp_text() -> str:
    """Return a hash of all that decides what is installed, and where: an environment does not survive a move."""
    sources = (*Path(__file__).parent.glob("*.py"), *(ROOT / "requirements").glob("*.txt"), ROOT / "pyproject.toml")
    return digest(ROOT, *(path.read_text() for path in sorted(sources)))


def make_with_gil(uv: str) -> None:
    if WITH_GIL.is_ready():
        return
    interpreter = find_with_gil(uv)
    into = ("--python", WITH_GIL.python)
    with Step("venv-gil", f"install tools, test clients and the server for {interpreter}", "30 s to 5 min") as step:
        WITH_GIL.begin(step, uv, interpreter)
        step.run(uv, "pip", "sync", *into, WITH_GIL.requirements)
        step.run(uv, "pip", "install", *into, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        step.run(WITH_GIL.python, "-c", IMPORT_ALL)
        WITH_GIL.finish()


def make_free_threaded(uv: str) -> None:
    """Install what has wheels while the rest is built, then the rest and this project."""
    if FREE_THREADED.is_ready():
        return
    interpreter = find_free_threaded(uv)
    wheels = {name: wheel_folder(interpreter, name) for name in BUILT_FROM_SOURCE}
    missing = {name: folder for name, folder in wheels.items() if not folder.exists()}
    if missing:
        need_packages("build-essential")
    builds = [partial(build_wheel, uv, interpreter, name, folder) for name, folder in missing.items()]
    together([partial(install_others, uv, interpreter), partial(together, builds)])

    into = ("--python", FREE_THREADED.python)
    links = [word for folder in wheels.values() for word in ("--find-links", folder)]
    with Step("venv", "install the rest and this project, import everything", "20 s") as step:
        step.run(uv, "pip", "sync", *into, *links, FREE_THREADED.requirements)
        step.run(uv, "pip", "install", *into, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        step.run(FREE_THREADED.python, "-X", "gil=0", "-c", IMPORT_ALL + CHECK_GIL)
        FREE_THREADED.finish()


def install_others(uv: str, interpreter: Path) -> None:
    versions = {name: version for name, version in pins(FREE_THREADED.pins).items() if name not in BUILT_FROM_SOURCE}
    listed = workplace("packages") / "requirements.txt"
    listed.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    with Step("packages", f"install torch and the like for {interpreter}, 5 GB", "1 to 5 min") as step:
        FREE_THREADED.begin(step, uv, interpreter)
        step.run(uv, "pip", "install", "--python", FREE_THREADED.python, "--no-deps", "--requirements", listed)


def wheel_folder(interpreter: Path, name: str) -> Path:
    """Return the place in the cache of a package's wheel, which any interpreter of the same ABI can use."""
    abi = answer(interpreter, "-c", "import sysconfig as s; print(s.get_config_var('SOABI'), s.get_platform())")
    if not abi:
        raise Failure(f"{interpreter} does not tell its ABI")
    version = pins(FREE_THREADED.pins)[name]
    _, variables = BUILT_FROM_SOURCE[name]
    return CACHE / "wheels" / f"{name}-{version}-{digest(variables, abi, sorted(pins('build').items()))}"


def build_wheel(uv: str, interpreter: Path, name: str, folder: Path) -> None:
    """Put the wheel of a package into `folder`: one that fits, if the registry has it by now, else one built here."""
    usual_time, variables = BUILT_FROM_SOURCE[name]
    wanted = f"{name}=={pins(FREE_THREADED.pins)[name]}"
    with Step(name, f"build {wanted}", usual_time) as step:
        work = workplace(name)
        pip = f"pip=={pins('build')['pip']}"
        run = (uv, "run", "--isolated", "--no-project", "--python", interpreter, "--with", pip)
        # The caches of pip and uv would take a wheel that was built with other variables for this one.
        pip_wheel = ("python", "-m", "pip", "wheel", "--no-cache-dir", "--no-deps", "--wheel-dir", work / "wheel")
        limits = ("--build-constraint", ROOT / "requirements" / "build.txt")
        step.run(*run, *pip_wheel, *limits, wanted, cwd=work, TMPDIR=str(work), **variables)
        publish(work / "wheel", folder)


def models_are_ready() -> bool:
    return all(any((CACHE / "models").glob(f"{model}-*")) for model in MODELS)


def make_models() -> None:
    if models_are_ready():
        return
    with Step("models", f"fetch and convert {' and '.join(MODELS)}", "40 s") as step:
        path_with_uv = f"{WITH_GIL.python.parent}{os.pathsep}{os.environ['PATH']}"
        step.run(FREE_THREADED.python, "-X", "gil=0", "-m", "ftserve.engine.builtin", *MODELS, PATH=path_with_uv)
