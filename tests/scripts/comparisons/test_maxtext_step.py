"""scripts/comparisons/maxtext_step.py: figures of a handwritten program."""

from __future__ import annotations

import dataclasses

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.planning.targets import parse_target
from scripts.comparisons.maxtext_step import Figures, figures, header, row

# 2 · 64³ FLOPs over three arrays of 64² floats; 700 cycles.
TEXT = """HloModule jit_f
ENTRY %main (x: f32[64,64], y: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64] parameter(0)
  %y = f32[64,64] parameter(1)
  ROOT %d = f32[64,64] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}, backend_config={"window_config":{"estimated_cycles":"700"}}
}
"""  # noqa: E501
MEMORY = {"temp_size_in_bytes": 3 * 2**30, "peak_memory_in_bytes": 4 * 2**30}


def test_figures_and_ratios_of_two_steps() -> None:
    ours = figures(ProgramDump(text=TEXT, memory=MEMORY), parse_target(topology="v6e-8"))
    assert ours == Figures(
        temporaries=3 * 2**30,
        peak=4 * 2**30,
        cycles=700,
        hbm_bytes=3 * 4 * 64**2,
        collective_bytes=0,
        executed_flops=2 * 64**3,
        all_gathers=0,
        seconds=ours.seconds,
    )
    theirs = dataclasses.replace(ours, temporaries=4 * 2**30, cycles=None)
    cells = row("f on 8 v6e", ours, theirs).split(" | ")
    assert len(cells) == len(header().splitlines()[0].split(" | "))
    assert cells[:4] == ["| f on 8 v6e", "3 / 4 = 0.750", "4 / 4 = 1.000", "7e-07 / –"]
