"""A plan of the recorded Llama-3-70B step on 512 v5p: sums that an independent reading gives."""

import dataclasses
import lzma
import re

import pytest

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.errors import UserError
from mfu_jax.planning.compilation.compiling import TooLarge
from mfu_jax.planning.result.plan import Plan, StepWork, warning_of
from mfu_jax.planning.result.planner import make_plan
from mfu_jax.planning.result.verdict import plan_verdict
from mfu_jax.planning.step_time.compared_runs import residuals
from mfu_jax.planning.targets import parse_target, target_of
from mfu_jax.util.formatting import seconds_text
from tests.support.fake_compiler import TEXT
from tests.support.paths import RECORDED
from tests.support.program_kernels import LLAMA_70B

TARGET = parse_target(topology="v5p:8x8x8")
EXECUTED = 9_134_399_006_179_328  # by hand in tests/flops/executed/test_recorded_programs.py
MODEL = 7_360_126_541_365_248
TOKENS = 16_384


@pytest.fixture(scope="module")
def text():
    return lzma.decompress((RECORDED / "v5p_llama70b.hlo.xz").read_bytes()).decode()


@pytest.fixture(scope="module")
def plan(text):
    work = StepWork(model_flops=MODEL, tokens=TOKENS, convention="exact")
    memory = {"peak_memory_in_bytes": 60 * 2**30, "argument_size_in_bytes": 2**30}
    return make_plan(ProgramDump(text=text, memory=memory), TARGET, work=work)


def test_the_bound_is_the_matmuls_at_their_peak(plan):
    assert plan.step_time_bound_seconds == pytest.approx(EXECUTED / 459e12)
    assert plan.mfu_ceiling == pytest.approx(MODEL / EXECUTED)


def test_matmuls_reach_their_share_of_the_peak_in_each_trip(plan):
    """All but attention's: 2 matmuls a layer, 2 again and 7 backward, of 65/128 of all pairs."""
    forward = LLAMA_70B.L * LLAMA_70B.layer["attention"] * 65 / 128 / 512
    matmuls = (EXECUTED - (2 + 2 + 7) / 2 * forward) / (0.92 * 459e12)
    assert plan.time_by_cause["matmul"] == pytest.approx(matmuls, rel=0.001)


def test_xlas_cycles_of_a_dump_change_nothing(text, plan):
    """A plan's compiler is stopped before it writes them."""
    scheduled = re.sub(r'"estimated_cycles":"\d+"', '"estimated_cycles":""', text)
    found = make_plan(ProgramDump(text=scheduled), TARGET)
    assert found.time_by_cause == plan.time_by_cause


def test_the_peak_is_that_of_hbm_where_activations_are_offloaded():
    """10 of arguments and 13 of temporaries, of which 22 are on the host: libtpu prints 32."""
    memory = {
        "peak_memory_in_bytes": 32 * 2**30,
        "argument_size_in_bytes": 10 * 2**30,
        "output_size_in_bytes": 10 * 2**30,
        "alias_size_in_bytes": 10 * 2**30,
        "temp_size_in_bytes": 13 * 2**30,
        "host_temp_size_in_bytes": 22 * 2**30,
    }
    found = make_plan(ProgramDump(text=TEXT, memory=memory), parse_target(topology="v6e-8"))
    assert (found.fits, found.memory_peak_bytes) == (True, 23 * 2**30)


def test_the_peak_of_a_gpu_has_the_gaps_between_temporaries():
    """As job 1195 of `test_what_compilers_do_not_refuse`: 108.63 GiB could not be allocated."""
    memory = {
        "peak_memory_in_bytes": 160 * 2**30,
        "argument_size_in_bytes": int(58.61 * 2**30),
        "output_size_in_bytes": int(58.61 * 2**30),
        "alias_size_in_bytes": int(58.61 * 2**30),
        "temp_size_in_bytes": int(108.63 * 2**30),
    }
    target = target_of({"hardware": "b200", "devices": "64", "memory_fraction": "0.93"})
    found = make_plan(ProgramDump(text=TEXT, memory=memory), target)
    assert found.memory_peak_bytes == pytest.approx(167.24 * 2**30)
    assert sum(found.memory.values()) == found.memory_peak_bytes
    assert not found.fits


