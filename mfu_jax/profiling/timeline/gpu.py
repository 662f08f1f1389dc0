"""GPU devices: streams of kernels and copies.

A kernel launched by the host carries ``hlo_op`` and ``hlo_module``. One launched by a command
buffer has only its own name, which XLA derives from the instruction's, or from that of another
instruction with the same code; its ``hlo_op``, if any, is the command buffer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from mfu_jax.profiling.timeline.devices import (
    DeviceTimeline,
    Executions,
    Lane,
    LaneEvents,
    OpName,
    OpTable,
    Program,
    by_start,
    copy_kind,
    groups,
    numbered,
    spans,
)
from mfu_jax.profiling.trace.wire import IntArray
from mfu_jax.profiling.trace.xspace import ABSENT, EventColumns, Trace, XPlane

PLANE = "/device:GPU:"
_STREAM = "Stream #"
_LAUNCH, _GRAPH, _NODE = "correlation_id", "cuda_graph_id", "cuda_graph_node_id"
_NUMBERS = ("program_id", _LAUNCH, _GRAPH, _NODE)
_TEXTS = ("hlo_op", "hlo_module")
_BUFFER = re.compile(r"command_buffer([._]\d+)*")
_SHARED = 0.02  # of a program's ops run as often as the program, at least
_IN_GRAPH = 2**32 - 1  # the part of a node's number that is not its graph's


def timelines(trace: Trace, plane: XPlane) -> Iterator[DeviceTimeline]:
    """A plane's device; none if nothing ran on it."""
    lines = [line for line in plane.lines if line.name.startswith(_STREAM) and len(line)]
    if not lines:
        return
    table = OpTable()
    found = [line.events(_NUMBERS, _TEXTS) for line in lines]
    events = LaneEvents.of(list(_lanes(trace, plane, found, table)))
    metadata = np.concatenate([columns.metadata for columns in found])
    kinds, kernels = np.unique(metadata, return_inverse=True)
    yield DeviceTimeline(
        device=plane.name.removeprefix("/device:"),
        platform="gpu",
        kind=str(plane.stats.get("gpu_device_name", "")),
        names=table.names,
        **events._asdict(),
        executions=_executions(table.names, events),
        kernels=kernels,
        kernel_names=tuple(plane.about(kind).name for kind in kinds.tolist()),
    )


def _lanes(
    trace: Trace, plane: XPlane, found: Sequence[EventColumns], table: OpTable
) -> Iterator[Lane]:
    positions = _positions(found)
    for events, position in zip(found, positions, strict=True):
        columns = [events.metadata, events.texts["hlo_op"], events.texts["hlo_module"]]
        columns += [events.numbers["program_id"], position]
        columns.append(np.where(position == ABSENT, ABSENT, events.numbers[_GRAPH]))
        ops = numbered(lambda *row: table.number(_name(trace, plane, *row)), *columns)
        yield ops, events.starts, events.ends


def _positions(lanes: Sequence[EventColumns]) -> list[IntArray]:
    """Where each kernel stands in its command buffer: the order in which its nodes usually start.

    `ABSENT` for everything that no CUDA graph launched. A launch may use several streams.
    """
    sizes = np.cumsum([len(lane.starts) for lane in lanes])[:-1]
    nodes = np.concatenate([lane.numbers[_NODE] for lane in lanes])
    out = np.full(len(nodes), ABSENT)
    inside = np.flatnonzero(nodes != ABSENT)
    if len(inside):
        starts = np.concatenate([lane.starts for lane in lanes])[inside]
        launches = np.concatenate([lane.numbers[_LAUNCH] for lane in lanes])[inside]
        graphs = np.concatenate([lane.numbers[_GRAPH] for lane in lanes])[inside]
        launch = groups(launches, graphs)
        first, _ = spans(launch, int(np.max(launch)) + 1, starts, starts)
        node = groups(graphs, nodes[inside] & _IN_GRAPH)
        usual = np.bincount(node, starts - first[launch]) / np.bincount(node)
        graph = np.zeros(len(usual), np.int64)
        graph[node] = graphs
        order = np.lexsort((usual, graph))
        place = np.zeros(len(usual), np.int64)
        place[order] = np.arange(len(usual)) - np.searchsorted(graph[order], graph[order])
        out[inside] = place[node]
    return np.split(out, sizes)


def _name(
    trace: Trace, plane: XPlane, kernel: int, op: int, module: int, number: int, at: int, graph: int
) -> OpName:
    program = Program("" if module == ABSENT else trace.texts[module], number)
    # The name may include a command buffer or async wrapper: outer name, then inner.
    text = "" if op == ABSENT else trace.texts[op].rpartition("/")[2]
    if text and not _BUFFER.fullmatch(text):
        return OpName(program, text)
    # AMD's kernels are named after their descriptors.
    name = plane.about(kernel).name.removesuffix(".kd")
    if at == ABSENT:
        return OpName(program, name, is_kernel=True)
    return OpName(program, name, True, f"{text or 'graph'} {graph}", at)


def _executions(names: tuple[OpName, ...], events: LaneEvents) -> Executions:
    """Executions of each program, separated by the first of its ops that run once in each.

    They begin where that op does, so their spacing is right; they end with their last op. A copy
    that neither a program nor a graph launched is the loop's, such as that of a result to the host.
    """
    programs: list[Program] = []
    begins: list[IntArray] = [np.zeros(0, np.int64)]
    finishes: list[IntArray] = [np.zeros(0, np.int64)]
    numbers = {program: number for number, program in enumerate({n.program: 0 for n in names})}
    of_name = [ABSENT if _is_loops(name) else numbers[name.program] for name in names]
    of_event = np.array(of_name, np.int64)[events.ops]
    for program, number in numbers.items():
        chosen = np.flatnonzero(of_event == number)
        if not len(chosen):
            continue
        begin = _begins(events.ops[chosen], events.starts[chosen])
        within = np.maximum(np.searchsorted(begin, events.starts[chosen], "right") - 1, 0)
        begins.append(begin)
        finishes.append(spans(within, len(begin), begin[within], events.ends[chosen])[1])
        programs += [program] * len(begin)
    return by_start(programs, np.concatenate(begins), np.concatenate(finishes))


def _is_loops(name: OpName) -> bool:
    """Whether an op is a copy that no program launched."""
    return bool(copy_kind(name.name)) and not (name.program.module or name.buffer)


def _begins(ops: IntArray, starts: IntArray) -> IntArray:
    """The starts of the op that marks a program's executions.

    A few ops may be missing in some executions, or have another name there.
    """
    kinds, inverse, counts = np.unique(ops, return_inverse=True, return_counts=True)
    first, _ = spans(inverse, len(kinds), starts, starts)
    numbers, shared = np.unique(counts, return_counts=True)
    usual = np.min(numbers[shared >= _SHARED * len(kinds)], initial=np.max(counts))
    mark = np.lexsort((first, counts != usual))[0]
    return np.sort(starts[inverse == mark])
