"""What would help most: limits that follow from the program's own counts."""

import lzma

import pytest

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.planning.compilation.compiling import TooLarge
from mfu_jax.planning.result.planner import make_plan
from mfu_jax.planning.targets import parse_target
from tests.support.paths import RECORDED

PEAK = 459e12  # v5p, bfloat16


@pytest.fixture(scope="module")
def text():
    return lzma.decompress((RECORDED / "v5p_llama70b.hlo.xz").read_bytes()).decode()


def _plan(text, peak_gib, flags=()):
    memory = {"peak_memory_in_bytes": peak_gib * 2**30, "argument_size_in_bytes": 2**30}
    target = parse_target(topology="v5p:8x8x8")
    return make_plan(ProgramDump(text=text, memory=memory), target, flags=flags)


def test_each_saving_is_what_the_walk_spends(text):
    plan = _plan(text, peak_gib=60)
    saves = {change.change: change.saves_seconds for change in plan.changes}
    exposed = next(r for r in plan.collectives if r["kind"] == "all-reduce on ici")
    assert saves[
        "hide or remove all-reduce on ici: first, half the devices on its axis"
    ] == pytest.approx(exposed["exposed_seconds"])
    again = executed_flops(text).rematerialized / PEAK
    recompute = next(s for words, s in saves.items() if words.startswith("recompute less"))
    policies = [words.partition("remat_policy=")[2] for words in saves if "recompute" in words]
    assert policies == ["save_qkv_proj"]  # 35 GiB are left, for 80 layers of 80 GiB
    assert again < recompute < 2 * again  # at their peak, at half of it


def test_no_memory_is_promised_where_the_compiler_says_none(text):
    plan = make_plan(ProgramDump(text=text), parse_target(topology="v5p:8x8x8"))
    (recompute,) = (c.change for c in plan.changes if c.change.startswith("recompute less"))
    assert recompute.endswith("remat_policy=save_qkv_proj")


def test_at_most_three_the_largest_first_and_their_gains(text):
    plan = _plan(text, peak_gib=60)
    savings = [change.saves_seconds for change in plan.changes]
    assert len(savings) == 3
    assert savings == sorted(savings, reverse=True)
    for change in plan.changes:
        share = change.saves_seconds / plan.step_time_seconds
        assert change.gain_fraction == pytest.approx(share)


@pytest.mark.parametrize(("peak_gib", "offered"), [(40, True), (60, False)])
def test_a_larger_batch_only_where_it_fits(text, peak_gib, offered):
    """95 GiB hold twice 40 without the state of 1 GiB, not twice 60."""
    words = " ".join(change.change for change in _plan(TRANSFERS, peak_gib).changes)
    assert ("twice the per_device_batch_size=" in words) == offered


def test_no_larger_batch_for_a_step_that_trains_nothing():
    """Its rows are the batch: twice of them take twice the time."""
    words = " ".join(change.change for change in _plan(FORWARD, 40).changes)
    assert "per_device_batch_size" not in words


SHARE = "--xla_tpu_scheduler_percent_shared_memory_limit=100"


@pytest.mark.parametrize(
    ("peak_gib", "flags", "offered"),
    [(88, (), False), (91, (), True), (91, (SHARE,), False)],
)
def test_the_schedulers_memory_is_a_change_close_to_the_limit(text, peak_gib, flags, offered):
    """128B on v5e: 27.0 s planned in 14.9 of 15.75 GiB, 20.0 s in 15.4 with the flag."""
    plan = _plan(text, peak_gib, flags)
    exposed = sum(row["exposed_seconds"] for row in plan.collectives)
    saves = [c.saves_seconds for c in plan.changes if SHARE in c.change]
    assert saves == ([pytest.approx(exposed)] if offered else [])


TRANSFERS = """HloModule jit_step, num_partitions=512
ENTRY %main (p: f32[4096,4096]) -> f32[4096,4096] {
  %p = f32[4096,4096] parameter(0)
  %g = f32[4096,4096] multiply(%p, %p), metadata={op_name="jit(step)/transpose(jvp(mlp))/mul"}
  ROOT %n = f32[4096,4096] add(%g, %p), metadata={op_name="jit(step)/add"}
}
"""
FORWARD = TRANSFERS.replace("transpose(jvp(mlp))", "mlp")


@pytest.mark.parametrize(
    ("chips", "matmul", "times"),
    [
        # Six passes of bfloat16; plain float32 (NVIDIA's data sheet).
        ({"topology": "v5e-8"}, "convolution(%p, %p), dim_labels=bf_io->bf", 6),
        (
            {"hardware": "h100", "devices": 8},
            "dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            989.4 / 66.9,
        ),
    ],
)
def test_matmuls_of_float32_in_full_precision(chips, matmul, times):
    shape = "f32[16384,16384]{1,0:T(8,128)}"
    text = TRANSFERS.replace("f32[4096,4096]", shape).replace(
        "multiply(%p, %p)", f"{matmul}, operand_precision={{highest,highest}}"
    )
    plan = make_plan(ProgramDump(text=text), parse_target(**chips))
    narrow = next(c for c in plan.changes if c.change.startswith("matmuls in bfloat16"))
    saved = plan.time_by_cause["matmul"] * (1 - 1 / times)
    assert narrow.saves_seconds == pytest.approx(saved, rel=1e-3)


