"""Two loops with the same code in GPU command buffers: each buffer belongs to its own loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.profiling.join.programs import KnownProgram
from mfu_jax.profiling.join.unnamed_kernels import named_in_buffers
from mfu_jax.profiling.timeline.devices import DeviceTimeline, Executions, OpName, Program

BODY = """
%body_{0} (s: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {{
  %s.{0} = (s32[], f32[64,64]) parameter(0)
  %i.{0} = s32[] get-tuple-element(%s.{0}), index=0
  %x.{0} = f32[64,64] get-tuple-element(%s.{0}), index=1
  %loop_add_fusion.{0} = s32[] fusion(%i.{0}), kind=kLoop, calls=%more
  %custom-call.{0} = f32[64,64] custom-call(%x.{0}, %x.{0}), custom_call_target="__cublas$gemm", backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}}}}
  ROOT %t.{0} = (s32[], f32[64,64]) tuple(%loop_add_fusion.{0}, %custom-call.{0})
}}

%cond_{0} (c: (s32[], f32[64,64])) -> pred[] {{
  %c.{0} = (s32[], f32[64,64]) parameter(0)
  %j.{0} = s32[] get-tuple-element(%c.{0}), index=0
  %n.{0} = s32[] constant(3)
  ROOT %lt.{0} = pred[] compare(%j.{0}, %n.{0}), direction=LT
}}
"""  # noqa: E501
TEXT = f"""HloModule jit_f, is_scheduled=true

%more (p: s32[]) -> s32[] {{
  %p = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %add = s32[] add(%p, %one)
}}
{BODY.format(1)}
{BODY.format(2)}
ENTRY %main (a: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {{
  %a = (s32[], f32[64,64]) parameter(0)
  %while.1 = (s32[], f32[64,64]) while(%a), condition=%cond_1, body=%body_1, backend_config={{"known_trip_count":{{"n":"3"}}}}
  ROOT %while.2 = (s32[], f32[64,64]) while(%while.1), condition=%cond_2, body=%body_2, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""  # noqa: E501
PROGRAM = Program("jit_f", 1)


def timeline(buffers: list[str]) -> DeviceTimeline:
    """Launches of these command buffers: the loops' two kernels each, named after loop 1's."""
    names: dict[OpName, int] = {}
    ops = []
    for buffer in buffers:
        for position, kernel in enumerate(("loop_add_fusion_1", "nvjet_sm90_gemm")):
            name = OpName(PROGRAM, kernel, True, buffer, position)
            ops.append(names.setdefault(name, len(names)))
    starts = np.arange(len(ops)) * 1000
    return DeviceTimeline(
        device="GPU:0",
        platform="gpu",
        kind="NVIDIA H100 80GB HBM3",
        names=tuple(names),
        ops=np.array(ops),
        lanes=np.zeros(len(ops), np.int64),
        starts=starts,
        ends=starts + 500,
        executions=Executions(programs=(), starts=starts[:0], ends=starts[:0]),
    )


def named(buffers: list[str]) -> list[str]:
    ledger: Any = None  # not read
    source = KnownProgram(costs=instruction_costs(TEXT), ledger=ledger)
    join: Any = SimpleNamespace(sources=lambda program: [source])
    found = named_in_buffers(timeline(buffers), join)
    return [found.names[op].name for op in found.ops]


def test_each_loop_has_its_own_buffer() -> None:
    first, second = (["loop_add_fusion." + n, "custom-call." + n] for n in "12")
    buffers = ["command_buffer_7 40"] * 3 + ["command_buffer_3 41"] * 3
    assert named(buffers) == first * 3 + second * 3


def test_a_buffer_that_was_built_again_stays_with_its_loop() -> None:
    first = ["loop_add_fusion.1", "custom-call.1"]
    assert named(["command_buffer_7 40"] * 2 + ["command_buffer_7 55"]) == first * 3
