"""Faults that only accelerators feel, and all others, on profiles written by hand.

Each profile is of a run that is otherwise healthy. The gain is compared with the difference between
its step and that of the run without the fault, whose times are arithmetic with peak and bandwidth.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mfu_jax.dumps import ModelFlops
from mfu_jax.profiling.advice.rules import RULES
from mfu_jax.profiling.advice.stats import ProfileStats
from mfu_jax.profiling.advice.work import imbalance
from mfu_jax.profiling.profile import Profile, read_profile
from mfu_jax.profiling.report.text import render
from mfu_jax.util.formatting import percent
from tests.support.accelerator_traces import write_trace
from tests.support.written_profiles import (
    BANDWIDTH,
    BF16,
    KIND,
    PS,
    TF32,
    dot,
    dot_seconds,
    write_program,
    written_profile,
)
from tests.support.xspace import Plane

WITHIN = 0.2
M, K, N = 8192, 4096, 8192
MATMUL = dot_seconds(M, K, N, 0.7)
HEALTHY = [dot("up", M, K, N), dot("down", M, N, K)]
HEALTHY_SECONDS = {"up": MATMUL, "down": MATMUL}


def first(profile: Profile, cause: str, brought: float) -> None:
    """The fault is named first, and its gain is within 20% of what removing it brings."""
    assert profile.coverage == 1
    assert [advice.cause for advice in profile.advice][:1] == [cause]
    assert profile.advice[0].gain_seconds == pytest.approx(brought, rel=WITHIN)


def test_a_healthy_run_gets_no_advice(tmp_path: Path) -> None:
    assert not written_profile(tmp_path, HEALTHY, HEALTHY_SECONDS).advice


def test_float32_matmuls(tmp_path: Path) -> None:
    lines = [*HEALTHY, dot("head", M, K, N, dtype="f32")]
    seconds = {**HEALTHY_SECONDS, "head": dot_seconds(M, K, N, 0.7, TF32)}
    profile = written_profile(tmp_path, lines, seconds)
    first(profile, "float32 matmuls", seconds["head"] - MATMUL)
    assert "head (mlp)" in profile.advice[0].evidence


def test_odd_vocabulary(tmp_path: Path) -> None:
    lines = [*HEALTHY, dot("head", M, K, 50257)]
    seconds = {**HEALTHY_SECONDS, "head": dot_seconds(M, K, 50257, 0.3)}
    brought = seconds["head"] - dot_seconds(M, K, 50264, 0.7)
    profile = written_profile(tmp_path, lines, seconds)
    first(profile, "padding of odd shapes", brought)
    assert profile.advice[0].remedy == "vocab_size=50304"  # of the widest result
    known = read_profile(tmp_path, settings={"mlp_dim": "50257"})
    assert known.advice[0].remedy == "mlp_dim=50304"


@pytest.mark.parametrize("op", ["negate({0})", "multiply({0}, {0})"])
def test_an_elementwise_chain(tmp_path: Path, op: str) -> None:
    shape, size = f"bf16[{M},{N}]", 2 * M * N
    names = [f"mul.{i}" for i in range(6)]
    operands = ["up.result", *names[:-1]]
    lines = [*HEALTHY, f"  %up.result = {shape} bitcast(%up)"]
    for name, operand in zip(names, operands, strict=True):
        lines.append(f"  %{name}.in = {shape} opt-barrier(%{operand})")
        lines.append(f"  %{name} = {shape} {op.format(f'%{name}.in')}")
    one = 2 * size / (0.8 * BANDWIDTH)  # reads one array, writes one
    seconds = {**HEALTHY_SECONDS, **dict.fromkeys(names, one)}
    profile = written_profile(tmp_path, lines, seconds)
    first(profile, "unfused elementwise chain", 5 * one)
    assert "6 elementwise ops pass arrays on through memory, 5 times" in profile.advice[0].evidence


def test_logits_in_float32(tmp_path: Path) -> None:
    vocabulary = 131072
    logits, size = f"f32[{M},{vocabulary}]", 4 * M * vocabulary
    lines = [
        *HEALTHY,
        dot("head", M, K, vocabulary, scope="head"),
        f"  %wide = {logits} fusion(%head), kind=kLoop, calls=%softmax",
        f"  %loss = f32[{M}] fusion(%wide), kind=kInput, calls=%total",
    ]
    body = (
        f"%softmax (q: bf16[{M},{vocabulary}]) -> {logits} {{\n"
        f"  %q = bf16[{M},{vocabulary}] parameter(0)\n  ROOT %w = {logits} convert(%q)\n}}\n\n"
        f"%total (r: {logits}) -> f32[{M}] {{\n  %r = {logits} parameter(0)\n"
        f"  %zero = f32[] constant(0)\n"
        f"  ROOT %t = f32[{M}] reduce(%r, %zero), dimensions={{1}}, to_apply=%add\n}}\n\n"
        "%add (x: f32[], y: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n"
        "  %y = f32[] parameter(1)\n  ROOT %s = f32[] add(%x, %y)\n}\n"
    )
    head = dot_seconds(M, K, vocabulary, 0.7)
    passing = {"wide": 1.5 * size / BANDWIDTH, "loss": size / BANDWIDTH}
    halved = {"wide": size / BANDWIDTH, "loss": size / 2 / BANDWIDTH}
    profile = written_profile(
        tmp_path, lines, {**HEALTHY_SECONDS, "head": head, **passing}, computations=body
    )
    first(profile, "logits in float32", sum(passing.values()) - sum(halved.values()))


@pytest.mark.parametrize("group", [1, 4])
def test_attention_as_dense_matmuls(group: int, tmp_path: Path) -> None:
    """Each head has keys of its own, or four share them: their queries are one long side."""
    heads, length, width = 64, 4096, 128
    keys = f"bf16[{heads // group},{length},{width}]"
    scores = f"bf16[{heads // group},{group * length},{length}]"
    values = f"bf16[{heads // group},{group * length},{width}]"
    batched = "lhs_batch_dims={0}, rhs_batch_dims={0}"
    lines = [
        *HEALTHY,
        f"  %q = {values} constant({{...}})",
        f"  %k = {keys} constant({{...}})",
        f"  %qk = {scores} dot(%q, %k), {batched}, lhs_contracting_dims={{2}}, "
        'rhs_contracting_dims={2}, metadata={op_name="jit(step)/jvp(attention)/dot_general"}',
        f"  %masked = {scores} negate(%qk)",
        f"  %av = {values} dot(%masked, %k), {batched}, lhs_contracting_dims={{2}}, "
        'rhs_contracting_dims={1}, metadata={op_name="jit(step)/jvp(attention)/dot_general"}',
    ]
    one = 2 * heads * length * length * width
    size = 2 * heads * length * length
    memory = 2 * size / (0.8 * BANDWIDTH)
    bound = size / (0.8 * BANDWIDTH)
    seconds = {**HEALTHY_SECONDS, "qk": bound, "masked": memory, "av": bound}
    matmuls = 2 * 2 * M * K * N
    model = ModelFlops(per_device=matmuls + one, dense=matmuls + 2 * one, convention="maxtext")
    profile = written_profile(tmp_path, lines, seconds, model=model)
    flash = one / (0.55 * 989.4e12)  # both matmuls, half of the pairs; FlashAttention-2 and 3
    first(profile, "attention without a kernel", 2 * bound + memory - flash)


def test_experts_are_no_attention(tmp_path: Path) -> None:
    """Their activations are as large as scores, but as wide as the model in between."""
    experts, rows, width, hidden = 8, 8192, 1024, 4096
    batched = "lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}"
    metadata = 'metadata={op_name="jit(step)/jvp(moe)/dot_general"}'
    lines = [
        f"  %x = bf16[{experts},{rows},{width}] constant({{...}})",
        f"  %w = bf16[{experts},{width},{hidden}] constant({{...}})",
        f"  %up = bf16[{experts},{rows},{hidden}] dot(%x, %w), {batched}, "
        f"rhs_contracting_dims={{1}}, {metadata}",
        f"  %down = bf16[{experts},{rows},{width}] dot(%up, %w), {batched}, "
        f"rhs_contracting_dims={{2}}, {metadata}",
    ]
    one = dot_seconds(experts * rows, width, hidden, 0.5)
    assert not written_profile(tmp_path, lines, {"up": one, "down": one}).advice


def test_a_batch_of_one_row(tmp_path: Path) -> None:
    lines = [dot("up", 1, K, N), dot("down", 1, N, K)]
    one = 2 * K * N / (0.9 * BANDWIDTH)
    profile = written_profile(tmp_path, lines, {"up": one, "down": one})
    first(profile, "small batch", 2 * one * (1 - 1 / 8))  # eight rows take as long as one
    assert profile.advice[0].remedy.startswith("a batch 2 times as large")  # memory is not known
    sizes = {f"{p}_size_in_bytes": 10**9 for p in ("argument", "output", "temp", "alias")}
    roomy = written_profile(tmp_path / "roomy", lines, {"up": one, "down": one}, memory=sizes)
    assert roomy.advice[0].remedy.startswith("a batch 8 times as large")
    known = read_profile(tmp_path / "roomy", settings={"per_device_batch_size": "0.5"})
    assert known.advice[0].remedy == "per_device_batch_size=4, 8 times as large"
    sizes["temp_size_in_bytes"] = 70 * 10**9  # of 80
    full = written_profile(tmp_path / "full", lines, {"up": one, "down": one}, memory=sizes)
    assert full.advice[0].remedy.endswith("remat_policy=full may make room: twice does not fit")


def test_remat_with_memory_to_spare(tmp_path: Path) -> None:
    again = dot("again", M, K, N).replace("jvp(mlp)", "rematted_computation/mlp")
    seconds = {**HEALTHY_SECONDS, "again": MATMUL}
    sizes = {f"{p}_size_in_bytes": 10**9 for p in ("argument", "output", "temp", "alias")}
    lines = [*HEALTHY, again]
    roomy = written_profile(tmp_path / "roomy", lines, seconds, memory=sizes)
    # A GPU's forward pass writes the result in any case.
    first(roomy, "remat heavier than memory needs", MATMUL)
    assert roomy.advice[0].gain_seconds == pytest.approx(MATMUL, rel=1e-3)
    assert roomy.advice[0].remedy.startswith("remat_policy=minimal_with_context, ")
    full = sizes | {"temp_size_in_bytes": 72 * 10**9}
    assert not written_profile(tmp_path / "full", lines, seconds, memory=full).advice
    assert not written_profile(tmp_path / "unknown", lines, seconds).advice


def test_only_results_that_other_ops_read_need_memory(tmp_path: Path) -> None:
    again = dot("again", M, K, N).replace("jvp(mlp)", "rematted_computation/mlp")
    scope = "jit(step)/rematted_computation/mlp/tanh"
    act = f'  %act = bf16[{M},{N}] tanh(%again), metadata={{op_name="{scope}"}}'
    seconds = {**HEALTHY_SECONDS, "again": MATMUL, "act": MATMUL / 9}
    sizes = {f"{p}_size_in_bytes": 10**9 for p in ("argument", "output", "temp", "alias")}
    profile = written_profile(tmp_path, [*HEALTHY, again, act], seconds, memory=sizes)
    assert f"take at most {2 * M * N / 2**30:.3g} GiB," in profile.advice[0].evidence


def test_an_exposed_all_gather(tmp_path: Path) -> None:
    gather = "  %gather = bf16[8192] all-gather(%p), replica_groups={{0,1}}, dimensions={0}"
    seconds = {"gather": MATMUL / 2, **HEALTHY_SECONDS}
    profile = written_profile(tmp_path, [gather, *HEALTHY], seconds, slower=[{}])
    first(profile, "exposed all-gather", MATMUL / 2)


@pytest.mark.parametrize(
    ("down", "straggles"), [(2 * MATMUL, True), ((2 * MATMUL, MATMUL, MATMUL), False)]
)
def test_a_straggling_device(
    down: float | tuple[float, ...], straggles: bool, tmp_path: Path
) -> None:
    """A device that is slow in one step of two may have been so by chance."""
    reduce = "  %reduce = bf16[8] all-reduce(%p), replica_groups={{0,1}}, to_apply=%add"
    body = (
        "%add (x: bf16[], y: bf16[]) -> bf16[] {\n  %x = bf16[] parameter(0)\n"
        "  %y = bf16[] parameter(1)\n  ROOT %s = bf16[] add(%x, %y)\n}\n"
    )
    seconds = {**HEALTHY_SECONDS, "reduce": MATMUL}
    slow = {"down": down, "reduce": 0.0}
    profile = written_profile(
        tmp_path, [*HEALTHY, reduce], seconds, slower=[slow], computations=body
    )
    one_step = dataclasses.replace(
        profile.measured,
        devices=tuple(
            dataclasses.replace(device, compute=device.compute[:1])
            for device in profile.measured.devices
        ),
    )
    assert (
        imbalance(ProfileStats(measured=one_step, peaks=profile.peaks, program=profile.program))
        is None
    )  # a single step says nothing
    if straggles:
        first(profile, "imbalance between devices", MATMUL)
        assert "GPU:1 computes" in profile.advice[0].evidence
    else:
        assert not [one for one in profile.advice if one.cause.startswith("imbalance")]


def test_a_callback_in_the_step(tmp_path: Path) -> None:
    call = '  %ask = bf16[8] custom-call(%p), custom_call_target="xla_ffi_python_gpu_callback"'
    profile = written_profile(tmp_path, [*HEALTHY, call], {**HEALTHY_SECONDS, "ask": MATMUL})
    first(profile, "host callback in the step", MATMUL)
    bars = {bar.name: bar.seconds for bar in profile.waterfall}
    assert bars["waiting for callbacks on the host"] == pytest.approx(MATMUL)


def test_a_callback_that_only_the_host_records(tmp_path: Path) -> None:
    """A GPU's copies of its argument and result name nothing, the launching thread names it."""
    call = '  %ask = bf16[8] custom-call(%p), custom_call_target="xla_ffi_python_gpu_callback"'
    copying, launching = 0.2 * MATMUL, 0.1 * MATMUL
    write_program(tmp_path, [*HEALTHY, call])
    step = 6 * MATMUL
    at = {"up": 0.0, "MemcpyD2H": MATMUL, "MemcpyH2D": 4 * MATMUL, "down": 5 * MATMUL}
    seconds = {**HEALTHY_SECONDS, "MemcpyD2H": copying, "MemcpyH2D": copying}
    plane = Plane("/device:GPU:0", gpu_device_name=KIND)
    of = {"hlo_module": "jit_step", "program_id": 7}
    plane.line(
        "Stream #7(Compute)",
        [
            (name, round((turn * step + at[name]) * PS), round(seconds[name] * PS), stats)
            for turn in range(4)
            for name in at
            for stats in [{**of, "hlo_op": name} if name in HEALTHY_SECONDS else {}]
        ],
    )
    host = Plane("/host:CPU")
    events = []
    for begin in (turn * step for turn in range(4)):
        events.append(("train", round(begin * PS), round(0.99 * step * PS), {"step_num": 1}))
        asked = round((begin + launching) * PS), round((5 * MATMUL - 2 * launching) * PS)
        events.append(("ask", *asked, {}))
    host.line("python", events)
    write_trace(tmp_path, host, plane)
    profile = read_profile(tmp_path)
    first(profile, "host callback in the step", step - 2 * MATMUL)
    assert len(profile.advice) == 1
    assert "(ask) run 1 × a step" in profile.advice[0].evidence
    bars = {bar.name: bar.seconds for bar in profile.waterfall}
    waiting = 4 * MATMUL - launching
    assert bars["waiting for callbacks on the host"] == pytest.approx(waiting, rel=0.01)


