"""The answer first: one sentence on a run, profile, plan or comparison, and the same as JSON.

``mfu-jax report|gate|profile|plan --json`` have it under ``verdict``, as docs/verdict.md says.
A field may be added; one that changes its meaning or goes raises `SCHEMA`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mfu_jax.names import AS_GIVEN
from mfu_jax.util.formatting import columns, counted, percent, seconds_text, span

SCHEMA = 1
NOTABLE = 0.02
"""Smallest loss, as a fraction of its whole, that is worth a reader's time."""
TOLERANCE = 0.005
"""Clocks and peaks are not exact to the last digit; a step at 100.1% of peak is fine."""
COLUMNS = 100
_LIKE_NONE = "no published run is like it"
_WITHOUT_MLP = 0.3  # of a layer's matmul results, by bytes: all but the MLP's, in Llama's widths
_EXCEPT_MLP = "save_dot_with_context_except_mlp"
TOKENS = "tokens_per_step=N, for the published runs of models of this size"
"""The next step where all published runs on the chip are named, for want of FLOPs per token."""


@dataclass(frozen=True, kw_only=True)
class TimeLoss:
    """Time that went elsewhere than to the model's FLOPs at the peak.

    Attributes:
        name: such as ``compile``, ``wait for data`` or a bar of a waterfall.
        fraction: its part of `of`.
        of: ``step``; ``wall clock`` of the job over all restarts; or ``process``, from the logger's
            begin to its end.
        seconds: of that; None: not known.
    """

    name: str
    fraction: float
    of: Literal["step", "wall clock", "process"] = "step"
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.name}, {share_text(self.fraction, self.of, self.seconds)}"


@dataclass(frozen=True, kw_only=True)
class NextStep:
    """What to do next.

    Attributes:
        text: with the exact flag, key or command: ``remat_policy=minimal``.
        gain_fraction: by how much it shortens a step, as a fraction of it; None: not known.
        gain_seconds: the same in seconds.
    """

    text: str
    gain_fraction: float | None = None
    gain_seconds: float | None = None

    def __str__(self) -> str:
        if self.gain_fraction is None:
            return self.text
        return f"{self.text} (saves {share_text(self.gain_fraction, 'step', self.gain_seconds)})"


def share_text(fraction: float, of: str, seconds: float | None) -> str:
    """``19.5% of the step, 344 ms``: the one form of a loss and of a saving."""
    time = "" if seconds is None else f", {span(seconds)}"
    return f"{percent(fraction)} of the {of}{time}"


def impossible_numbers(flags: Iterable[str], *utilisations: float | None) -> str:
    """What a verdict says of impossible numbers; empty if there are none.

    Args:
        flags: what the steps' records say, if they do.
        utilisations: of the peak; None: not known.

    >>> impossible_numbers([], 0.4, None), impossible_numbers([], 1.2, None)
    ('', 'impossible numbers (more than the peak)')
    """
    is_above = any((value or 0.0) > 1 + TOLERANCE for value in utilisations)
    found = ", ".join(flags) or ("more than the peak" if is_above else "")
    return found and f"impossible numbers ({found})"


def remat_policy(share: float) -> str:
    """The next step against recomputation: what keeps most of what the memory holds.

    Args:
        share: of the results that are recomputed, by bytes, for which there is memory.
    """
    if share >= 1:
        return "remat_policy=minimal_with_context, or jax.checkpoint_policies.dots_saveable"
    return f"remat_policy={_EXCEPT_MLP if share >= _WITHOUT_MLP else 'save_qkv_proj'}"