def test_the_parts_of_the_prediction_sum_to_it(plan):
    assert sum(plan.time_by_cause.values()) == pytest.approx(plan.step_time_seconds)
    assert plan.step_time_seconds >= plan.step_time_bound_seconds


def test_a_step_at_its_bound_says_by_what():
    memory = {"argument_size_in_bytes": 10**13}  # that the program does not read
    found = make_plan(ProgramDump(text=TEXT, memory=memory), parse_target(topology="v6e-8"))
    assert found.step_time_seconds == found.step_time_bound_seconds > 5.0
    assert next(iter(found.time_by_cause)) == "bound by hbm"
    assert sum(found.time_by_cause.values()) == pytest.approx(found.step_time_seconds)


def test_what_the_trainers_loop_adds_is_part_of_the_prediction():
    plans = [
        make_plan(
            ProgramDump(text=TEXT),
            TARGET,
            work=StepWork(model_flops=None, tokens=0.0, convention="", loop_seconds=seconds),
        )
        for seconds in (0.0, 0.5)
    ]
    assert plans[1].step_time_seconds == pytest.approx(plans[0].step_time_seconds + 0.5)
    assert plans[1].time_by_cause["the trainer's loop"] == 0.5


def test_rates_follow_from_the_time(plan):
    assert plan.mfu == pytest.approx(MODEL / 459e12 / plan.step_time_seconds)
    assert plan.hfu == pytest.approx(EXECUTED / 459e12 / plan.step_time_seconds)
    assert plan.tokens_per_sec_per_chip == pytest.approx(TOKENS / plan.step_time_seconds)


def test_all_collectives_are_exposed_where_the_program_has_no_asynchronous_ones(plan):
    assert "  transfers  " in str(plan)
    assert " ".join(str(plan).split()).startswith(plan_verdict(plan).sentence)
    for row in plan.collectives:
        assert row["hidden_seconds"] == 0
        assert row["exposed_seconds"] == pytest.approx(row["seconds"])


@pytest.mark.parametrize(("low", "expected"), [(0.9, 0.9), (0.1, None)])
def test_the_range_is_that_of_other_runs_and_above_the_bound(text, plan, low, expected):
    ranged = make_plan(ProgramDump(text=text), TARGET, residuals=(low, 1.2))
    seconds, bound = ranged.step_time_seconds, ranged.step_time_bound_seconds
    assert ranged.step_time_range == (expected * seconds if expected else bound, 1.2 * seconds)
    assert f"({seconds_text(ranged.step_time_range[0])} to" in str(ranged)
    low, high = residuals("tpu")
    least = max(plan.step_time_bound_seconds, low * plan.step_time_seconds)
    assert plan.step_time_range == (least, high * plan.step_time_seconds)


def test_the_range_of_gpus_is_the_time_at_other_shares_of_the_peaks():
    """Three arrays of 8 × 8 numbers are bound by HBM: 0.87 and 0.7 of its bandwidth, for 0.79."""
    found = make_plan(ProgramDump(text=TEXT), parse_target(hardware="h100", devices=1))
    launch = 1.5e-6
    seconds = found.step_time_seconds - launch
    assert found.step_time_range == pytest.approx(
        (launch + seconds * 0.79 / 0.87, launch + seconds * 0.79 / 0.7)
    )


