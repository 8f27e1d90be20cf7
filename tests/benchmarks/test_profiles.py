"""Reading profiles and projecting to more cores."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from benchmarks.scaling import Point, projection, sigma
from benchmarks.stacks import OTHER, Profile, flame_graph

SCRIPT = """\
ft-out-0 19945
\t          1dcab0 _Py_TryIncrefFast (inlined)
\t          19cb10 PyObject_GetAttr (/opt/bin/python3.13t)
\t              85 py::Reply._close:/src/server/reply.py (/tmp/jitted-1-2.so)
\t          13711f py_trampoline_evaluator (/opt/bin/python3.13t)
\t          101984 _PyEval_EvalFrameDefault (inlined)
\t              85 py::OutputThread._run:/src/server/output.py (/tmp/jitted-1-3.so)
\t              85 py::Thread.run:/opt/lib/threading.py (/tmp/jitted-1-4.so)
\t          1098eb clone3 (/usr/lib/libc.so.6)

tokio-rt-worker 19977
\tffffffff8200ddd4 tcp_sendmsg_locked ([kernel.kallsyms])
\tffffffff821ecc51 do_syscall_64 ([kernel.kallsyms])
\t         1256dbf [unknown] (/site/granian/_granian.cpython-313t.so)
\t         1256dbf [unknown] (/site/granian/_granian.cpython-313t.so)

ft-out-1 19946
\t              85 py::Reply._close:/src/server/reply.py (/tmp/jitted-1-2.so)
\t              85 py::OutputThread._run:/src/server/output.py (/tmp/jitted-1-3.so)
"""


def test_stacks_are_folded_by_role_without_the_interpreters_plumbing() -> None:
    profile = Profile.read(SCRIPT.splitlines(keepends=True))
    assert profile.folded().splitlines() == [
        "http;_granian;do_syscall_64;tcp_sendmsg_locked 1",
        "output;output.OutputThread._run;reply.Reply._close 1",
        "output;threading.Thread.run;output.OutputThread._run;reply.Reply._close;PyObject_GetAttr;_Py_TryIncrefFast 1",
    ]


def test_a_stack_that_goes_in_a_circle_is_cut() -> None:
    frames = "".join(f"\t{k:16x} {name} (/opt/bin/python)\n" for k, name in enumerate(["b", "a"] * 50))
    assert Profile.read(f"ft-engine 1\n{frames}\n".splitlines(keepends=True)).folded() == "engine;a;b;a;b;a;b 1\n"


def test_each_sample_falls_into_the_category_of_its_innermost_native_frame() -> None:
    profile = Profile.read(SCRIPT.splitlines(keepends=True))
    assert profile.categories == {"output": {"reference counts": 1, OTHER: 1}, "http": {"network": 1}}
    assert profile.table().splitlines()[0].startswith("output        66.7 % of samples: ")


def test_what_a_role_spends_most_in() -> None:
    hottest = Profile.read(SCRIPT.splitlines(keepends=True)).hottest("output")
    assert hottest == [("output.OutputThread._run", 1.0), ("reply.Reply._close", 1.0)]


def test_a_flame_graph_is_well_formed_and_says_shares() -> None:
    svg = flame_graph(Profile.read(SCRIPT.splitlines(keepends=True)), "a <title> & more")
    assert ET.fromstring(svg).tag.endswith("svg")
    assert "<title>output: 66.7 %</title>" in svg


def test_a_projection_loses_by_contention_and_ends_at_the_engine() -> None:
    points = [Point(1, 100.0, 0.0), Point(2, 110.0, 0.0)]
    assert sigma(points) == pytest.approx(0.1)
    assert projection(points, 1.0, 2) == pytest.approx(2e6 / 110)
    assert projection(points, 1.0, 11) == pytest.approx(11e6 / 200)
    assert projection(points, 50.0, 64) == 20_000
    assert sigma([points[0]]) == 0.0
