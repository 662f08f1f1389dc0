"""Records of a compiled program: each launched instruction, with its cost and its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mfu_jax.flops.count import NOTHING_BEYOND, Beyond
from mfu_jax.flops.executed.cost_types import Collective
from mfu_jax.flops.executed.result import ExecutedCount
from mfu_jax.flops.scopes import FlopPhase

CONTROL = frozenset({"while", "conditional", "call"})
_MESSAGES = frozenset({"send", "recv"})
HOST_TRANSFER = "host transfer"


class ArrayShape(NamedTuple):
    """The dtype and the dimensions of an array."""

    dtype: str
    dims: tuple[int, ...]


class MatmulShape(NamedTuple):
    """``[batch, m, k] @ [batch, k, n]``; for a convolution, m is whatever remains."""

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InstructionShape:
    """The form of one launched instruction.

    Attributes:
        results: its arrays.
        result_bytes: their bytes.
        operands: names of the instructions that it reads, looking through bitcasts and barriers.
        operand_arrays: their arrays.
        matmul: its largest one; None if it has none, or the shape is unknown.
        is_transposed: whether its result's minor dimension is m, not n.
        passes: number of lower-precision passes that the hardware runs it in; 6 for ``bf16_x6``.
        is_full_float32: whether its precision rules out TF32.
        is_elementwise: whether every result element comes from one element of each operand.
        keeps_tiles: whether it is a copy that leaves the order within each tile of a TPU's layout.
        sorted: length of the dimension that it sorts; 0 if it does not.
        target: target of a custom call; `HOST_TRANSFER` for messages to and from the host.
    """

    results: tuple[ArrayShape, ...] = ()
    result_bytes: int = 0
    operands: tuple[str, ...] = ()
    operand_arrays: tuple[ArrayShape, ...] = ()
    matmul: MatmulShape | None = None
    is_transposed: bool = False
    passes: int = 1
    is_full_float32: bool = False
    is_elementwise: bool = False
    keeps_tiles: bool = False
    sorted: int = 0
    target: str = ""

    @property
    def is_host_transfer(self) -> bool:
        """Whether it is a message to or from the host."""
        return self.target == HOST_TRANSFER


@dataclass(frozen=True, kw_only=True, slots=True)
class InstructionRecord:
    """One instruction that a device launches, and the cost of one run of it.

    Attributes:
        name: its name, unique in `module`.
        module: name of the program.
        computation: name of the computation that it is in.
        opcode: as in the text: ``fusion``, ``all-gather-start`` ….
        op_name: JAX's name stack for it, or for its largest matmul.
        scope: named scopes of `op_name`, joined by ``/``.
        phase: phase of its largest matmul, else of `op_name`.
        runs: runs in one step; 0 in a branch that is not counted. If devices differ, the mean,
            rounded up.
        flops_by_dtype: matmul FLOPs, including those in a fusion, by operand dtype.
        flops_by_phase: the same by phase.
        vector_matmuls: the part of the matmul FLOPs that vector units run, as products and sums.
        beyond: FLOPs that the hardware runs in addition.
        kernels: names of the custom kernels that it runs.
        grid_steps: of these kernels' grids, as far as they are known.
        elementwise: FLOPs of everything that is not a matmul, by XLA's rules.
        transcendental: elements of results of transcendental functions, which XLA does not count
            as FLOPs.
        hbm_bytes: bytes that it reads from and writes to HBM.
        collective: the collective that it starts; `Collective.times` is 1.
        device_groups: the devices that exchange data in it; empty if the text does not say.
        started_by: name of the start that this instruction completes (``…-done``, or the last
            fusion of a chain that carries a collective along).
        starts_chain: whether it is the first fusion of such a chain.
        host_bytes: bytes that it copies between HBM and the host's memory.
        to_host: whether it copies them to the host.
        shape: its arrays, and the shape of its largest matmul.
        called: the computations that control flow runs.
        unaccounted: reasons why some of its FLOPs are unknown.
    """

    name: str
    module: str
    computation: str
    opcode: str
    op_name: str = ""
    scope: str = ""
    phase: FlopPhase = "other"
    runs: int = 0
    flops_by_dtype: Mapping[str, int] = field(default_factory=dict)
    flops_by_phase: Mapping[str, int] = field(default_factory=dict)
    vector_matmuls: int = 0
    beyond: Beyond = NOTHING_BEYOND
    kernels: tuple[str, ...] = ()
    grid_steps: int = 0
    elementwise: int = 0
    transcendental: int = 0
    hbm_bytes: int = 0
    collective: Collective | None = None
    device_groups: tuple[tuple[int, ...], ...] = ()
    started_by: str = ""
    starts_chain: bool = False
    host_bytes: int = 0
    to_host: bool = False
    shape: InstructionShape = field(default_factory=InstructionShape)
    called: tuple[str, ...] = ()
    unaccounted: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """Matmul FLOPs of one run."""
        return sum(self.flops_by_dtype.values())

    @property
    def is_vector(self) -> bool:
        """Whether it runs on vector units only: no matmul, or none for a matrix unit."""
        return self.flops == self.vector_matmuls

    @property
    def is_control(self) -> bool:
        """Whether it only runs other instructions, which have records of their own."""
        return self.opcode in CONTROL

    @property
    def is_start(self) -> bool:
        """Whether it starts work that overlaps the instructions that follow."""
        return self.starts_chain or self.opcode.endswith("-start") or self.opcode in _MESSAGES

    @property
    def is_async(self) -> bool:
        """Whether it starts or completes work that overlaps other instructions."""
        return self.opcode.endswith(("-start", "-update", "-done"))


@dataclass(frozen=True, kw_only=True)
class ProgramCosts:
    """A compiled program, instruction by instruction.

    Attributes:
        name: name of its module.
        devices: number of devices that it is partitioned over.
        state: arrays that it takes and returns in the same form, such as weights.
        results: arrays that it computes and returns.
        records: by the instructions' names.
        executed: the count of the same program.
    """

    name: str
    devices: int
    state: frozenset[ArrayShape]
    results: tuple[ArrayShape, ...]
    records: Mapping[str, InstructionRecord]
    executed: ExecutedCount
