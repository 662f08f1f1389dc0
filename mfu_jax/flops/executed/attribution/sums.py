"""Sums over the matmuls of a program: by phase, scope, dtype, kernel, and what is wasted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from mfu_jax.flops import names
from mfu_jax.flops.count import operation
from mfu_jax.flops.exact import Number
from mfu_jax.flops.executed.attribution.padding import Wasted
from mfu_jax.flops.executed.attribution.replication import ReplicaGroups
from mfu_jax.flops.executed.cost_types import MatmulCost
from mfu_jax.flops.executed.hlo.module import HloComputation
from mfu_jax.flops.scopes import Scope


class FoundMatmul(NamedTuple):
    """A matmul of the program, with the context that its callers provide.

    Attributes:
        computation: where it is.
        matmul: its cost.
        op_name: its own, its fusion's, or one inferred from its neighbours.
        runs: how often it runs in one step; a fraction if devices differ.
        once: the same with every loop body counted once.
    """

    computation: HloComputation
    matmul: MatmulCost
    op_name: str
    runs: Number
    once: int


MODEL_PHASES = ("forward", "evaluation", "backward")
_SHARD_MAP = "/shard_map/"  # around work that each device runs because the user wrote it so
_BEYOND = (names.TILES_STATED, names.TILES_ASSUMED, names.ON_PADDING)
# Sums that are not parts of one whole.
_TO_NEAREST = ("repeated", "repeated_attention", "repeated_by_user", "overhang")
_AGAIN = ("rematerialized", "xla_rematerialized")


class MatmulSums:
    """What the top-down pass adds up: by phase, and under the names of `ExecutedCount`."""

    def __init__(self) -> None:
        self.phases = _table()
        self.numbers = _table()
        self.tables: defaultdict[str, dict[str, Number]] = defaultdict(_table)
        self.tables["beyond"] = dict.fromkeys(_BEYOND, 0)
        self.in_pieces: defaultdict[str, dict[str, Number]] = defaultdict(_table)

    def add(self, matmul: MatmulCost, scope: Scope, runs: Number, once: int) -> None:
        again = 0 if scope.phase == "xla_rematerialized" else matmul.rematerialized
        if matmul.is_attention and scope.phase not in _AGAIN:
            self.numbers["attention_kernels"] += runs * (matmul.flops - again)
        self.phases[scope.phase] += runs * (matmul.flops - again)
        self.phases["rematerialized"] += runs * again
        if scope.phase not in _AGAIN:
            self.numbers["recomputed_in_kernels"] += runs * again
        if any(matmul.beyond):
            for label, flops in zip(_BEYOND, matmul.beyond, strict=True):
                self.tables["beyond"][label] += runs * flops
        self.tables["by_scope"][scope.path] += runs * matmul.flops
        self.tables["by_dtype"][matmul.dtype] += runs * matmul.flops
        self.numbers["loops_once"] += once * matmul.flops
        if matmul.passes:
            self.tables["hardware_passes"][matmul.passes] += runs * matmul.flops
        if matmul.is_vector:
            self.numbers["vector_matmuls"] += runs * matmul.flops
            self.numbers["vector_once"] += once * matmul.flops
        if matmul.kernel:
            self.tables["kernels"][matmul.kernel] += runs * matmul.flops
            self.numbers["kernels_once"] += once * matmul.flops
            self.numbers["kernels_xla"] += once * matmul.seen_by_xla

    def add_model(self, item: FoundMatmul, scope: Scope, zeros: Wasted, pieces: str) -> None:
        """Adds the part of a forward or backward matmul that the model needs, and its known zeros.

        Args:
            item: the matmul.
            scope: its phase and scope.
            zeros: what it spends on known zeros.
            pieces: kind of image pieces, if it is a convolution on such: see `ImagePieces`.
        """
        name = operation(scope.phase, scope.path, item.op_name.rpartition("/")[2])
        needed = item.matmul.flops - item.matmul.rematerialized - sum(zeros)
        self.tables["by_operation"][name] += item.runs * needed
        if pieces:
            self.in_pieces[pieces][name] += item.runs * needed
        if item.matmul.is_attention:
            self.tables["attention_operations"][name] += item.runs * needed
        if item.matmul.instruction.opcode == "custom-call" and item.matmul.beyond.stated:
            label = names.OVERHANG_ATTENTION if item.matmul.is_attention else names.OVERHANG
            first_time = Fraction(item.matmul.flops - item.matmul.rematerialized, item.matmul.flops)
            self.tables["overhang"][label] += item.runs * item.matmul.beyond.stated * first_time
        self.numbers["padding"] += item.runs * zeros.padding
        self.numbers["expansion"] += item.runs * zeros.expansion

    def add_duplicate(self, item: FoundMatmul, scope: Scope) -> None:
        """Adds a forward or backward matmul that repeats another one on the same operands."""
        name = operation(scope.phase, scope.path, item.op_name.rpartition("/")[2])
        self.tables["duplicated_operations"][name] += item.runs * item.matmul.flops

    def add_repeated(self, item: FoundMatmul, replicas: ReplicaGroups, zeros: int) -> None:
        """Adds the part of a forward or backward matmul that devices repeat, minus known zeros."""
        matmul, runs = item.matmul, item.runs
        devices, groups = len(replicas), len(set(replicas))
        needed = matmul.flops - matmul.rematerialized - zeros
        if groups == devices:
            return
        flops = Fraction(devices - groups, devices) * runs * needed
        where = "on every device" if groups == 1 else f"in groups of {devices // groups} devices"
        self.tables["repeated"][f"repeated {where} ({devices - groups} of {devices})"] += flops
        if matmul.is_attention:
            self.numbers["repeated_attention"] += flops
        if _SHARD_MAP in item.op_name:
            self.numbers["repeated_by_user"] += flops

    def in_whole_flops(self) -> dict[str, Any]:
        """The fields of `ExecutedCount`."""
        phases = whole(self.phases)
        phases["forward"] += phases["evaluation"]
        sums = {**self.numbers, **self.tables}
        pieces = {label: dict(whole(parts)) for label, parts in self.in_pieces.items()}
        whole_sums = {name: _in_whole(part, name in _TO_NEAREST) for name, part in sums.items()}
        return {**phases, **whole_sums, "in_pieces": pieces}


def _table() -> defaultdict[str, Number]:
    return defaultdict(int)


def _in_whole(flops: Any, to_nearest: bool) -> Any:
    if not isinstance(flops, Mapping):
        return round(flops) if to_nearest else int(flops)
    if to_nearest:
        return {name: round(part) for name, part in flops.items()}
    return dict(whole(flops))


def whole(parts: Mapping[str, Number]) -> Counter[str]:
    """Parts rounded to whole numbers that add up to the exact sum, rounded down.

    >>> dict(whole({"a": Fraction(1, 2), "b": Fraction(3, 2), "c": 1}))
    {'a': 0, 'b': 2, 'c': 1}
    """
    rounded: Counter[str] = Counter()
    exact: Number = 0
    before = 0
    for name, part in parts.items():
        exact += part
        rounded[name] = int(exact) - before
        before = int(exact)
    return rounded
