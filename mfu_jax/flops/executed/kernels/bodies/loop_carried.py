"""Which loop-carried values decide what a loop multiplies: the others are data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mfu_jax.flops.executed.kernels.bodies.body import BodyBlock, BodyOp, KernelBody


class Carried:
    """Finds these values for the loops of one body.

    Args:
        body: the kernel.
    """

    def __init__(self, body: KernelBody) -> None:
        self.body = body
        self._found: dict[int, tuple[int, ...]] = {}
        self._sources: dict[int, set[int]] = {}

    def deciding(self, loop: BodyOp, result: int | None = None) -> tuple[int, ...]:
        """Indices of the carried values on which branches, bounds or the result depend.

        Args:
            loop: an ``scf.for`` or ``scf.while``.
            result: index of a result that is needed as well.
        """
        if result is not None:
            return self._deciding(loop, {result})
        if id(loop) not in self._found:
            self._found[id(loop)] = self._deciding(loop, set())
        return self._found[id(loop)]

    def sources(self, loop: BodyOp) -> set[int]:
        """Everything that the loop's branches and bounds are computed from."""
        self.deciding(loop)
        return self._sources[id(loop)]

    def _deciding(self, loop: BodyOp, wanted: set[int]) -> tuple[int, ...]:
        *_, last = loop.regions
        arguments, yields = loop_arguments(loop), last.ops[-1].operands
        always = [v for region in loop.regions for v in self._deciders_inside(region)]
        passed: dict[int, int] = {}  # the second region's arguments, from the first one
        if loop.name == "scf.while":
            condition, *values = loop.regions[0].ops[-1].operands
            always += [condition, *(v for i, v in enumerate(values) if i in wanted)]
            passed = dict(zip(last.arguments, values, strict=True))
            wanted = set()
        while True:
            reached = self._reached([*always, *(yields[i] for i in wanted)], passed)
            found = {i for i, argument in enumerate(arguments) if argument in reached}
            if found <= wanted:
                self._sources[id(loop)] = reached
                return tuple(sorted(wanted))
            wanted |= found

    def _deciders_inside(self, block: BodyBlock) -> Iterator[int]:
        for op in block.ops:
            if op.has_matmul and op.regions:
                yield from self._deciders(op)
                for region in op.regions:
                    yield from self._deciders_inside(region)

    def _deciders(self, op: BodyOp) -> Iterable[int]:
        if op.name in ("scf.if", "scf.index_switch"):
            return op.operands[:1]
        if op.name == "scf.for":
            return (*op.operands[:3], *(op.operands[3 + i] for i in self.deciding(op)))
        if op.name == "scf.while":
            return [op.operands[i] for i in self.deciding(op)]
        return ()

    def _reached(self, values: Iterable[int], passed: dict[int, int]) -> set[int]:
        """Everything that the values are computed from."""
        reached: set[int] = set()
        stack = list(values)
        while stack:
            value = stack.pop()
            if value in reached:
                continue
            reached.add(value)
            if value in passed:
                stack.append(passed[value])
            if maker := self.body.makers.get(value):
                stack += _sources(maker, value)
        return reached


def loop_arguments(loop: BodyOp) -> tuple[int, ...]:
    """Numbers of the block arguments that hold the loop-carried values."""
    first = 1 if loop.name == "scf.for" else 0  # after the counter
    return loop.regions[0].arguments[first:]


def _sources(maker: BodyOp, value: int) -> Iterator[int]:
    if maker.name == "scf.if":
        yield maker.operands[0]
        position = maker.results.index(value)
        for region in maker.regions:
            yield region.ops[-1].operands[position]
        return
    yield from maker.operands
    for region in maker.regions:
        for op in region.ops:
            yield from op.operands