def test_gaps_before_a_callback_are_not_its_own(tmp_path: Path) -> None:
    """A short callback late in a step with slow launches, which stay without it."""
    call = '  %ask = bf16[8] custom-call(%p), custom_call_target="xla_ffi_python_gpu_callback"'
    write_program(tmp_path, [*HEALTHY, call, dot("last", M, K, N)])
    step, asking = 5 * MATMUL, 0.2 * MATMUL
    plane = Plane("/device:GPU:0", gpu_device_name=KIND)
    of = {"hlo_module": "jit_step", "program_id": 7}
    at = {"up": 0.0, "down": 2 * MATMUL, "last": 3.5 * MATMUL}
    plane.line(
        "Stream #7(Compute)",
        [
            (name, round((turn * step + start) * PS), round(MATMUL * PS), {**of, "hlo_op": name})
            for turn in range(4)
            for name, start in at.items()
        ],
    )
    host = Plane("/host:CPU")
    events = []
    for begin in (turn * step for turn in range(4)):
        events.append(("train", round(begin * PS), round(0.99 * step * PS), {"step_num": 1}))
        events.append(("ask", round((begin + 3.1 * MATMUL) * PS), round(asking * PS), {}))
    host.line("python", events)
    write_trace(tmp_path, host, plane)
    found = {one.cause: one.gain_seconds for one in read_profile(tmp_path).advice}
    brought = 0.4 * MATMUL  # the callback, and the launch after it
    assert found["host callback in the step"] == pytest.approx(brought, rel=WITHIN)


