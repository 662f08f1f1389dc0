"""The table of accelerators: hardware.yml as `Chip`s, found by JAX's `device_kind` or by name."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.hardware.dtypes import canonical_dtype, float32_unit
from mfu_jax.util.yaml_files import read_mapping

_TABLE = Path(__file__).with_name("hardware.yml")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One row of hardware.yml. Every number is for one JAX device, not for a package or board.

    `number_sources` has the sources of single peaks and fields; `sources`, those of all others.
    """

    name: str
    vendor: str
    peak_tflops: Mapping[str, float]
    sparse_tflops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    boost_tflops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    memory_gib: float
    memory_bandwidth_gbps: float
    sources: tuple[str, ...]
    number_sources: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    confidence: str
    usable_memory_gib: float | None = None
    devices_per_chip: int = 1
    clock_ghz: float | None = None
    clock_state: str = ""
    clock_state_gain: str = ""
    default_clock: float = 1.0
    matrix_unit: int | None = None
    memory_share: float | None = None
    interconnect: Mapping[str, float] = dataclasses.field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    device_kinds: tuple[str, ...] = ()
    pattern: str | None = None
    compute_capability: str | None = None
    unverified: tuple[str, ...] = ()
    note: str = ""
    arithmetic: str = ""
    others_print: str = ""

    def __repr__(self) -> str:
        """What a human compares; the whole row: ``dataclasses.asdict(chip)``."""
        peaks = ", ".join(f"{dtype} {peak:g}" for dtype, peak in self.peak_tflops.items())
        memory = f"{self.memory_gib:g} GiB at {self.memory_bandwidth_gbps:g} GB/s"
        return f"<Chip {self.name}: TFLOP/s {peaks}; {memory}>"

    @property
    def memory_bytes(self) -> int:
        """Nominal device memory in bytes; the runtime's `bytes_limit` is a little less."""
        return int(self.memory_gib * 2**30)

    @property
    def usable_memory_bytes(self) -> int:
        """Device memory that the chip's compiler lets a program use; nominal without a limit."""
        return int((self.usable_memory_gib or self.memory_gib) * 2**30)

    @property
    def memory_bandwidth_bytes_per_sec(self) -> float:
        """Peak bytes/s between a JAX device and its memory: the denominator of MBU."""
        return self.memory_bandwidth_gbps * 1e9

    def peak_flops_per_sec(self, dtype: object, precision: str | None = None) -> float:
        """Dense matmul FLOP/s of one JAX device for operands of `dtype`.

        A float32 matmul runs as JAX lowers it at `precision` (`jax_default_matmul_precision`; see
        jax.lax.Precision's docstring): on TPU 1, 3 or 6 bfloat16 passes for default, high and
        highest; on NVIDIA TF32 if the chip has it, plain float32 for highest; or the passes of
        a named dot algorithm. Other dtypes ignore it. Float64 and float32 take the matrix
        unit's rate if the row has one.

        Raises:
            UserError: the table has no peak for that dtype on this chip.
        """
        name = canonical_dtype(dtype)
        key, passes = self._unit(name, precision)
        if key not in self.peak_tflops:
            raise UserError(
                f"{self.name} has no listed {name} peak; it lists {', '.join(self.peak_tflops)}",
                hint="usually the chip has no matrix unit for that dtype and XLA converts the "
                "operands; a plan needs another dtype, quantization or chip; a run, "
                "peak_tflops_per_device=… or the dtype that the matmuls really run in",
            )
        return self.peak_tflops[key] * 1e12 / passes

    def _unit(self, dtype: str, precision: str | None) -> tuple[str, int]:
        """The row's peak at which a matmul of `dtype` runs, and its number of passes."""
        if dtype == "fp64":
            return self._first("fp64_tensor", "fp64_matrix", "fp64"), 1
        if dtype != "fp32":
            return dtype, 1
        unit = float32_unit(precision, vendor=self.vendor, has_tf32="tf32" in self.peak_tflops)
        return unit or (self._first("fp32_matrix", "fp32"), 1)

    def _first(self, *keys: str) -> str:
        return next((key for key in keys if key in self.peak_tflops), keys[-1])

    def _describe(self, dtype: str, precision: str | None) -> str:
        """'H100 SXM, fp32 as tf32': which peak of the row was used."""
        key, passes = self._unit(dtype, precision)
        how = "" if key == dtype else f" as {key}" if passes == 1 else f" as {passes} {key} passes"
        at = f" at {self.clock_state}" if self.clock_state else ""
        return f"{self.name}, {dtype}{how}{at}"

    def clock_set_by(self, flags: str) -> str:
        """The clock state that libtpu's flags ask for, as `clock_state`; empty if a chip has one.

        >>> named("tpu7x").clock_set_by("--xla_a=1 --xla_tpu_dvfs_p_state=3")
        '--xla_tpu_dvfs_p_state=3'
        >>> named("tpu7x").clock_set_by(""), named("v5p").clock_set_by("")
        ('default', '')
        """
        name = self.clock_state.partition("=")[0]
        found = [flag for flag in flags.split() if name and flag.startswith(f"{name}=")]
        return found[-1] if found else "default" if name else ""

    def clock_with(self, flags: Sequence[str]) -> float:
        """The clock that libtpu's flags set, as a share of the one at which the peaks hold.

        >>> named("tpu7x").clock_with(()), named("tpu7x").clock_with(["--xla_tpu_dvfs_p_state=7"])
        (0.892, 1.0)
        """
        is_set = self.clock_set_by(" ".join(flags)) == self.clock_state
        return 1.0 if is_set else self.default_clock

    def clock_note(self, state: str) -> str:
        """What a run at this clock state leaves; empty if the peaks hold there."""
        if state in ("", self.clock_state):
            return ""
        return (
            f"the peaks of {self.name} hold at {self.clock_state}, this run's clock state is "
            f"{state}; at the default clock, published steps took {self.clock_state_gain} longer; "
            f"set LIBTPU_INIT_ARGS={self.clock_state}"
        )