@pytest.mark.parametrize(
    ("chips", "gib", "fits", "note"),
    [
        ({"hardware": "h100", "devices": "8"}, 50, True, False),
        ({"hardware": "h100", "devices": "8"}, 79, True, True),
        ({"hardware": "h100", "devices": "8"}, 81, False, False),
        ({"hardware": "h100", "devices": "8", "memory_fraction": "0.94"}, 74, True, False),
        ({"hardware": "h100", "devices": "8", "memory_fraction": "0.8"}, 74, False, True),
        # DeepSeek-V3 on B200, 8 sequences: arguments of 58.61 GiB and temporaries of 108.63 (jobs
        # 1195 and 4403 of amd-agi/maxtext-slurm@198a4309c, docs/b200-benchmark-report.md).
        ({"hardware": "b200", "devices": "64", "memory_fraction": "0.93"}, 167.24, False, True),
        ({"hardware": "b200", "devices": "64", "memory_fraction": "0.95"}, 167.24, True, False),
        ({"topology": "v5p:2x2x2"}, 95.7, True, False),  # libtpu's limit is 95.74
        ({"topology": "v5p:2x2x2"}, 95.8, False, False),  # a dump of other chips
        ({"topology": "v6e:2x4"}, 31.2, True, False),  # 31.25 of 32
        ({"topology": "v6e:2x4"}, 31.5, False, False),
    ],
)
def test_what_compilers_do_not_refuse(chips, gib, fits, note):
    """GPU compilers compile what does not fit; JAX takes three quarters of a GPU, or as told."""
    memory = {"peak_memory_in_bytes": int(gib * 2**30)}
    found = make_plan(ProgramDump(text=TEXT, memory=memory), target_of(chips))
    assert found.fits == fits
    assert ("of what JAX takes" in str(found)) == (fits and "memory_fraction" in chips)
    assert any("XLA_PYTHON_CLIENT_MEM_FRACTION" in line for line in found.notes) == note


def test_a_refused_program_does_not_fit():
    refusal = TooLarge(used_bytes=38 * 2**30, limit_bytes=31 * 2**30, message="38G exceeds 31G")
    plan = make_plan(refusal, TARGET)
    assert not plan.fits
    assert (plan.memory_peak_bytes, plan.memory_limit_bytes) == (38 * 2**30, 31 * 2**30)
    assert plan.step_time_seconds is None
    scheduled = dataclasses.replace(refusal, program=ProgramDump(text=TEXT))
    plan = make_plan(scheduled, TARGET)
    assert (plan.fits, plan.memory_peak_bytes) == (False, 38 * 2**30)
    assert plan.step_time_seconds == make_plan(scheduled.program, TARGET).step_time_seconds
    assert "had it fitted" in plan.notes[-2]


@pytest.mark.parametrize(
    ("name", "spare", "is_told", "products"),
    [
        ("d.7.remat", 0, True, 2),
        ("e.7", 0, False, 2),
        ("d.7.remat", 127, True, 2),  # 128 bytes are recomputed
        ("d.7.remat", 128, False, 1),
        ("e.7", 128, False, 2),
    ],
)
def test_what_the_compiler_recomputes_is_told_unless_the_runs_kernel_leaves_room_for_it(
    name, spare, is_told, products
):
    """Two products of 2·8·4·4 FLOPs; XLA names the one that it makes again."""
    dot = "dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = f"""HloModule m, num_partitions=1