def test_of_several_waits_in_a_step_the_long_one_is_named(tmp_path: Path) -> None:
    """The loss is waited for while the device is at work; the accuracy is there already."""
    events = [
        ("$array.py:293 __float__", 0.0, 2 * MATMUL),
        ("$array.py:310 item", 2.01 * MATMUL, 0.02 * MATMUL),
    ]
    profile = written_profile(tmp_path, HEALTHY, HEALTHY_SECONDS, idle=MATMUL, host=events)
    first(profile, "sync in the loop", MATMUL)
    assert "in 2 of 2 steps ($array.py:293 __float__)" in profile.advice[0].evidence


EVALUATED = dot_seconds(M, K, K, 0.7)
EVALUATED_SECONDS = {
    **{"check": EVALUATED, "check.act": EVALUATED / 2},
    **{"up": EVALUATED, "up.act": EVALUATED / 2, "grad": EVALUATED},
}


def evaluated_step() -> list[str]:
    """A forward pass that no gradient uses, before one that is differentiated.

    Both passes have a matmul and an elementwise op of the same size.
    """
    weight, batch = f"bf16[{K},{K}]", f"bf16[{M},{K}]"
    return [
        f"  %w = {weight} constant({{...}})",
        f"  %held.out = {batch} constant({{...}})",
        f"  %batch = {batch} constant({{...}})",
        matmul("check", "held.out", "w", batch, 0, "jit(step)/mlp"),
        f'  %check.act = {batch} tanh(%check), metadata={{op_name="jit(step)/mlp/tanh"}}',
        matmul("up", "batch", "w", batch, 0, "jit(step)/jvp(mlp)"),
        f'  %up.act = {batch} tanh(%up), metadata={{op_name="jit(step)/jvp(mlp)/tanh"}}',
        matmul("grad", "batch", "up.act", weight, 0, "jit(step)/transpose(jvp(mlp))", rows=True),
        f"  %updated = {weight} subtract(%w, %grad)",
        f"  %results = ({batch}, {weight}) tuple(%check.act, %updated)",
    ]