@functools.cache
def table() -> tuple[Chip, ...]:
    """All rows of hardware.yml, in its order."""
    data = read_mapping(_TABLE)
    return tuple(_chip(row, data["sources"], data["narrow_sources"]) for row in data["devices"])


def _chip(
    row: Mapping[str, Any], sources: Mapping[str, str], narrow: Mapping[str, Sequence[str]]
) -> Chip:
    """A row as a `Chip`, with its sources spelled out.

    Args:
        row: of hardware.yml.
        sources: short name → source.
        narrow: field → the short names of sources that speak of no more.
    """
    lists = {key: tuple(row.get(key, ())) for key in ("aliases", "device_kinds", "unverified")}
    named = row["sources"]
    own = {k: found for k, of in narrow.items() if (found := [n for n in named if n in of])}
    used = {name for names in own.values() for name in names}
    of_all = [name for name in named if name not in used] or named
    own |= row.get("number_sources", {})
    spelled = {key: tuple(sources[name] for name in names) for key, names in own.items()}
    of_row = {"sources": tuple(sources[name] for name in of_all), "number_sources": spelled}
    return Chip(**{**row, **lists, **of_row})


def find(device_kind: str, compute_capability: str | None = None) -> tuple[Chip, ...]:
    """The rows that `device_kind` may mean: one, none, or several if it is ambiguous.

    Whole names are compared, because 'NVIDIA A100' begins with 'NVIDIA A10' and 'TPU v5 lite' with
    'TPU v5'. Case is ignored: traces say 'TPU v5 Lite'. Drivers before 470 omit 'NVIDIA '. If
    a ROCm driver says only 'AMD Radeon Graphics', the device's `compute_capability` ('gfx942')
    narrows the choice.
    """
    if device_kind == "AMD Radeon Graphics":
        archs = (
            {compute_capability} if compute_capability else {c.compute_capability for c in table()}
        )
        return tuple(c for c in table() if c.compute_capability in archs - {None})
    kinds = {device_kind.lower(), f"nvidia {device_kind}".lower()}
    exact = tuple(c for c in table() if not kinds.isdisjoint(map(str.lower, c.device_kinds)))
    if exact or " MIG " in device_kind:
        return exact
    return tuple(c for c in table() if c.pattern and re.fullmatch(c.pattern, device_kind))