ENTRY %main (x: f32[8,4], w: f32[4,4]) -> (f32[8,4], f32[8,4]) {{
  %x = f32[8,4] parameter(0)
  %w = f32[4,4] parameter(1)
  %d.7 = f32[8,4] {dot}
  %{name} = f32[8,4] {dot}
  ROOT %t = (f32[8,4], f32[8,4]) tuple(%d.7, %{name})
}}
"""
    work = StepWork(model_flops=None, tokens=0, convention="", partial_gradient_bytes=spare)
    plan = make_plan(ProgramDump(text=text), parse_target(topology="v6e-1"), work=work)
    assert plan.executed_flops == products * 256
    assert plan.bound_by_resource["matmul"] == pytest.approx(products * 256 / 918e12)
    told = [note for note in plan.notes if note.startswith("memory is short")]
    assert len(told) == is_told
    assert all("2.56e-10 TFLOP of matmuls a step (50.0% of what runs)" in note for note in told)


def test_a_plan_for_a_tpu7x_says_which_clock_state_a_run_must_set():
    plan = make_plan(ProgramDump(text=TEXT), parse_target(topology="tpu7x:2x2x1"))
    assert plan.clock_state == "--xla_tpu_dvfs_p_state=7"
    (note,) = (note for note in plan.notes if "LIBTPU_INIT_ARGS" in note)
    assert "8 to 15% longer" in note
    assert not make_plan(ProgramDump(text=TEXT), TARGET).clock_state


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--xla_tpu_dvfs_p_state=7", "--xla_a=1"), ""),
        (("--xla_tpu_dvfs_p_state=3",), "this run's clock state is --xla_tpu_dvfs_p_state=3"),
        ((), "this run's clock state is default"),
    ],
)
def test_a_plan_of_a_run_says_which_clock_state_the_run_had(flags, said):
    target = parse_target(topology="tpu7x:2x2x1")
    notes = make_plan(ProgramDump(text=TEXT), target, flags=flags, follows_run=True).notes
    assert [said in note for note in notes if "p_state" in note] == ([True] if said else [])


@pytest.mark.parametrize(
    ("exposed", "used", "first"),
    [(1.9, 0.95, ""), (3.0, 0.85, ""), (3.0, 0.95, "30.0% waits for transfers")],
)
def test_long_waits_near_the_memorys_limit_are_in_the_first_line(exposed, used, first):
    kind = "collective-permute over tensor on ici"
    row = {"kind": kind, "seconds": 3.0, "hidden_seconds": 0.0, "exposed_seconds": exposed}
    plan = Plan(
        **{"target": "v5e:2x4", "chips": 8, "fits": True, "step_time_seconds": 10.0},
        **{"memory_peak_bytes": int(used * 2**34), "memory_limit_bytes": 2**34},
        collectives=(row,),
    )
    assert warning_of(plan).startswith(first)
    assert bool(warning_of(plan)) == bool(first)


def test_a_run_at_the_default_clock_computes_more_slowly(text):
    """The two published pairs: Llama 8B with and without p-state 7, and Hy3-295B."""
    target, program = parse_target(topology="tpu7x:2x2x1"), ProgramDump(text=text)
    fast, slow = (make_plan(program, target, follows_run=of_run) for of_run in (False, True))
    assert slow.time_by_cause["matmul"] / fast.time_by_cause["matmul"] > 23.54 / 21.67
    assert slow.time_by_cause["matmul"] / fast.time_by_cause["matmul"] < 213.68 / 186.48
    assert slow.step_time_bound_seconds == fast.step_time_bound_seconds
    refused = TooLarge(used_bytes=2, limit_bytes=1, message="too large", program=program)
    assert make_plan(refused, target, follows_run=True).time_by_cause == slow.time_by_cause


def test_integer_matmuls_are_elementwise_work():
    """No unit has a peak for them."""
    wide = """
  %i = s32[12,128] parameter(1)
  %t = s32[128,128] parameter(2)
  %sums = s32[12,128] dot(%i, %t), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %d ="""
    text = TEXT.replace("ROOT %d =", wide.lstrip()).replace(
        "(x: f32[8,8])", "(x: f32[8,8], i: s32[12,128], t: s32[128,128])"
    )
    target = parse_target(topology="tpu7x:2x2x1")
    work = StepWork(model_flops=1024, tokens=1, convention="exact")
    alone, both = (make_plan(ProgramDump(text=t), target, work=work) for t in (TEXT, text))
    assert both.executed_flops == alone.executed_flops == 1024
    assert both.time_by_cause["matmul"] == alone.time_by_cause["matmul"]
    assert both.time_by_cause["vector"] > alone.time_by_cause.get("vector", 0.0)


def test_more_hosts_take_longer_than_one():
    """Llama 3.1 405B in NeMo: 17.5 s on 72 hosts, 17.7 s on 288 (dgxc-benchmarking v25.02)."""
    program = ProgramDump(text=TEXT)
    one, few, many = (
        make_plan(program, parse_target(hardware="h100", devices=8 * hosts))
        for hosts in (1, 72, 288)
    )
    slower = many.step_time_seconds / few.step_time_seconds
    assert slower == pytest.approx(17.7 / 17.5, abs=0.003)
    assert "hosts out of step" in few.time_by_cause
    assert "hosts out of step" not in one.time_by_cause


def test_slices_take_longer_than_one():
    """MaxText's table of a 64B model on v5e: 118 TFLOP/s on one slice, 112 on two, 110 on four."""
    program = ProgramDump(text=TEXT)
    one, two, four = (
        make_plan(program, parse_target(topology="v5e:2x4", slices=slices)).step_time_seconds
        for slices in (1, 2, 4)
    )
    assert two / one == pytest.approx(118 / 112, rel=0.03)
    assert four / one == pytest.approx(118 / 110, rel=0.03)


