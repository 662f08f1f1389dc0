"""`mfu_jax.plan_sequence`: programs that take turns on the same chips, planned together.

An engine's forward and backward pass and its update; a rollout, a reward model and a train step.
While one runs, what the others keep is in memory, too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any, NamedTuple

from mfu_jax.errors import UserError, first_line
from mfu_jax.planning.any_step import abstract_arguments, is_array, of_arrays, plan
from mfu_jax.planning.result.plan import Plan
from mfu_jax.planning.result.rendering import size_text
from mfu_jax.util.formatting import columns, percent, seconds_text


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Several programs in turn. Times in seconds, bytes and FLOPs per device.

    Attributes:
        plans: by the programs' names, in their order.
        runs: how often each runs.
        beside_bytes: what the others keep in memory while each runs.
        resident_bytes: what stays over the whole sequence: arguments that no program makes.
        tokens: of the sequence, of the whole job; 0: not known.
    """

    plans: Mapping[str, Plan]
    runs: Mapping[str, int]
    beside_bytes: Mapping[str, int]
    resident_bytes: int
    tokens: float = 0.0

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        """Memory while each program runs, with what the others keep."""
        return {
            name: (one.memory_peak_bytes or 0) + self.beside_bytes[name]
            for name, one in self.plans.items()
        }

    @property
    def fits(self) -> bool:
        """Whether each program fits beside what the others keep."""
        return all(
            one.fits and self.peak_bytes[name] <= (one.memory_limit_bytes or math.inf)
            for name, one in self.plans.items()
        )

    @property
    def seconds(self) -> Mapping[str, float | None]:
        """Predicted time of all runs of each program; None: the compiler refused it."""
        return {
            name: None if (once := one.step_time_seconds) is None else self.runs[name] * once
            for name, one in self.plans.items()
        }

    @property
    def tokens_per_sec_per_chip(self) -> float | None:
        """The rate of the sequence; None if its tokens or a program's time are not known."""
        (first, *_), whole = self.plans.values(), self._whole_seconds()
        return self.tokens / whole / first.chips if self.tokens and whole else None

    def _whole_seconds(self) -> float | None:
        known = [seconds for seconds in self.seconds.values() if seconds is not None]
        return sum(known) if len(known) == len(self.plans) else None

    def __str__(self) -> str:
        """The sequence as a table, its largest memory first said; each program is in `plans`."""
        (first, *_), peaks, seconds = self.plans.values(), self.peak_bytes, self.seconds
        worst, whole = max(peaks, key=lambda name: peaks[name]), self._whole_seconds()
        limit = f" of {size_text(first.memory_limit_bytes)}" if first.memory_limit_bytes else ""
        verdict = "fits" if self.fits else "does NOT fit"
        rate = self.tokens_per_sec_per_chip
        rows = [("  program", "runs", "time", "share", "own peak", "kept by others")]
        rows += [
            (
                f"  {name}",
                f"{self.runs[name]:,}",
                "n/a" if (own := seconds[name]) is None else seconds_text(own),
                percent(own / whole if own is not None and whole else None),
                size_text(one.memory_peak_bytes or 0),
                size_text(self.beside_bytes[name]),
            )
            for name, one in self.plans.items()
        ]
        said: dict[str, list[str]] = {}
        for name, one in self.plans.items():
            for note in one.notes:
                said.setdefault(note, []).append(name)
        notes = [f"note: {', '.join(names)}: {note}" for note, names in said.items()]
        return "\n".join(
            [
                f"{first.target}: {verdict}: {size_text(peaks[worst])}{limit} in {worst}, "
                f"{size_text(self.resident_bytes)} resident",
                "predicted    "
                + ("not known" if whole is None else f"{seconds_text(whole)} a sequence")
                + (f", {rate:,.0f} tokens/s/chip" if rate else ""),
                *columns(rows, "<>>>>>"),
                *notes,
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """The sequence and its plans as plain JSON values."""
        derived = {key: getattr(self, key) for key in ("fits", "peak_bytes", "seconds")}
        return {**derived, **asdict(self)}


class _Held(NamedTuple):
    size: int
    maker: int  # the program that makes it; -1: it is there from the start
    last: int  # the last program that reads it


def plan_sequence(
    programs: Mapping[str, Sequence[Any]],
    *,
    runs: Mapping[str, int] | None = None,
    tokens: float = 0.0,
    **options: Any,
) -> SequencePlan:
    """Plans programs that run one after the other, again and again, on the same chips.

    An array that two programs read must be the same object in both; within one program, each
    argument is an array. An argument with the shape and
    dtype of an earlier program's output that no donated argument replaces is that output: it lives
    until its last reader. All other arguments stay in memory throughout.

    Args:
        programs: name → (step, argument, …), as for `mfu_jax.plan`, in their order.
        runs: how often a program runs in one sequence, such as a decode step; 1 where not given.
        tokens: of one sequence of the whole job, for the token rate.
        options: of every `mfu_jax.plan`: the chips, the compiler's flags and limits.

    Raises:
        UserError: no programs, runs of others or fewer than one, tokens that are no number, or as
            `mfu_jax.plan`.

    >>> plan_sequence({}, topology="v6e-8")
    Traceback (most recent call last):
    mfu_jax.errors.UserError: no programs; expected name: (step, argument, …)
    """
    runs = dict(runs or {})
    if not programs:
        raise UserError("no programs; expected name: (step, argument, …)")
    if unknown := [name for name in runs if name not in programs]:
        raise UserError(f"runs of {', '.join(unknown)}; expected {', '.join(programs)}")
    for name, times in runs.items():
        if not isinstance(times, Integral) or times < 1:
            raise UserError(f"runs of {name}: {times!r}; expected a whole number, 1 or more")
    if not 0 <= tokens < math.inf:
        raise UserError(f"{tokens=}; expected a number, 0 or more")
    plans = {name: plan(step, *args, **options) for name, (step, *args) in programs.items()}
    devices = next(iter(plans.values())).devices
    read = [_read(args, devices) for _, *args in programs.values()]
    held = _held(read, [_made(step, args) for step, *args in programs.values()])
    beside = (
        sum(
            one.size
            for key, one in held.items()
            if key not in own and (one.maker < 0 or one.maker < place <= one.last)
        )
        for place, own in enumerate(read)
    )
    return SequencePlan(
        plans=plans,
        runs={name: int(runs.get(name, 1)) for name in programs},
        beside_bytes=dict(zip(programs, beside, strict=True)),
        resident_bytes=sum(one.size for one in held.values() if one.maker < 0),
        tokens=tokens,
    )


_HOST = ("pinned_host", "unpinned_host")  # JAX's names of the host's memory
_Kind = tuple[tuple[int, ...], str]
_Key = tuple[int, int]  # an object's identity, and which of its uses in a program it is


def _kind(leaf: Any) -> _Kind:
    return tuple(leaf.shape), str(leaf.dtype)


def _read(args: Sequence[Any], devices: int) -> dict[_Key, tuple[_Kind, int]]:
    """A program's arrays: their kind, and bytes on a device."""
    import jax

    given = [leaf for leaf in jax.tree.leaves(args) if is_array(leaf)]
    placed = jax.tree.leaves(abstract_arguments(given, devices)[0])
    found, uses = {}, Counter[int]()
    for leaf, array in zip(given, placed, strict=True):
        shape = array.sharding.shard_shape(array.shape) if array.sharding else array.shape
        is_on_host = array.sharding and array.sharding.memory_kind in _HOST
        size = 0 if is_on_host else math.prod(shape) * array.dtype.itemsize
        found[id(leaf), uses[id(leaf)]] = _kind(leaf), size
        uses[id(leaf)] += 1
    return found


def _made(step: Any, args: Sequence[Any]) -> Counter[_Kind]:
    """Kinds of a program's outputs, without those that replace a donated argument."""
    import jax

    step, args = of_arrays(step, tuple(args))
    try:
        traced = (step if hasattr(step, "trace") else jax.jit(step)).trace(*args)
    except Exception as error:  # whatever the step raises; `plan` has traced it before
        raise UserError(f"the outputs are not known: {first_line(error)}") from error
    donated = [info for info in jax.tree.leaves(traced.args_info) if info.donated]
    made = Counter(map(_kind, jax.tree.leaves(traced.out_info)))
    return made - Counter(map(_kind, donated))


def _held(
    read: Sequence[Mapping[_Key, tuple[_Kind, int]]], made: Sequence[Counter[_Kind]]
) -> dict[_Key, _Held]:
    """What is in memory between programs."""
    found: dict[_Key, _Held] = {}
    for place, (key, (kind, size)) in itertools.chain.from_iterable(
        ((place, pair) for pair in arrays.items()) for place, arrays in enumerate(read)
    ):
        if key in found:
            found[key] = found[key]._replace(last=place)
            continue
        maker = next((earlier for earlier in range(place) if made[earlier][kind] > 0), -1)
        if maker >= 0:
            made[maker][kind] -= 1
        found[key] = _Held(size, maker, place)
    return found