def lookup(device_kind: str, compute_capability: str | None = None) -> Chip:
    """The chip behind `jax.Device.device_kind`.

    Raises:
        UserError: unknown, ambiguous, or a MIG slice; names the nearest kinds and what to do.
    """
    chips = find(device_kind, compute_capability)
    if len(chips) == 1:
        return chips[0]
    if chips:
        raise UserError(
            f"device kind {device_kind!r} may be any of {_listed(c.name for c in chips)}; "
            "expected a kind that names one chip; this driver does not tell them apart",
            hint="say which one it is with hardware=…, or pass peak_tflops_per_device=…",
        )
    if device_kind == "cpu":
        raise UserError(
            "device kind 'cpu' has no row in the table; expected an accelerator; CPUs differ too "
            "much to list",
            hint="measure it with hardware=calibrate, or pass peak_tflops_per_device=…",
        )
    mig = re.fullmatch(r"(.*\S) MIG (.+)", device_kind)
    if mig:
        whole = find(mig[1])
        of = f" of {whole[0].name}" if len(whole) == 1 else ""
        raise UserError(
            f"device kind {device_kind!r} is a MIG slice{of}, whose share of the peak no table "
            "gives; expected a whole GPU; MIG is switched on for this one",
            hint="pass peak_tflops_per_device=… (the whole peak × the slice's SMs / the GPU's "
            "SMs, which nvidia-smi mig -lgip lists) or measure it with hardware=calibrate",
        )
    known = {kind for chip in table() for kind in chip.device_kinds}
    raise UserError(
        f"device kind {device_kind!r} has no known peak; expected one of the {len(known)} "
        f"kinds that mfu-jax hardware --list shows{_candidates(device_kind, known)}",
        hint="usually a chip newer than the table; pass peak_tflops_per_device=… (dense, one "
        "JAX device), name a chip with hardware=…, or measure this one with "
        "hardware=calibrate",
    )


def named(name: str, *, instead: str = "pass peak_tflops_per_device=… instead") -> Chip:
    """The chip that a user means by 'h100', 'v5p', '4090' or a whole device kind.

    Case and punctuation are ignored. An exact name, alias or device kind comes first, then the only
    row whose name ends with it, then the only row with all its words. 'h100' and 'a100' are aliases
    of the SXM 80 GB parts.

    Raises:
        UserError: no row or several match; lists the candidates.
    """
    wanted, words = _squeeze(name), set(_words(name))
    tests: tuple[Callable[[Chip], bool], ...] = (
        lambda chip: wanted in {_squeeze(s) for s in _names(chip)},
        lambda chip: wanted in {_squeeze(s) for s in chip.device_kinds},
        lambda chip: wanted in _tails(chip.name),
        lambda chip: words <= set(_words(" ".join((*_names(chip), *chip.device_kinds)))),
        lambda chip: any(wanted in _squeeze(s) for s in _names(chip)),
    )
    chips: list[Chip] = []
    for test in tests if len(wanted) > 1 else tests[:2]:
        found = [chip for chip in table() if test(chip)]
        if len(found) == 1 and test is not tests[-1]:
            return found[0]
        chips = chips or found
    if chips:
        raise UserError(
            f"hardware {name!r} may be any of {_listed(c.name for c in chips)}; expected a "
            "name that fits one chip",
            hint="usually the name of a family; pass one of these names whole",
        )
    known = {spelling for c in table() for spelling in (*_names(c), *c.device_kinds)}
    raise UserError(
        f"hardware {name!r} is not known; expected a chip that mfu-jax hardware --list "
        f"shows{_candidates(name, known)}",
        hint=f"usually a typo, or a chip newer than the table; {instead}",
    )


def _names(chip: Chip) -> tuple[str, ...]:
    return (chip.name, *chip.aliases)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _squeeze(text: str) -> str:
    return "".join(_words(text))


def _tails(text: str) -> set[str]:
    """'geforcertx4090', 'rtx4090' and '4090' for 'GeForce RTX 4090'."""
    words = _words(text)
    return {"".join(words[i:]) for i in range(len(words))}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _candidates(word: str, known: Iterable[str]) -> str:
    """` (nearest: 'a', 'b')` for the up to three known words most like `word`, or nothing."""
    lower = {spelling.lower(): spelling for spelling in sorted(known)}
    near = difflib.get_close_matches(word.lower(), lower, n=3, cutoff=0.6)
    return f" (nearest: {_listed(lower[match] for match in near)})" if near else ""
