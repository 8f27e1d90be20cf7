"""Stacks of a profile: read what `perf script` prints, fold it by thread role, say where time goes, draw it."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ftserve.server.bench.observe import role_of

Stack = tuple[str, ...]  # the thread's role, then frames from the outermost in

_FRAME = re.compile(r"^\s+[0-9a-f]+ (?P<symbol>.+) \((?P<place>[^()]*|\[.*\])\)$")
_PYTHON = re.compile(r"^py::(?P<name>[^:]+):(?P<file>.*)$")
_OWN = re.compile(r"^(?!threading\.)[A-Za-z_]\w*\.(?!cold|isra|part|constprop)")  # module.function
_PLUMBING = re.compile(  # how CPython gets from one Python function to the next
    r"^(py_trampoline_evaluator|_PyObject_Vectorcall\w*|PyObject_Vectorcall\w*|_PyEval_EvalFrameDefault|_PyEval_Vector"
    r"|method_vectorcall|_PyFunction_Vectorcall|_PyObject_Call\w*|PyObject_Call\w*|pythread_wrapper|thread_run"
    r"|start_thread|clone3|_PyObject_MakeTpCall|type_call|slot_tp_\w+|cfunction_vectorcall\w*|\[unknown\])$"
)
_MAX_REPEATS = 3  # of a frame in one stack: where unwinding goes in a circle it does so a hundred times
CATEGORIES: dict[str, re.Pattern[str]] = {  # the first that matches a frame, looked for from the innermost out
    "stop the world": re.compile(r"stop_the_world|tstate_wait_attach|_PyThreadState_Suspend|gc_collect"),
    "locks and parking": re.compile(
        r"PyMutex|_PyParkingLot|_PySemaphore|_PyRawMutex|sched_yield|futex|PyThread_acquire_lock|pthread_cond"
    ),
    "network": re.compile(r"^(tcp_|sock_|inet_|ip_|__?sys_send|do_writev|vfs_writev|do_iter_readv|.*writev)"),
    "other system calls": re.compile(r"^(entry_SYSCALL|do_syscall|syscall|asm_|ret_from_fork)"),
    "memory": re.compile(r"^(_?mi_|_PyMem|PyMem|PyObject_Malloc|PyObject_Free|_PyObject_GC|malloc|free|cfree|_int_)"),
    "reference counts": re.compile(r"^(_Py_(Dec|Inc|Merge|TryInc|brc|ExplicitMerge)|Py_X?(DEC|INC)REF|_Py_atomic)"),
    "attributes": re.compile(
        r"^(PyObject_GetAttr|PyObject_SetAttr|_PyObject_Generic|PyObject_Generic|_PyType_Lookup|PyMember_)"
    ),
}
OTHER = "the rest: interpreter and libraries"


@dataclass(slots=True)
class Profile:
    """Folded stacks, and what share of each role fell into which category."""

    stacks: Counter[Stack] = field(default_factory=Counter)
    categories: dict[str, Counter[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, lines: Iterable[str], *, native: bool = False) -> Profile:
        """Take the output of `perf script -F comm,tid,ip,sym,dso`; `native` keeps the interpreter's own frames."""
        profile = cls()
        for comm, frames in _samples(lines):
            role = role_of(comm)
            profile.categories.setdefault(role, Counter())[_category(frames)] += 1
            profile.stacks[role, *_readable(frames, native)] += 1
        return profile

    def folded(self) -> str:
        """Return lines as flame graph tools read them."""
        return "".join(f"{';'.join(stack)} {count}\n" for stack, count in sorted(self.stacks.items()))

    def table(self) -> str:
        """Return, for each role, its share of all samples and where within it they fell."""
        total = sum(self.stacks.values()) or 1
        lines = []
        for role, counts in sorted(self.categories.items(), key=lambda item: -item[1].total()):
            inside = counts.total()
            shares = ", ".join(f"{name} {100 * count / inside:.0f} %" for name, count in counts.most_common())
            lines.append(f"{role:12} {100 * inside / total:5.1f} % of samples: {shares}")
        return "\n".join(lines)

    def hottest(self, role: str, count: int = 12) -> list[tuple[str, float]]:
        """Return the Python functions that a role spends most in, themselves and what they call, as shares."""
        seen: Counter[str] = Counter()
        total = 0
        for stack, samples in self.stacks.items():
            if stack[0] == role:
                total += samples
                seen.update(dict.fromkeys(filter(_OWN.match, stack[1:]), samples))
        return [(name, samples / total) for name, samples in seen.most_common(count)]