def test_an_evaluation_within_the_step(tmp_path: Path) -> None:
    profile = written_profile(tmp_path, evaluated_step(), EVALUATED_SECONDS)
    phases = {op.op.name.name: op.op.record.phase for op in profile.measured.ops if op.op.record}
    assert (phases["check"], phases["up"], phases["grad"]) == ("evaluation", "forward", "backward")
    first(profile, "eval in the loop", EVALUATED + EVALUATED / 2)


@pytest.mark.parametrize("is_given", [True, False])
def test_an_evaluation_within_the_step_has_its_own_bar(tmp_path: Path, is_given: bool) -> None:
    """Beside the model's two matmuls, whether their number is given or read off the program."""
    matmul_flops = 2 * M * K * K
    model = ModelFlops(per_device=2 * matmul_flops, convention="as given") if is_given else None
    profile = written_profile(tmp_path, evaluated_step(), EVALUATED_SECONDS, model=model)
    bars = {bar.name: bar for bar in profile.waterfall}
    assert bars["evaluation"].seconds == pytest.approx(matmul_flops / BF16)
    assert set(bars["evaluation"].scopes) == {"mlp"}
    assert bars["MFU"].seconds == pytest.approx(2 * matmul_flops / BF16)
    assert "not explained by the ledger" not in bars
    by_phase = {row.name: row for row in profile.table("phase")}
    assert (by_phase["evaluation"].mfu, by_phase["evaluation"].hfu > 0) == (0.0, True)


