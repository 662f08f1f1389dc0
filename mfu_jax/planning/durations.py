"""How long one instruction takes on a chip: XLA's own cycles where it gives them, else a roofline.

An efficiency is the share of a resource's peak that an instruction of a kind reaches. Those that
XLA's cycles do not cover are in `Efficiencies`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mfu_jax.flops.executed.collectives import Collective
from mfu_jax.flops.executed.instruction_costs import InstructionRecord
from mfu_jax.hardware.chips import Chip
from mfu_jax.planning import links
from mfu_jax.planning.grouped_matmuls import visited_share
from mfu_jax.planning.kernel_tiles import KernelTiles
from mfu_jax.planning.targets import Target
from mfu_jax.planning.uncounted_attention import half_of_all_pairs, head_width

# Of a call: what 2 MB on eight H100 take beyond their bytes in XLA's table (`Efficiencies.nvlink`).
_NCCL_SECONDS = 25e-6
HOST = "host_gbps_per_device"
HOST_LANES = ("host up", "host down")  # both directions of the bus go at once
_TAKEN_HOST = "host_gbps_taken"
_TYPICAL_HOST = 16  # GB/s, where a chip's is not known (scaling book, "How to think about TPUs")


class Duration(NamedTuple):
    """What an instruction, or a part of it, takes.

    Attributes:
        cause: what the device does: ``matmul``, ``vector``, ``kernel``, ``copy``, ``host``, or a
            collective's kind and link.
        seconds: with nothing else on its resource.
        lanes: the resources that it occupies beside the device's units, as `links.lanes` names
            them; empty for the units.
    """

    cause: str
    seconds: float
    lanes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Shares of a peak, 0 to 1.

    Attributes:
        kernel: matmuls of custom kernels, of the matrix units' peak. Not fitted. Those of grouped
            rows take `tpu_matmul`.
        attention: of a TPU's attention kernels whose heads fill the matrix unit; heads of 128
            fill half of one that is 256 wide. Not fitted: the softmax keeps the vector units busy.
        matmul: other matmuls of GPUs. Fitted to the one GPU run of compared_runs.yml (H100).
        tpu_matmul: those of a TPU program without cycles. Fitted to the runs of compared_runs.yml
            that say ``left_out_seconds``, by scripts/fit_plan.py; XLA's cycles come to 0.82 to
            0.90, and a v6e reached 0.79 with one large matmul (yangwhale/gpu-tpu-pedia, v7_perf).
        tpu_fusion: of the memory's bandwidth, other fusions of such a program: additions of 5 GB
            take 8.02 ms on a v6e (openxla/xprof's trace of four, tests/data). XLA's cycles agree
            there; of bfloat16 they come to half of it: they count elements, of whatever width.
        tpu_copy: of the memory's bandwidth, copies to another layout: what XLA's cycles come to
            for 32-bit elements.
        hbm: of the memory's bandwidth; not fitted.
        link: of the bandwidth of a TPU's link, and of the data-center network; not fitted.
        nvlink: of NVLink's bandwidth: all-gathers of 0.25 to 2 GB by eight H100, as XLA's table of
            collectives has them (openxla/xla, default_collective_perf_table.txtpb).
        host: of the bandwidth between HBM and the host's memory: 28.4 GB/s to a v6e, 29.4 from it,
            in openxla/xprof's trace of four (tests/data).
        cycles: time at the nominal clock / time of XLA's estimated cycles.
    """

    kernel: float = 0.5
    attention: float = 0.7
    matmul: float = 0.6
    tpu_matmul: float = 0.70
    tpu_fusion: float = 0.81
    tpu_copy: float = 0.4
    hbm: float = 0.85
    link: float = 0.9
    nvlink: float = 0.78
    host: float = 0.9
    cycles: float = 1.0