@dataclass(frozen=True, kw_only=True)
class LikeRuns:
    """What published runs of the same model class and chip reach, in the run's convention.

    Attributes:
        like: which runs: ``models like this (7.5B to 8B active) on TPU v5p``.
        low_mfu: of the run with the lowest MFU.
        high_mfu: of the one with the highest.
        runs: their ids, which ``mfu-jax published ID`` shows.
    """

    like: str
    low_mfu: float
    high_mfu: float
    runs: tuple[str, ...]

    @property
    def span(self) -> str:
        """The lowest and the highest MFU."""
        low, high = percent(self.low_mfu), percent(self.high_mfu)
        return low if low == high else f"{low} to {high}"

    def place(self, mfu: float) -> str:
        """Where an MFU is: above, within or below them."""
        return "above" if mfu > self.high_mfu else "below" if mfu < self.low_mfu else "within"

    def judged(self, mfu: float) -> str:
        """How good an MFU is beside these runs."""
        count = counted(len(self.runs), "published run")
        return f"{self.place(mfu)} what {self.like} reach, {self.span} ({count})"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The number, the largest loss, what to do next, and how good it is.

    Attributes:
        kind: what was looked at: ``report``, ``gate``, ``profile``, ``plan`` or ``tune``.
        finding: the answer, where it is not the MFU: ``passed: no regression of 1% or more``.
        passed: of a check, as a gate or a plan's memory; None: nothing was checked.
        mfu: model FLOPs utilisation, a fraction of the peak; None: not known, like those below.
        hfu: the same of the executed FLOPs.
        convention: how the model FLOPs are counted.
        peak: the peak that both refer to, in words: ``989.4 TFLOP/s bf16``.
        peak_flops_per_sec_per_device: the same as a number.
        step_time_seconds: mean time of a step.
        losses: largest first; those of less than 2% may be left out.
        next_steps: the most useful one first; never empty.
        like_runs: how good the MFU is.
        bound_mfu: the MFU that a plan holds for possible.
    """

    kind: Literal["report", "gate", "profile", "plan", "tune"]
    finding: str = ""
    passed: bool | None = None
    mfu: float | None = None
    hfu: float | None = None
    convention: str = ""
    peak: str = ""
    peak_flops_per_sec_per_device: float | None = None
    step_time_seconds: float | None = None
    losses: tuple[TimeLoss, ...] = ()
    next_steps: tuple[NextStep, ...]
    like_runs: LikeRuns | None = None
    bound_mfu: float | None = None

    @property
    def sentence(self) -> str:
        """All of it in one sentence; what to do next comes last, as it is typed."""
        return f"{'; '.join(self._clauses())}; {self._next}"

    def _clauses(self) -> Iterator[str]:
        if self.finding:
            yield self.finding
        yield self._number
        if self.mfu is not None and self.like_runs is not None:
            yield self.like_runs.judged(self.mfu)
        elif self.mfu is not None:
            yield _LIKE_NONE
        if self.bound_mfu is not None:
            owner = "its" if self.kind == "plan" else "its plan's"
            yield f"{owner} bound is {percent(self.bound_mfu)}"
        large = [loss for loss in self.losses if loss.fraction >= NOTABLE]
        if self.losses:  # none are known without a peak, or of a search, which looks at whole steps
            yield f"largest loss: {large[0]}" if large else f"no loss above {NOTABLE:.0%} found"

    @property
    def placed(self) -> str:
        """How good the MFU is, in the fewest words; empty if it is not known."""
        if self.mfu is None:
            return ""
        like = self.like_runs
        return f"{like.place(self.mfu)} published runs ({like.span})" if like else _LIKE_NONE

    @property
    def _next(self) -> str:
        return f"next: {self.next_steps[0]}"

    @property
    def _number(self) -> str:
        if self.mfu is None:
            return "MFU not known"
        peak = f"peak {self.peak}" if self.peak else ""
        aside = ", ".join(filter(None, (self.counted, peak)))
        number = f"{percent(self.mfu)} MFU{' planned' * (self.kind == 'plan')}"
        return f"{number} ({aside})" if aside else number

    @property
    def counted(self) -> str:
        """How the model FLOPs are counted, in words; empty if not known."""
        if self.convention == AS_GIVEN:
            return f"FLOPs {AS_GIVEN}"
        if " " in self.convention:
            return f"FLOPs of {self.convention}"
        return f"{self.convention} FLOPs" if self.convention else ""

    def render(self, columns: int = COLUMNS) -> str:
        """The sentence for a terminal that wide; the next step begins a line."""
        parts = (f"{'; '.join(self._clauses())};", self._next)
        wrapped = textwrap.TextWrapper(columns, break_long_words=False, break_on_hyphens=False)
        return "\n".join(map(wrapped.fill, parts))

    def to_json(self) -> dict[str, Any]:
        """The schema's object."""
        return {"schema": SCHEMA, "sentence": self.sentence, **asdict(self)}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Verdict:
        """The verdict of a schema's object; fields that a newer version added are left out."""
        like = found.get("like_runs")
        return cls(
            **_known(cls, found)
            | {
                "losses": tuple(TimeLoss(**_known(TimeLoss, loss)) for loss in found["losses"]),
                "next_steps": tuple(NextStep(**_known(NextStep, s)) for s in found["next_steps"]),
                "like_runs": like and LikeRuns(**_known(LikeRuns, like)),
            }
        )


def _known(kind: type[Any], found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name in kind.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True)
class StepGap:
    """What a step takes beyond its plan, by cause.

    Attributes:
        target: the chips planned for.
        planned_seconds: of a step.
        measured_seconds: the same.
        causes: seconds by cause, unless they follow from something else.
        notes: how sure the causes are.
    """

    target: str
    planned_seconds: float
    measured_seconds: float
    causes: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Extra seconds of a step."""
        return self.measured_seconds - self.planned_seconds

    def by_reason(self) -> dict[str, float]:
        """Seconds by cause, by `largest_first`; they sum to the gap."""
        return largest_first({why: s for why, s in self.causes.items() if s}, self.seconds)

    def render(self) -> str:
        """The causes for a terminal."""
        rows = [(why, seconds_text(seconds)) for why, seconds in self.by_reason().items()]
        notes = [f"note: {note}" for note in self.notes]
        lines = columns([("cause", "seconds"), *rows])
        return "\n".join([f"gap to the plan: {self.sentence}", *lines, *notes])

    @property
    def sentence(self) -> str:
        """The gap and its three largest causes."""
        named = [
            f"{why} {seconds_text(seconds)}"
            for why, seconds in self.by_reason().items()
            if seconds * self.seconds > 0 and abs(seconds) > NOTABLE * self.measured_seconds
        ]
        ratio = self.measured_seconds / self.planned_seconds
        return (
            f"a step takes {seconds_text(self.measured_seconds)}, {ratio:.3g} × the "
            f"{seconds_text(self.planned_seconds)} planned for {self.target}: "
            f"{', '.join(named[:3]) or f'no cause above {NOTABLE:.0%} of it'}"
        )

    def to_json(self) -> dict[str, Any]:
        """The gap as plain JSON values."""
        return {
            "sentence": self.sentence,
            "target": self.target,
            "planned_seconds": self.planned_seconds,
            "measured_seconds": self.measured_seconds,
            "seconds": self.seconds,
            "by_reason": self.by_reason(),
            "notes": list(self.notes),
        }


def largest_first(causes: Mapping[str, float], more: float) -> dict[str, float]:
    """Causes of `more` seconds: those of its own sign first, the largest first."""
    return dict(sorted(causes.items(), key=lambda item: item[1] if more < 0 else -item[1]))