def _samples(lines: Iterable[str]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each sample's thread name and its frames as (symbol, object file), the innermost first."""
    comm, frames = "", list[tuple[str, str]]()
    for line in lines:
        if not line.strip():
            if frames:
                yield comm, frames
            frames = []
        elif (found := _FRAME.match(line)) is not None:
            frames.append((found["symbol"].removesuffix(" (inlined)"), found["place"]))
        else:
            comm = line.rsplit(None, 1)[0].strip()
    if frames:
        yield comm, frames


def _category(frames: list[tuple[str, str]]) -> str:
    for symbol, _ in frames:
        if symbol.startswith("py::"):
            break
        for name, pattern in CATEGORIES.items():
            if pattern.search(symbol):
                return name
    return OTHER


def _readable(frames: list[tuple[str, str]], native: bool) -> Iterator[str]:
    last, seen = "", Counter[str]()
    for position, (symbol, place) in reversed([*enumerate(frames)]):
        python = _PYTHON.match(symbol)
        if python is not None:
            name = f"{python['file'].rpartition('/')[2].removesuffix('.py')}.{python['name']}"
        elif symbol == "[unknown]" or (not native and position and _PLUMBING.match(symbol)):
            name = ""
            if symbol == "[unknown]" and ".so" in place:  # a library without symbols, such as granian
                name = place.rpartition("/")[2].partition(".")[0]
        else:
            name = symbol
        seen[name] += 1
        if name and name != last and seen[name] <= _MAX_REPEATS:
            last = name
            yield name.replace(";", ",")


_WIDTH, _ROW, _MIN_WIDTH = 1200.0, 17, 0.4


def flame_graph(profile: Profile, title: str) -> str:
    """Return an SVG flame graph: roles at the bottom, frames above, widths are samples. Each box says its share."""
    root = _Node()
    for stack, count in profile.stacks.items():
        root.add(stack, count)
    depth = root.depth()
    height = (depth + 2) * _ROW + 10
    boxes = "".join(_boxes(root, 0.0, 0, height, root.count or 1))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {height}" '
        f'font-family="monospace" font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="8" y="14" font-size="13">{html.escape(title)}</text>{boxes}</svg>'
    )


class _Node:
    def __init__(self) -> None:
        self.count = 0
        self.children: dict[str, _Node] = {}

    def add(self, stack: Stack, count: int) -> None:
        node = self
        node.count += count
        for name in stack:
            node = node.children.setdefault(name, _Node())
            node.count += count

    def depth(self) -> int:
        return 1 + max((child.depth() for child in self.children.values()), default=0)


def _boxes(node: _Node, x: float, level: int, height: int, total: int) -> Iterator[str]:
    for name, child in sorted(node.children.items()):
        width = _WIDTH * child.count / total
        if width >= _MIN_WIDTH:
            y = height - (level + 1) * _ROW
            hue = 200 if level == 0 else 10 + sum(name.encode()) % 45
            label = html.escape(name[: int(width / 6.7)]) if width > 24 else ""
            yield (
                f"<g><title>{html.escape(name)}: {100 * child.count / total:.1f} %</title>"
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 1}" fill="hsl({hue},75%,72%)"/>'
                f'<text x="{x + 3:.1f}" y="{y + 12}">{label}</text></g>'
            )
            yield from _boxes(child, x, level + 1, height, total)
        x += width