# The range of a GPU's times, of which too few runs were compared. Measured: 0.8 of the peak in the
# largest matmuls of XLA's table for H100 (default_matmul_perf_table.txtpb), NVLink at 0.89 in its
# all-reduces and at 0.73 in its reduce-scatters. Chosen by hand: all else. A network at 0.45 is a
# host with half as many NICs.
SLOW = Efficiencies(kernel=0.35, matmul=0.45, hbm=0.7, link=0.45, nvlink=0.65)
FAST = Efficiencies(kernel=0.65, matmul=0.8, hbm=0.95, link=1.0, nvlink=0.89)


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Durations of a program's instructions on some chips.

    Attributes:
        target: the chips.
        efficiencies: shares of their peaks.
        tiles: in which kernels of grouped rows multiply; None: those of the program.
    """

    target: Target
    efficiencies: Efficiencies
    tiles: KernelTiles | None = None

    def of(self, record: InstructionRecord) -> Iterator[Duration]:
        """The parts of an instruction, one after another, its transfer last."""
        if record.is_control:
            return
        if not (record.collective and record.estimated_cycles is None):
            yield from self._on_device(record)
        if record.collective:
            yield self._exchange(record, record.collective)

    def _exchange(self, record: InstructionRecord, collective: Collective) -> Duration:
        group = record.device_groups[0] if record.device_groups else ()
        link = links.route(self.target, group, collective.group_size).link
        share = self.efficiencies.nvlink if link == "nvlink" else self.efficiencies.link
        seconds = links.seconds(collective, group, self.target) / share
        if seconds and self.target.platform == "cuda":
            seconds += _NCCL_SECONDS
        lanes = links.lanes(collective, record.device_groups, link)
        return Duration(f"{collective.kind} on {link}", seconds, lanes)

    def _on_device(self, record: InstructionRecord) -> Iterator[Duration]:
        if message := links.between_slices(record, self.target):
            lane, alone = message
            yield Duration(f"{record.opcode} on dcn", alone / self.efficiencies.link, (lane,))
        elif record.host_bytes:
            rate = host_gbps(self.target.chip) * 1e9
            yield Duration(
                "host", record.host_bytes / rate / self.efficiencies.host, (_host_lane(record),)
            )
        elif record.opcode.endswith("-start"):
            yield Duration("copy", self._hbm_seconds(record), ("hbm",))
        elif record.kernels or self._is_kernel(record):
            yield Duration("kernel", self._kernel_seconds(record))
        elif guessed := half_of_all_pairs(record):
            yield Duration("kernel", self._seconds(guessed, self._kernel_share(record)))
        elif (clock := self.target.chip.clock_ghz) and _has_cycles(record):
            seconds = (record.estimated_cycles or 0) / clock / 1e9 / self.efficiencies.cycles
            # No matmul is faster than its peak, whatever XLA estimates; its cycles are too few
            # where float32 runs in six passes.
            seconds = max(seconds, record.shape.passes * self._matmul_seconds(record, 1.0))
            yield Duration("matmul" if record.flops else _vector_cause(record), seconds)
        else:
            yield self._roofline(record)

    def _kernel_seconds(self, record: InstructionRecord) -> float:
        """Kernels of grouped rows multiply whole tiles, as XLA's own matmuls do."""
        visited = self.tiles.visited_share(record) if self.tiles else visited_share(record)
        if visited is None:
            return self._matmul_seconds(record, self._kernel_share(record))
        matmul = visited * self._matmul_seconds(record, self.efficiencies.tpu_matmul)
        return max(matmul, self._hbm_seconds(record))

    def _is_kernel(self, record: InstructionRecord) -> bool:
        """Whether it is a TPU's kernel of XLA's own, such as that of ``ragged_dot``: no cycles."""
        return bool(
            self.target.platform == "tpu"
            and record.opcode == "custom-call"
            and record.flops
            and record.estimated_cycles is None
        )

    def _kernel_share(self, record: InstructionRecord) -> float:
        """Heads that are narrower than a TPU's matrix unit leave the rest of it idle."""
        shares, unit, width = self.efficiencies, self.target.chip.matrix_unit, head_width(record)
        return min(shares.attention, width / unit) if unit and width else shares.kernel

    def _roofline(self, record: InstructionRecord) -> Duration:
        shares, memory = self.efficiencies, self._hbm_seconds(record)
        on_tpu = self.target.platform == "tpu"
        matmul = self._matmul_seconds(record, shares.tpu_matmul if on_tpu else shares.matmul)
        if record.flops:
            return Duration("matmul", max(matmul, memory))
        if on_tpu:
            own = {"fusion": shares.tpu_fusion, "copy": shares.tpu_copy}
            memory *= shares.hbm / own.get(record.opcode, shares.hbm)
        return Duration(_vector_cause(record), memory)

    def _matmul_seconds(self, record: InstructionRecord, efficiency: float) -> float:
        return self._seconds(record.flops_by_dtype, efficiency)

    def _seconds(self, flops_by_dtype: Mapping[str, int], efficiency: float) -> float:
        chip = self.target.chip
        return sum(
            flops / chip.peak_flops_per_sec(dtype) / efficiency
            for dtype, flops in flops_by_dtype.items()
        )

    def _hbm_seconds(self, record: InstructionRecord) -> float:
        bandwidth = self.target.chip.memory_bandwidth_bytes_per_sec
        return record.hbm_bytes / bandwidth / self.efficiencies.hbm


def host_gbps(chip: Chip) -> float:
    """10⁹ bytes/s between a device and its host's memory, one way; what is taken if not known."""
    given = chip.interconnect
    return given.get(HOST, given.get(_TAKEN_HOST, _TYPICAL_HOST))


def _has_cycles(record: InstructionRecord) -> bool:
    """Whether XLA says how long it takes, and can be believed.

    Its estimates of one elementwise operation that it did not fuse are up to 24 times what the
    bytes need (a broadcast, an add, the sum of partial results behind an attention kernel), while
    those of fusions agree with runs.
    """
    is_bare = not record.flops and record.opcode not in ("fusion", "copy", "custom-call")
    return record.estimated_cycles is not None and not is_bare


def _host_lane(record: InstructionRecord) -> str:
    return HOST_LANES[0 if record.to_host else 1]


def _vector_cause(record: InstructionRecord) -> str:
    return "copy" if record.opcode.startswith("copy") else "vector"
