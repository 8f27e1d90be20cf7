"""What the server's side of a run looks like from outside: CPU time by thread, memory, and its own counters."""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ROLES = {  # how the kernel calls a thread, without its number: what it is for us
    "ft-pre": "preprocess",
    "ft-open": "open media",
    "ft-decode": "decode media",
    "ft-out": "output",
    "ft-engine": "engine",
    "ft-http": "http",
    "tokio-rt-worker": "http",
    "tokio-runtime-w": "http",
}


def listener(host: str, port: int) -> int | None:
    """Return the process of this machine that listens there, or None."""
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
    except (OSError, ValueError):
        return None
    if not address.is_loopback and str(address) not in _own_addresses():
        return None
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(link.readlink()) in inodes for link in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:  # it has ended, or is not ours to look at
            continue
    return None


def _own_addresses() -> set[str]:
    return {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        except OSError:
            continue
        found |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    return found


def process_tree(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    tree = [pid]
    for member in tree:  # grows while it is walked
        tree += children.get(member, [])
    return tree


def role_of(thread_name: str) -> str:
    """Return what a thread is for, by the kernel's name of it."""
    name = thread_name.rstrip("0123456789").rstrip("-")
    return _ROLES.get(name, name)


def cpu_by_role(pid: int) -> dict[str, float]:
    """Return the CPU seconds that a process and its descendants have spent so far, by what their threads are for."""
    spent: dict[str, float] = {}
    for member in process_tree(pid):
        for task in Path(f"/proc/{member}/task").glob("[0-9]*"):
            try:
                name = (task / "comm").read_text().strip()
                seconds = _cpu_seconds(task)
            except OSError:
                continue
            role = role_of(name)
            spent[role] = spent.get(role, 0.0) + seconds
    return spent


def _cpu_seconds(task: Path) -> float:
    """Return what a thread has spent, to the nanosecond where the kernel counts so, else in ticks."""
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants, shared pages counted in each."""
    total = 0
    for member in process_tree(pid):
        try:
            total += int(Path(f"/proc/{member}/statm").read_text().split()[1]) * _PAGE_BYTES
        except OSError:
            continue
    return total


def scrape(host: str, port: int, headers: Mapping[str, str] | None = None) -> dict[str, float]:
    """Return every sample of the server's `/metrics`, by its name with labels; empty where there is none."""
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("GET", "/metrics", headers=dict(headers or {}))
        answer = connection.getresponse()
        text = answer.read().decode() if answer.status == 200 else ""
    except (OSError, http.client.HTTPException):
        return {}
    finally:
        connection.close()
    samples = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            samples[name] = float(value)
    return samples


@dataclass(frozen=True, slots=True)
class Glance:
    """The server at one moment."""

    at: float
    cpu: dict[str, float]
    rss: int
    metrics: dict[str, float]
    own_cpu_s: float  # of the generator, with its processes that have ended

    @classmethod
    def take(cls, host: str, port: int, pid: int | None, headers: Mapping[str, str] | None = None) -> Glance:
        metrics = scrape(host, port, headers)
        cpu, rss = (cpu_by_role(pid), resident_bytes(pid)) if pid is not None else ({}, 0)
        return cls(time.perf_counter(), cpu, rss, metrics, sum(os.times()[:4]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUse:
    """What the server spent between two glances; fields are empty where it could not be seen."""

    seconds: float
    cpu_s_by_role: dict[str, float]
    rss_mb: float
    generator_cpu_s: float
    device_idle_share: float | None  # 0 to 1; of engines that say how long their device worked
    gc_pause_s: float
    num_gc_pauses: int

    @property
    def cpu_s(self) -> float:
        return sum(self.cpu_s_by_role.values())

    @classmethod
    def between(cls, before: Glance, after: Glance) -> ServerUse:
        def grew(name: str) -> float:
            name = f"ftserve_{name}"
            return after.metrics.get(name, 0.0) - before.metrics.get(name, 0.0)

        busy, idle = grew("device_busy_seconds_total"), grew("device_idle_seconds_total")
        cpu = {role: spent - before.cpu.get(role, 0.0) for role, spent in after.cpu.items()}
        return cls(
            seconds=after.at - before.at,
            cpu_s_by_role={role: spent for role, spent in sorted(cpu.items()) if spent > 0},
            rss_mb=after.rss / 1e6,
            generator_cpu_s=after.own_cpu_s - before.own_cpu_s,
            device_idle_share=idle / (busy + idle) if busy > 0 else None,
            gc_pause_s=grew("gc_pause_seconds_sum"),
            num_gc_pauses=int(grew("gc_pause_seconds_count")),
        )