def test_a_dtype_without_a_peak_is_refused_with_what_a_plan_can_change():
    """It has no argument for a peak."""
    with pytest.raises(UserError, match="TPU v5e has no listed fp8 peak") as caught:
        make_plan(ProgramDump(text=FLOAT8), parse_target(topology="v5e-1"))
    assert "a plan needs another dtype, quantization or chip" in caught.value.hint


FLOAT8 = """HloModule m
ENTRY %main (x: f8e4m3fn[128,128]) -> f32[128,128] {
  %x = f8e4m3fn[128,128] parameter(0)
  ROOT %d = f32[128,128] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
SLICE = """HloModule m, num_partitions=8
ENTRY %main (x: bf16[512,4096]) -> (bf16[4096,4096], bf16[2048,4096]) {
  %x = bf16[512,4096] parameter(0)
  %e = bf16[4096,4096] all-gather(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %f = bf16[2048,4096] all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  ROOT %t = (bf16[4096,4096], bf16[2048,4096]) tuple(%e, %f)
}
"""


@pytest.mark.parametrize(
    ("mesh", "eight", "four"),
    [
        ({"data": 2, "fsdp": 8}, " over fsdp", ""),
        ({"fsdp": 16}, " over fsdp", ""),
        ({"data": 2, "fsdp": 2, "tensor": 4}, " over fsdp+tensor", " over tensor"),
        ({"data": 4, "fsdp": 4}, " over data+fsdp", " over fsdp"),
    ],
)
def test_axes_have_their_names_within_one_of_two_slices(mesh, eight, four):
    """XLA compiles one slice's program, of 8 devices; slices lie along the first axes."""
    work = StepWork(model_flops=None, tokens=0, convention="", mesh=mesh)
    chips = parse_target(topology="v6e-8", slices=2)
    plan = make_plan(ProgramDump(text=SLICE), chips, work=work)
    assert {row["kind"] for row in plan.collectives} == {
        f"all-gather{eight} on ici",
        f"all-gather{four} on ici",
    }


CONDITIONAL = """HloModule m
%heavy (w: bf16[4096,4096]) -> bf16[4096,4096] {
  %w = bf16[4096,4096] parameter(0)
  ROOT %d = bf16[4096,4096] dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%light (x: bf16[4096,4096]) -> bf16[4096,4096] {
  ROOT %x = bf16[4096,4096] parameter(0)
}
ENTRY %main (i: pred[], y: bf16[4096,4096]) -> bf16[4096,4096] {
  %i = pred[] parameter(0)
  %y = bf16[4096,4096] parameter(1)
  ROOT %c = bf16[4096,4096] conditional(%i, %y, %y), true_computation=%heavy, \
false_computation=%light, metadata={op_name="jit(step)/cond"}
}
"""


def test_a_bound_of_the_most_expensive_branch_says_so():
    """Of a product and nothing, the product is in the bound; a run may do nothing."""
    plan = make_plan(ProgramDump(text=CONDITIONAL), parse_target(topology="v6e-1"))
    assert plan.bound_by_resource["matmul"] == pytest.approx(2 * 4096**3 / 918e12)
    (note,) = plan.notes
    assert "jit(step)/cond" in note
    assert note.endswith("; runs of another branch may be faster than the bound")