def matmul(
    name: str, left: str, right: str, result: str, contracted: int, scope: str, rows: bool = False
) -> str:
    """Of two values of the program, over the columns of the left one, or over its rows."""
    dims = f"lhs_contracting_dims={{{0 if rows else 1}}}, rhs_contracting_dims={{{contracted}}}"
    metadata = f'metadata={{op_name="{scope}/dot_general"}}'
    return f"  %{name} = {result} dot(%{left}, %{right}), {dims}, {metadata}"


STEP = 3 * MATMUL  # two matmuls, and as long without anything


@pytest.mark.parametrize(
    ("cause", "events"),
    [
        ("slow data", [("$pipe.py:7 next_batch", -2.9 * MATMUL, 2.8 * MATMUL)]),
        ("recompiles", [("backend_compile_and_load", -0.99 * MATMUL, 0.97 * MATMUL)]),
        ("unscanned dispatch", [("PjitFunction(small)", -2.9 * MATMUL, 2.8 * MATMUL)]),
        ("host-bound loop", [("$metrics.py:7 plot", -2.9 * MATMUL, 2.8 * MATMUL)]),
        (
            "sync in the loop",
            [("$array.py:2 __float__", -2.9 * MATMUL, 1.91 * MATMUL),
             ("$pipe.py:7 next_batch", -0.99 * MATMUL, 0.97 * MATMUL)],
        ),
        ("eval in the loop", [("$train.py:7 evaluate", -0.99 * MATMUL, 0.97 * MATMUL)]),
    ],
)  # fmt: skip
def test_idle_time_has_one_cause(
    cause: str, events: list[tuple[str, float, float]], tmp_path: Path
) -> None:
    profile = written_profile(tmp_path, HEALTHY, HEALTHY_SECONDS, idle=MATMUL, host=events)
    assert profile.measured.step_seconds == pytest.approx(STEP)
    first(profile, cause, MATMUL)
    assert len(profile.advice) == 1


