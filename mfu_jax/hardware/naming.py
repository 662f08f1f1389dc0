"""Resolves JAX's `device_kind`, or a name given by the user, to a chip of the table."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable

from mfu_jax.errors import UserError
from mfu_jax.hardware.chips import Chip, table


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
            f"device kind {device_kind!r} may be any of {_listed(c.name for c in chips)}; expected "
            "a kind that names one chip; this driver does not tell them apart; say which one it is "
            "with hardware=…, or pass peak_tflops_per_device=…"
        )
    if device_kind == "cpu":
        raise UserError(
            "device kind 'cpu' has no row in the table; expected an accelerator; CPUs differ too "
            "much to list; measure it with hardware=calibrate or pass peak_tflops_per_device=…"
        )
    mig = re.fullmatch(r"(.*\S) MIG (.+)", device_kind)
    if mig:
        whole = find(mig[1])
        of = f" of {whole[0].name}" if len(whole) == 1 else ""
        raise UserError(
            f"device kind {device_kind!r} is a MIG slice{of}, whose share of the peak no table "
            "gives; expected a whole GPU; MIG is switched on for this one; pass "
            "peak_tflops_per_device=… (the whole peak × the slice's SMs / the GPU's SMs, which "
            "nvidia-smi mig -lgip lists) or measure it with hardware=calibrate"
        )
    known = {kind for chip in table() for kind in chip.device_kinds}
    raise UserError(
        f"device kind {device_kind!r} has no known peak; expected one of the {len(known)} kinds "
        f"that mfu-jax hardware --list shows{_candidates(device_kind, known)}; usually a chip "
        "newer than the table; pass peak_tflops_per_device=… (dense, one JAX device), name a chip "
        "with hardware=…, or measure this one with hardware=calibrate"
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
            f"hardware {name!r} may be any of {_listed(c.name for c in chips)}; expected a name "
            "that fits one chip; usually the name of a family; pass one of these names whole"
        )
    known = {spelling for c in table() for spelling in (*_names(c), *c.device_kinds)}
    raise UserError(
        f"hardware {name!r} is not known; expected a chip that mfu-jax hardware --list shows"
        f"{_candidates(name, known)}; usually a typo, or a chip newer than the table; "
        f"{instead}"
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
