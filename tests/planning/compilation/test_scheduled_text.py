"""Sizes of a program from XLA's assignment of buffers, added up by hand."""

import os
import time

from mfu_jax.planning.compilation.scheduled_text import (
    is_scheduled,
    memory_of_buffers,
    read_scheduled,
)

BUFFERS = """BufferAssignment:
allocation 0: size 100, thread-local:
 value: <2 reduce @0> (size=100,offset=0): f32[]
allocation 1: size 4000, parameter 0, shape |bf16[4,256]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 800, parameter 1, shape |bf16[1024]| at ShapeIndex {}:
allocation 3: size 30, maybe-live-out:
allocation 4: size 7, constant:
allocation 5: size 20000, preallocated-temp:
allocation 6: size 33, color 1, preallocated-temp:
allocation 7: size 500000, color 5, preallocated-temp:
"""


def test_sizes_in_hbm_and_what_is_offloaded():
    assert memory_of_buffers(BUFFERS) == {
        "peak_memory_in_bytes": 100 + 4000 + 800 + 30 + 7 + 20000,
        "argument_size_in_bytes": 4800,
        "output_size_in_bytes": 4030,
        "alias_size_in_bytes": 4000,
        "temp_size_in_bytes": 20000,
        "host_temp_size_in_bytes": 500000,
    }


def test_no_dump_is_no_program(tmp_path):
    assert read_scheduled(tmp_path) is None


SCHEDULE = """HloModule jit_step, is_scheduled=true

ENTRY %main () -> f32[] {
  ROOT %c = f32[] constant(1)
}

"""


def _dumped(folder, text):
    """What XLA has written of a program until it reports its memory."""
    name = folder / "m0.jit_step.after_optimizations"
    name.with_name(f"{name.name}.txt").write_text(text)
    name.with_name(f"{name.name}-buffer-assignment.txt").write_text(BUFFERS)
    report = name.with_name(f"{name.name}-memory-usage-report.txt")
    report.write_text("Total bytes used: 1")
    return report


def test_a_program_whose_buffers_are_old_is_scheduled(tmp_path):
    report = _dumped(tmp_path, SCHEDULE)
    assert not is_scheduled(tmp_path)  # the compiler may still refuse it
    os.utime(report, (time.time() - 120,) * 2)
    assert is_scheduled(tmp_path)
    assert read_scheduled(tmp_path).text == SCHEDULE


def test_a_schedule_that_is_being_written_again_is_waited_for(tmp_path):
    os.utime(_dumped(tmp_path, SCHEDULE[:60]), (time.time() - 120,) * 2)
    last = "m0.jit_step.after_optimizations_after_buffer_assignment.txt"
    (tmp_path / last).write_text(SCHEDULE)
    assert not is_scheduled(tmp_path)
    assert read_scheduled(tmp_path) is None  # the compile ran out of time


def test_a_small_program_does_not_end_the_compile_of_the_step(tmp_path):
    _dumped(tmp_path, SCHEDULE)
    small = "m1.jit_init.after_optimizations_after_buffer_assignment.txt"
    (tmp_path / small).write_text(SCHEDULE)
    assert not is_scheduled(tmp_path)
