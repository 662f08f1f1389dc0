"""Values that differ between devices, and how instructions compute them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mfu_jax.flops.executed.integers.values import ByDevice, Compute, Value


def joined(values: Sequence[Value]) -> Value:
    """The values of all devices, in the order of their numbers; just one if all are equal."""
    first = values[0]
    is_same = all(value is first or value == first for value in values)
    return first if is_same else ByDevice(tuple(values))


def of_device(value: Value, device: int | None) -> Value:
    """The value of one device."""
    if isinstance(value, ByDevice):
        return None if device is None else value.values[device]
    return value


def among(values: Sequence[Value], devices: Collection[int]) -> tuple[Value, ...]:
    """The same values without those of other devices, which do not take part."""
    return tuple(
        ByDevice(tuple(v if d in devices else None for d, v in enumerate(value.values)))
        if isinstance(value, ByDevice)
        else value
        for value in values
    )


def on_each(compute: Compute, values: Sequence[Value]) -> Value:
    """What each device computes from its own values."""
    count = next((len(value.values) for value in values if isinstance(value, ByDevice)), 0)
    if not count:
        return compute(list(values))
    columns = [v.values if isinstance(v, ByDevice) else (v,) * count for v in values]
    results: dict[tuple[Value, ...], Value] = {}
    rows = list(zip(*columns, strict=True))
    for row in rows:
        if row not in results:
            results[row] = compute(list(row))
    return joined([results[row] for row in rows])


def on_each_choice(
    choices: ByDevice,
    branch_of: Callable[[Value], int | None],
    compute: Compute,
    values: Sequence[Value],
) -> Value:
    """What devices that choose different branches compute: each branch on its devices alone.

    Args:
        choices: each device's value that chooses the branch.
        branch_of: the branch that a value chooses; None if unknown.
        compute: takes the choosing value, and `values`.
        values: the branches' arguments.
    """
    branches = [branch_of(choice) for choice in choices.values]
    results: list[Value] = [None] * len(branches)
    for branch in {branch for branch in branches if branch is not None}:
        devices = [device for device, chosen in enumerate(branches) if chosen == branch]
        found = compute([choices.values[devices[0]], *among(values, set(devices))])
        for device in devices:
            results[device] = of_device(found, device)
    return joined(results)