def test_matmuls_of_float32():
    """On H100, bfloat16 has twice TF32's peak: half of the matmul's time is saved."""
    text = TRANSFERS.replace(
        "multiply(%p, %p)", "dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    )
    plan = make_plan(ProgramDump(text=text), parse_target(hardware="h100", devices=8))
    narrow = next(c for c in plan.changes if c.change.startswith("matmuls in bfloat16"))
    plan_chip = parse_target(hardware="h100", devices=8).chip
    peaks = [plan_chip.peak_flops_per_sec(d) for d in ("f32", "bf16")]
    assert narrow.saves_seconds == pytest.approx(
        plan.time_by_cause["matmul"] * (1 - peaks[0] / peaks[1])
    )


OFFLOADED = """HloModule m
ENTRY %main (m: f32[4096,4096]) -> f32[4096,4096] {
  %m = f32[4096,4096]{1,0ARGUMENT} parameter(0)
  %s = (f32[4096,4096]{1,0}, f32[4096,4096]{1,0:S(5)}, u32[]) copy-start(%m)
  %d = f32[4096,4096]{1,0} copy-done(%s)
  ROOT %n = f32[4096,4096]{1,0} add(%d, %d), metadata={op_name="jit(step)/jvp(mlp)/add"}
}
"""


@pytest.mark.parametrize(
    ("argument", "memory", "advice"),
    [
        (":S(5)", {}, "keep the optimizer's state"),
        ("", {"host_temp_size_in_bytes": 2**26}, "remat_policy=minimal"),
        (":S(5)", {"host_temp_size_in_bytes": 2**26}, "remat_policy=minimal"),
    ],
)
def test_a_policy_is_advised_where_activations_are_offloaded(argument, memory, advice):
    text = OFFLOADED.replace("ARGUMENT", argument)
    plan = make_plan(ProgramDump(text=text, memory=memory), parse_target(topology="v6e-1"))
    (words,) = (c.change for c in plan.changes if "the host's memory" in c.change)
    assert advice in words


ATTENTION = """HloModule m
ENTRY %main (q: bf16[2,4096,16,128]) -> bf16[2,4096,16,128] {
  %q = bf16[2,4096,16,128]{3,2,1,0} parameter(0)
  %a = bf16[2,4096,16,128]{3,2,1,0} custom-call(%q, %q, %q, %q), custom_call_target=\
"__cudnn$fmhaSoftmaxBackward", metadata={op_name="jit(step)/transpose(jvp(attend))/PASS/kernel"}, \
backend_config={"cudnn_fmha_backend_config": \
{"intermediate_tensor_shape": {"dimensions": ["2", "16", "4096", "4096"]}}}
  ROOT %r = bf16[2,4096,16,128]{3,2,1,0} add(%a, %q)
}
"""


@pytest.mark.parametrize(
    ("of", "share"), [("backward", []), ("checkpoint/rematted_computation", [1.0])]
)
def test_scores_that_flash_attention_forms_again_are_not_a_policys(of, share):
    """Backward, one of its five products is of the forward pass; no policy saves it."""
    chips = parse_target(hardware="h100", devices=1)
    plan = make_plan(ProgramDump(text=ATTENTION.replace("PASS", of)), chips)
    kernel = plan.time_by_cause["kernel"]
    found = [c.saves_seconds / kernel for c in plan.changes if c.change.startswith("recompute")]
    assert found == pytest.approx(share)


MATMUL = """HloModule m
ENTRY %main (x: bf16[8192,8192], y: bf16[8192,8192]) -> bf16[8192,8192] {
  %x = bf16[8192,8192]{1,0} parameter(0)
  %y = bf16[8192,8192]{1,0} parameter(1)
  ROOT %d = bf16[8192,8192]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_more_vmem_for_matmuls_saves_what_a_plan_with_it_is_shorter_by():
    program, chip = ProgramDump(text=MATMUL), parse_target(topology="v6e-1")
    default = make_plan(program, chip, compiled_by="libtpu")
    raised = make_plan(
        program, chip, compiled_by="libtpu", flags=("--xla_tpu_scoped_vmem_limit_kib=98304",)
    )
    (change,) = default.changes
    assert "--xla_tpu_scoped_vmem_limit_kib=" in change.change
    assert not raised.changes
    saved = default.step_time_seconds - raised.step_time_seconds
    assert saved == pytest.approx(change.saves_seconds, rel=0.01)
    assert saved > 0.1 * default.step_time_seconds
    refused = TooLarge(used_bytes=2, limit_bytes=1, message="too large", program=program)
    too_large = make_plan(refused, chip, compiled_by="libtpu")
    assert too_large.step_time_seconds == default.step_time_seconds
    of_a_dump = make_plan(program, chip)  # whose flags are not known
    assert of_a_dump.step_time_seconds == raised.step_time_seconds
