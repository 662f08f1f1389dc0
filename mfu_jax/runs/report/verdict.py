"""The verdict on a run: where its time went, what to do about it, and how good its MFU is.

No jax, no numpy: a run that ends says it, too.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from mfu_jax import names
from mfu_jax.hardware.chips import find
from mfu_jax.logger.records.summary import Summary
from mfu_jax.runs.goodput.run_time import CATEGORIES
from mfu_jax.runs.report.setup import Setup
from mfu_jax.util.formatting import counted, rounded_up, span
from mfu_jax.verdict import NOTABLE, LikeRuns, NextStep, TimeLoss, Verdict, impossible_numbers

_PROFILED_STEP = "profile/step_time_seconds"
_TABLE = re.compile(r"\(table: ([^,]+)[,)]")  # the chip in the text of a peak
_PEAK = re.compile(r"([\d.e+-]+ TFLOP/s)/device in (\w+)")
_MOST_LOSSES = 5
_NEW = "runs/a"  # a folder for a run that has none
_BEYOND = "extra FLOPs, such as recomputation"
_INSIDE = "inside steps, not yet profiled"
_UNLIKE = 1.5  # beyond this ratio of step times, a profile is of other steps than the run's
_FEWEST_STEPS = 6  # compilation, warm-up, and three to profile
_CACHE = "JAX_COMPILATION_CACHE_DIR"


def run_verdict(
    run: str,
    summary: Summary,
    setup: Setup,
    *,
    wall: Mapping[str, float],
    profile: Mapping[str, float],
    is_of_process: bool = False,
    peak: tuple[str | None, float | None] | None = None,
    convention: str = "",
    bound_mfu: float | None = None,
    steps: range = range(0),
) -> Verdict:
    """Judges a run, or what is known of it so far.

    Args:
        run: its metrics file or log, for commands; empty, or ``-``: it has none.
        summary: of its measured steps.
        setup: as logged.
        wall: seconds of the wall clock by category, ``train`` among them.
        profile: the ``profile/…`` numbers of its last profiled steps; empty: none were.
        is_of_process: `wall` is of one process alone, as its logger saw it.
        peak: another peak than the logged one: its text and TFLOP/s.
        convention: how the model FLOPs are counted, if not as logged.
        bound_mfu: of its plan.
        steps: those of its last process; empty: not known.
    """
    text, tflops = peak or (setup.peak, setup.peak_tflops)
    convention = convention or setup.convention
    losses = sorted(_losses(summary, wall, profile, is_of_process), key=lambda found: -found[0])
    largest = losses[0][1] if losses and losses[0][1].fraction >= NOTABLE else None
    lacks = ""
    if summary.mfu is None and summary.steps:
        lacks = "model=NAME_OR_FILE" if tflops else "hardware=NAME"
    return Verdict(
        kind="report",
        finding=_finding(summary, profile, setup),
        mfu=summary.mfu,
        hfu=summary.hfu,
        convention=convention,
        peak=" ".join(found.groups()) if text and (found := _PEAK.search(text)) else "",
        peak_flops_per_sec_per_device=tflops and tflops * 1e12,
        step_time_seconds=summary.mean_seconds,
        losses=tuple(loss for _, loss in losses[:_MOST_LOSSES]),
        next_steps=tuple(
            _next_steps(run, setup, largest, wall, steps, lacks=lacks, has_profile=bool(profile))
        ),
        like_runs=_like_runs(summary, setup, text or "", tflops, convention),
        bound_mfu=bound_mfu,
    )


def _finding(summary: Summary, profile: Mapping[str, float], setup: Setup) -> str:
    """What forbids to trust the run, its MFU or its profile, or to have one; empty: nothing."""
    found = []
    if summary.last_loss is not None and not math.isfinite(summary.last_loss):
        found.append(f"the training loss is {summary.last_loss}")
    flags = (f"{flag} in {counted(count, 'step')}" for flag, count in summary.flags.items())
    if not summary.steps:
        found.append("no measured step")
    elif impossible := impossible_numbers(flags, summary.mfu, summary.hfu):
        found.append(impossible)
    step, mean = profile.get(_PROFILED_STEP), summary.mean_seconds
    if step and mean and max(step / mean, mean / step) > _UNLIKE:  # such as steps of the warm-up
        which = f"profiled steps {setup.config.get('profile_steps', '')}".rstrip()
        found.append(f"{which} took {span(step)} on average, the run's {span(mean)}")
    return "; ".join(found)


def _losses(
    summary: Summary, wall: Mapping[str, float], profile: Mapping[str, float], is_of_process: bool
) -> Iterator[tuple[float, TimeLoss]]:
    """Each loss with its fraction of the wall clock, so that they compare."""
    total = sum(wall.values())
    inside = (wall.get("train", 0.0) + wall.get("slow_steps", 0.0)) / total if total else 1.0
    for category, seconds in wall.items():
        if category != "train" and seconds > 0:
            fraction, name = seconds / total, wall_name(category)
            yield (
                fraction,
                TimeLoss(
                    name=name,
                    fraction=fraction,
                    of="process" if is_of_process else "wall clock",
                    seconds=seconds,
                ),
            )
    step = profile.get(_PROFILED_STEP) or summary.mean_seconds
    for name, fraction in _inside_steps(summary, profile).items():
        if fraction > 0:
            spent = step and fraction * step
            yield inside * fraction, TimeLoss(name=name, fraction=fraction, seconds=spent)


def wall_name(category: str) -> str:
    """A category of the wall clock in words."""
    return CATEGORIES[category].name if category in CATEGORIES else category


def _inside_steps(summary: Summary, profile: Mapping[str, float]) -> dict[str, float]:
    """Fractions of a step that are not the model's FLOPs: a profile's bars, else what is known."""
    if step := profile.get(_PROFILED_STEP):
        start = f"{names.PROFILE_SECONDS}/"
        bars = {n.removeprefix(start): s / step for n, s in profile.items() if n.startswith(start)}
        return {name: fraction for name, fraction in bars.items() if name != names.MFU}
    if summary.mfu is None:
        return {}
    executed = max(summary.mfu, summary.hfu or 0.0)
    return {_BEYOND: executed - summary.mfu, _INSIDE: 1 - executed}


def _next_steps(
    path: str,
    setup: Setup,
    largest: TimeLoss | None,
    wall: Mapping[str, float],
    steps: range,
    *,
    lacks: str,
    has_profile: bool,
) -> Iterator[NextStep]:
    """What to do, most useful first.

    Args:
        path: the run's metrics file or log; empty: it has none.
        setup: as logged.
        largest: the largest loss, if it is notable.
        wall: seconds of the wall clock by category.
        steps: of its last process.
        lacks: what would make the MFU known; empty: it is.
        has_profile: whether steps were profiled.
    """
    run = _NEW if path in ("", "-") else path.removesuffix("/metrics.jsonl")
    if lacks:
        yield NextStep(text=f"mfu-jax report {shlex.quote(run)} {lacks}")
    if largest is not None and largest.of != "step" and (text := _remedy(largest, setup, wall)):
        yield NextStep(text=text)
    is_in_folder = path.endswith("/metrics.jsonl")
    if has_profile or (is_in_folder and Path(run, "profile", "plugins").is_dir()):
        where = "DIR, its profile_dir" if run.endswith(".jsonl") else shlex.quote(run)
        yield NextStep(text=f"mfu-jax profile {where}")
    else:
        home = run if is_in_folder or run == _NEW else os.path.dirname(run)
        folder = os.path.join(home, "profile")
        # A trainer's folder, or that of run_dir, has a place for profiles.
        has_place = is_in_folder and (setup.config or Path(run, "tensorboard").is_dir())
        traced, longer = _traced(steps, setup.config)
        values = {"profile_steps": traced} | ({} if has_place else {"profile_dir": folder})
        if "step function" in setup.values:  # arguments of `instrument`, in Python
            flags = ", ".join(f'{name}="{value}"' for name, value in values.items())
        else:
            flags = " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
        yield NextStep(text=f"{flags}{longer}, then mfu-jax profile {shlex.quote(folder)}")
    keep = "" if path else f"metrics_file={run}/metrics.jsonl, then "
    yield NextStep(text=f"{keep}mfu-jax report {shlex.quote(run)} --html=report.html")


def _traced(steps: range, config: Mapping[str, str]) -> tuple[str, str]:
    """Steps to profile in the next run, after its warm-up, and how long it must be, if longer."""
    # The trainer's next run of that name goes on after the last checkpoint.
    is_resumed = steps.start > 0 or config.get("enable_checkpointing") == "true"
    begin = steps.stop if is_resumed else 0
    total = config.get("steps", "")
    room = max(steps.stop, int(total) if total.isdecimal() else 0) - begin
    is_short = bool(steps) and room < _FEWEST_STEPS
    first = begin + (room - 3 if _FEWEST_STEPS <= room < 13 else 10)
    longer = f" in a run of at least {first + 3} steps" if is_short else ""
    return f"{first}-{first + 2}", longer


def _remedy(loss: TimeLoss, setup: Setup, wall: Mapping[str, float]) -> str:
    """What shortens a loss of the wall clock; empty: nothing known, or it is done already."""
    less = loss.fraction * (1 - NOTABLE) / (NOTABLE * max(1 - loss.fraction, NOTABLE))
    of = next((c for c in CATEGORIES.values() if c.name == loss.name), CATEGORIES["other"])
    if (now := setup.config.get(of.key, "")).isdecimal():
        lost = of is CATEGORIES["lost_steps"]
        new = max(1, int(now) // 2) if lost else rounded_up(less * int(now))
        return f"{of.key}={new}{of.beside}"
    more = math.ceil(1 + wall.get("data_wait", 0.0) / (wall.get("train") or 1.0))
    text = of.remedy.format(less=rounded_up(less), more=more)
    return "" if _CACHE in text and os.environ.get(_CACHE) else text


def _like_runs(
    summary: Summary, setup: Setup, peak: str, tflops: float | None, convention: str
) -> LikeRuns | None:
    """Published runs on the same chip; None if there are none, or the chip is not known."""
    table = _TABLE.search(peak)
    chips = [table[1]] if table else [chip.name for chip in find(setup.device_kind)]
    rate, tokens = summary.tflops_per_sec_per_device, summary.tokens_per_sec_per_device
    if len(chips) != 1 or not tflops or summary.mfu is None:
        return None
    from mfu_jax.published import like_runs  # the analytic counts: 0.3 s

    experts = setup.config.get("num_experts", "")
    dtype = found[2] if (found := _PEAK.search(peak)) else "bf16"
    return like_runs(
        chip=chips[0],
        dtype=dtype,
        peak_flops_per_sec=tflops * 1e12,
        flops_per_token=1e12 * rate / tokens if rate and tokens else None,
        convention=convention,
        has_experts=int(experts) > 1 if experts.isdecimal() else None,
    )