def test_a_call_that_runs_the_program_itself_is_no_dispatch_meanwhile(tmp_path: Path) -> None:
    """The call lasts until the step is done, then the loop works, and nothing runs."""
    call = ("PjitFunction(step)", -5e-7, 2 * MATMUL + 1e-6)
    work = ("$metrics.py:7 plot", 2.01 * MATMUL, 0.98 * MATMUL)
    profile = written_profile(tmp_path, HEALTHY, HEALTHY_SECONDS, idle=MATMUL, host=[call, work])
    first(profile, "host-bound loop", MATMUL)
    assert len(profile.advice) == 1


def test_a_step_called_in_time_is_not_the_hosts_fault(tmp_path: Path) -> None:
    """The device idles although its next step was called long ago."""
    work = [("$metrics.py:7 plot", -0.99 * MATMUL, 0.97 * MATMUL)]
    profile = written_profile(
        tmp_path, HEALTHY, HEALTHY_SECONDS, idle=MATMUL, host=work, call=-1.5 * MATMUL
    )
    assert not profile.advice


def test_advice_is_printed_and_in_the_json_best_first(tmp_path: Path) -> None:
    events = [("$pipe.py:7 next_batch", -2.9 * MATMUL, 2.8 * MATMUL)]
    lines = [*HEALTHY, dot("head", M, K, N, dtype="f32")]
    seconds = {**HEALTHY_SECONDS, "head": dot_seconds(M, K, N, 0.7, TF32)}
    profile = written_profile(tmp_path, lines, seconds, idle=2 * MATMUL, host=events)
    rows = profile.to_json()["advice"]
    assert [row["cause"] for row in rows] == ["slow data", "float32 matmuls"]
    assert all(set(row) == {"cause", "evidence", "remedy", "gain_seconds"} for row in rows)
    text = render(profile, by=[])
    saved = rows[0]["gain_seconds"]
    assert f"slow data: saves {percent(saved / profile.measured.step_seconds)} of the step" in text
    assert text.index("slow data:") < text.index("float32 matmuls:")


def test_causes_are_a_closed_list() -> None:
    assert len(RULES) == 17
