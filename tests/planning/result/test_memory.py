"""Memory by kind: arguments by their names, and what is carried from one pass to the next."""

import lzma
import math

import pytest

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.planning.result.memory import memory_of
from tests.support.paths import RECORDED

# Llama 3 70B on 512 v5p, fsdp: a device's part of each weight; the program has no optimizer.
WEIGHTS = [
    *((128256, 16), (16, 128256), (80, 16, 8192), (80, 16, 1024), (80, 16, 1024), (80, 8192, 16)),
    *((80, 16, 43008), (80, 43008, 16)),
]
LAYER_INPUTS = 80 * 2 * 8192 * 8192 * 2  # full remat keeps these: two sequences, bfloat16

TEXT = """HloModule jit_step, \
input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }
ENTRY %main (p: f32[64,32], m: f32[64,32], x: f32[8,64]) -> (f32[64,32], f32[64,32]) {
  %p = f32[64,32] parameter(0), metadata={op_name="state.params['w'].value"}
  %m = f32[64,32] parameter(1), metadata={op_name="state.opt_state[0].mu['w'].value"}
  %x = f32[8,64] parameter(2), metadata={op_name="batch['inputs']"}
  %h = f32[8,32] dot(%x, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(step)/jvp(mlp)/dot_general"}
  %kept = f32[8,32] copy(%h)
  %only = f32[8,32] tanh(%h), metadata={op_name="jit(step)/jvp(act)/tanh"}
  %loss = f32[8,32] exponential(%only), metadata={op_name="jit(step)/jvp(loss)/exp"}
  %d = f32[8,32] multiply(%kept, %loss), metadata={op_name="jit(step)/transpose(jvp(mlp))/mul"}
  %g = f32[64,32] dot(%x, %d), lhs_contracting_dims={0}, rhs_contracting_dims={0}, \
metadata={op_name="jit(step)/transpose(jvp(mlp))/dot_general"}
  %new = f32[64,32] add(%g, %m), metadata={op_name="jit(step)/add"}
  %next = f32[64,32] add(%new, %p), metadata={op_name="jit(step)/add"}
  ROOT %out = (f32[64,32], f32[64,32]) tuple(%next, %new)
}
"""


def test_arguments_by_name_and_values_by_pass():
    """%h and %loss go into the backward pass, %only does not; %g waits for the optimizer."""
    memory = memory_of(ProgramDump(text=TEXT))
    assert memory == {
        "parameters": 4 * 64 * 32,
        "optimizer": 4 * 64 * 32,
        "batch": 4 * 8 * 64,
        "gradients": 4 * 64 * 32,
        "activations": 2 * 4 * 8 * 32,
    }


def test_the_compilers_sizes_are_divided():
    sizes = {
        "argument_size_in_bytes": 20480,
        "temp_size_in_bytes": 12000,
        "output_size_in_bytes": 16400,
        "alias_size_in_bytes": 16384,
        "generated_code_size_in_bytes": 5,
        "host_temp_size_in_bytes": 7,
    }
    kinds = memory_of(ProgramDump(text=TEXT, memory=sizes))
    shares = 20480 / (2 * 8192 + 2048)
    assert kinds["parameters"] == kinds["optimizer"] == int(8192 * shares)
    assert kinds["temporaries"] == 12000 - 8192 - 2048
    assert (kinds["new outputs"], kinds["program"], kinds["host"]) == (16, 5, 7)

    peak = 20480 + 16 + 11000
    at_peak = memory_of(ProgramDump(text=TEXT, memory={**sizes, "peak_memory_in_bytes": peak}))
    assert at_peak["temporaries"] == pytest.approx(11000 - 8192 - 2048, abs=2)
    assert sum(at_peak.values()) - 5 - 7 == peak


def test_arguments_in_the_hosts_memory_are_no_part_of_the_devices():
    """The moments; the compiler's total is of the weights and the batch, without padding."""
    text = TEXT.replace("m: f32[64,32]", "m: f32[64,32]{1,0:S(5)}").replace(
        "%m = f32[64,32]", "%m = f32[64,32]{1,0:S(5)}"
    )
    sizes = {"argument_size_in_bytes": 8192 + 2048, "host_temp_size_in_bytes": 7}
    kinds = memory_of(ProgramDump(text=text, memory=sizes))
    assert (kinds["parameters"], kinds["batch"], kinds["host"]) == (8192, 2048, 8192 + 7)
    assert "optimizer" not in kinds


def test_what_a_loop_saves_for_the_backward_loop():
    text = lzma.decompress((RECORDED / "v5p_llama70b.hlo.xz").read_bytes()).decode()
    memory = memory_of(ProgramDump(text=text))
    assert memory["parameters"] == 4 * sum(map(math.prod, WEIGHTS))
    assert memory["batch"] == 4 * 2 * 8192
    tokens = 2 * 8192
    logits = tokens * 128256 * 2
    # Beside them the last layer's output in bfloat16, and ten bytes a token of the loss.
    assert memory["activations"] == LAYER_INPUTS + logits + tokens * (2 * 8192 + 10)


@pytest.mark.parametrize(("name", "kind"), [("a", "state"), ("state.params['w']", "parameters")])
def test_names_that_tell_nothing_are_state(name, kind):
    text = TEXT.replace("state.params['w'].value", name).replace("state.opt_state[0].mu['w']", "b")
    assert memory_of(ProgramDump(text=text))[kind] >= 4 * 64 * 32
