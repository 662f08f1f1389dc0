"""How long one instruction takes on a chip: a roofline, or a kernel's own model.

An efficiency is the share of a resource's peak that a kind of instruction reaches. XLA's cycle
estimates are not used: they come with machine code, after most of a compile, and are no better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mfu_jax.flops.executed.cost_types import Collective
from mfu_jax.flops.executed.hlo.opcodes import is_free
from mfu_jax.flops.executed.mesh_axes import named_axes
from mfu_jax.flops.executed.records import InstructionRecord
from mfu_jax.hardware.chips import Chip
from mfu_jax.planning.step_time import links, nccl
from mfu_jax.planning.step_time.attention_kernels import (
    AS_COMPILED,
    RunsKernel,
    core_cycles_per_sec,
    half_of_all_pairs,
    time_on_tpu,
)
from mfu_jax.planning.step_time.gpu_kernels import (
    LAUNCH_SECONDS,
    attention_share,
    is_attention,
    is_masked,
    odd_sizes,
)
from mfu_jax.planning.step_time.grouped_matmuls import Grid, KernelTiles, visited_share
from mfu_jax.planning.targets import Target

HOST = "host_gbps_per_device"
HOST_LANES = ("host up", "host down")  # both directions of the bus work at once
_TAKEN_HOST = "host_gbps_taken"
_NARROW_UNIT = 128
# Of a TensorCore's vector units: four instructions on 8 × 128 numbers (scaling book, "How to think
# about TPUs").
_VECTOR_OPS_PER_CYCLE = 4 * 8 * 128
# Of one array's element in one stage of a sort, a bitonic network. With it, the sorts of MaxText's
# own expert layer (12 arrays of 229,376 rows; two of 28,672 × 192 along the 192, for top_k) take
# what sorts do in a profile of Hy3-295B on a TPU7x: 161 ms of a step's 79 such layers
# (yangwhale/gpu-tpu-pedia@3fa9ce1, tpu/kernel-equivalence-validation, section 9).
_SORT_OPS = 21
# Of a TPU's instruction on arrays, however small: XLA's estimates of the smallest fusions in
# tests/programs come to 1.2 µs on a v5e, v5p and v6e, and 1.05 on a TPU7x.
_START_SECONDS = 1.2e-6
# Of a grouped kernel's step besides its matmul or its copies. Fitted to steps of Hy3-295B on 64
# TPU7x that differ in megablox's tiles alone (gpu-tpu-pedia, Hunyuan3-295B, TUNING-v7.md, 3.4.6):
# beside the 20.61 s of 512 × 2048 × 1536, 1.2, 0.4, 1.1 and 5.4 s longer; here 1.5, 0.7, 1.1, 5.4.
_CYCLES_PER_GROUPED_STEP = 1280
_ONLY_ORDER = frozenset("add-dependency after-all domain opt-barrier optimization-barrier".split())
_TYPICAL_HOST = 16  # GB/s, if the chip's is not known (scaling book, "How to think about TPUs")


class Duration(NamedTuple):
    """The time of an instruction, or of a part of it.

    Attributes:
        cause: what the device does: ``matmul``, ``vector``, ``kernel``, ``copy``, ``host``, or a
            collective's kind and link.
        seconds: its time with nothing else on its resource.
        lanes: the resources that it occupies instead of the device's own units, as `links.lanes`
            names them; empty for the units.
    """

    cause: str
    seconds: float
    lanes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Shares of a peak, 0 to 1.

    Attributes:
        kernel: custom kernels' matmuls, of the matrix units' peak. Not fitted; attention on TPUs
            has its own times (`attention_kernels`).
        grouped_matmul: those of a TPU's grouped kernels, with the tiles that they visit, at a
            chip's default clock, where their tiles are not known or a unit is 128 × 128. Not
            measured: between `tpu_matmul` and tokamax's.
        tokamax_grouped_matmul: those of tokamax's: 36.2% of the 23.54 s of a step in a profile of
            Hy3-295B on TPU7x (gpu-tpu-pedia, Hunyuan3-295B, TUNING-v7.md, 2.7). Not fitted.
        narrow_grouped_matmul: the same in eight bits, whose peak is twice as high and whose kernels
            are not twice as fast: 0.42 by what 189 of 192 experts take in a profile of Hy3-295B in
            fp8, and by the 682 TFLOP/s of useful FLOPs in another (the same page, sections 3.4.7
            and 2.7). Not fitted to a step.
        matmul: other matmuls on one GPU: 0.72 to 0.88 on an H100 (gpu_kernels.json in
            scripts/results). Not fitted to a step.
        shared_matmul: the same on several, where collectives take multiprocessors and power.
            Fitted to 14 runs on 64 to 512 GPUs, whose median error it makes 0.5% beside what hosts
            wait for each other; 14 others are 1.6% short in the median (held_out_runs.json there).
        odd_matmul: those with a dimension that is no multiple of 8: 0.24 to 0.43 there.
        gpu_attention: cuDNN's attention over long sequences, from the same table.
        gpu_masked_attention: the same with a mask or a bias.
        tpu_matmul: the same on a TPU, with units of 256 × 256 at a chip's default clock: 0.82 in a
            profile of Qwen3 8B on a v6e (vlasenkoalexey/tpu_performance_autoresearch_wiki); in one
            large matmul, 0.79 there and 0.76 on a TPU7x (yangwhale/gpu-tpu-pedia, v7_perf). Not
            fitted to a step.
        narrow_tpu_matmul: with units of 128 × 128: 0.92 in one matmul of 8192 on a v5e (JAX's docs,
            Pallas TPU, "Matrix Multiplication"). XLA's own cycles come to 0.88 there, 0.90 on a
            v5p, 0.70 on a v6e. Not fitted to a step.
        tpu_fusion: other fusions on a TPU, of the memory bandwidth, where a chip has no
            `memory_share` of its own: additions of 5 GB take 8.02 ms on a v6e (openxla/xprof's
            trace of four, tests/data). XLA's cycles agree there; for bfloat16 they imply half of
            it, as they count elements of whatever width. Also copies that move whole tiles: XLA
            gives one of 2 GB and an addition the same cycles on a v5e, v5p, v6e and TPU7x.
        tpu_copy: copies that rearrange what is in a tile, of the memory bandwidth: what XLA's
            cycles imply for 32-bit elements.
        hbm: of a TPU's memory bandwidth; not fitted.
        gpu_hbm: of a GPU's: all fusions of a step, the median of three traced steps: GPT-2 on an
            H100 (0.72), Llama 3.2 1B and Llama 3 8B on an H200 (0.79 each; h200_runs.json in
            scripts/results). Arrays of 0.1 GB reach 0.87 alone. Not fitted to a step's time.
        ici: of the bandwidth of a TPU's links: the mean of 0.95 in all-gathers on a v5e (scaling
            book, "Sharded matrices"), 0.96 in permutations on a v5p and a v6e (marin-community/
            marin#6736) and 0.89 in all-gathers on a TPU7x (tpu-recipes, microbenchmarks/ironwood).
        link: of the data-center network's bandwidth; not fitted.
        nvlink: of NVLink's bandwidth: all-gathers of 0.25 to 2 GB on eight H100, from XLA's table
            of collectives (openxla/xla, default_collective_perf_table.txtpb); others in `nccl`.
        host: of the bandwidth between HBM and host memory: 28.4 GB/s to a v6e, 29.4 from it, in
            openxla/xprof's trace of four (tests/data).
    """

    kernel: float = 0.5
    grouped_matmul: float = 0.7
    tokamax_grouped_matmul: float = 0.585
    narrow_grouped_matmul: float = 0.42
    matmul: float = 0.77
    shared_matmul: float = 0.65
    odd_matmul: float = 0.3
    gpu_attention: float = 0.62
    gpu_masked_attention: float = 0.27
    tpu_matmul: float = 0.80
    narrow_tpu_matmul: float = 0.92
    tpu_fusion: float = 0.81
    tpu_copy: float = 0.4
    hbm: float = 0.85
    gpu_hbm: float = 0.79
    ici: float = 0.94
    link: float = 0.9
    nvlink: float = 0.78
    host: float = 0.9


# The range for GPUs, where too few runs were compared. Measured: 0.8 of the peak in the largest
# matmuls of XLA's table for H100 (default_matmul_perf_table.txtpb), NVLink at 0.89 in its
# all-reduces and at 0.73 in its reduce-scatters. All else is chosen by hand. A network at 0.45
# stands for a host with half as many NICs.
SLOW = Efficiencies(
    **{"kernel": 0.35, "matmul": 0.6, "shared_matmul": 0.45, "odd_matmul": 0.2, "gpu_hbm": 0.7},
    **{"link": 0.45, "nvlink": 0.65, "gpu_attention": 0.5, "gpu_masked_attention": 0.22},
)
FAST = Efficiencies(
    **{"kernel": 0.65, "matmul": 0.88, "shared_matmul": 0.8, "odd_matmul": 0.6, "gpu_hbm": 0.87},
    **{"link": 1.0, "nvlink": 0.89, "gpu_attention": 0.7, "gpu_masked_attention": 0.33},
)


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Durations of a program's instructions on some chips.

    Attributes:
        target: the chips.
        efficiencies: shares of the chips' peaks that instructions reach.
        tiles: tile sizes of grouped-matmul kernels; None: the program's own.
        has_tokamax_experts: whether these kernels are tokamax's in the run.
        mesh: axis → size, in the order of the program's devices; empty: not known.
        attention: where the run's attention kernel is another than the program's.
        clock: of a TPU's cores, as a share of the clock at which its peaks hold.
        vmem: the share of their speed that a TPU's matmuls reach in the VMEM that they may take.
    """

    target: Target
    efficiencies: Efficiencies
    tiles: KernelTiles | None = None
    has_tokamax_experts: bool = False
    mesh: Mapping[str, int] = field(default_factory=dict)
    attention: RunsKernel = AS_COMPILED
    clock: float = 1.0
    vmem: float = 1.0

    @property
    def matmul_share(self) -> float:
        """The share of the peak that a matmul reaches; on GPUs one with even dimensions."""
        shares, chip = self.efficiencies, self.target.chip
        if self.target.platform == "cuda":
            return shares.matmul if self.target.devices == 1 else shares.shared_matmul
        narrow = chip.matrix_unit == _NARROW_UNIT
        share = shares.narrow_tpu_matmul if narrow else shares.tpu_matmul
        return share * self.vmem / chip.default_clock

    def of(self, record: InstructionRecord) -> Iterator[Duration]:
        """The parts of an instruction in order of execution, its transfer last."""
        if record.is_control:
            return
        if record.collective:
            yield self._exchange(record, record.collective)
        else:
            yield from self._on_device(record)

    def _exchange(self, record: InstructionRecord, collective: Collective) -> Duration:
        group = record.device_groups[0] if record.device_groups else ()
        link = links.route(self.target, group, collective.group_size).link
        if self.target.platform == "cuda":
            seconds = self._by_nccl(collective, group)
        else:
            share = self.efficiencies.ici if link == "ici" else self.efficiencies.link
            seconds = links.seconds(collective, group, self.target) / share
        lanes = links.lanes(collective, record.device_groups, link)
        axes = named_axes(record, self.mesh)
        over = f" over {axes}" if axes else ""
        return Duration(f"{collective.kind}{over} on {link}", seconds, lanes)

    def _by_nccl(self, collective: Collective, group: Sequence[int]) -> float:
        size = collective.group_size or self.target.devices
        if size < 2:
            return 0.0
        nvlink = self.target.chip.interconnect["nvlink_gbps"] * 1e9
        hosts = links.parts(self.target, group, size)
        network = self.target.network_bytes_per_sec if hosts > 1 else 0.0  # not known of every chip
        return nccl.seconds(
            replace(collective, group_size=size),
            hosts=hosts,
            nvlink_bytes_per_sec=nvlink * self.efficiencies.nvlink,
            network_bytes_per_sec=network * self.efficiencies.link,
        )

    def _on_device(self, record: InstructionRecord) -> Iterator[Duration]:
        if message := links.between_slices(record, self.target):
            lane, alone = message
            yield Duration(f"{record.opcode} on dcn", alone / self.efficiencies.link, (lane,))
        elif record.host_bytes:
            rate = host_gbps(self.target.chip) * 1e9
            lane = HOST_LANES[0 if record.to_host else 1]
            yield Duration("host", record.host_bytes / rate / self.efficiencies.host, (lane,))
        elif self.target.platform == "cuda" and not half_of_all_pairs(record):
            yield self._on_gpu(record)
        elif record.opcode.endswith("-start"):
            yield Duration("copy", self._hbm_seconds(record), ("hbm",))
        elif record.kernels or self._is_kernel(record):
            yield Duration("kernel", self._kernel_seconds(record))
        elif guessed := half_of_all_pairs(record):
            yield Duration("kernel", self._of_kernel(record, guessed))
        else:
            yield self._roofline(record)

    def _on_gpu(self, record: InstructionRecord) -> Duration:
        """A GPU runs what a command buffer starts on one stream, one after the other."""
        shares, memory = self.efficiencies, self._hbm_seconds(record)
        if is_attention(record):
            masked = is_masked(record)
            longest = shares.gpu_masked_attention if masked else shares.gpu_attention
            cause, share = "kernel", attention_share(record, longest, masked=masked)
        elif record.kernels:
            cause, share = "kernel", shares.kernel
        else:
            cause = "matmul" if record.flops else _vector_cause(record)
            share = shares.odd_matmul if odd_sizes(record) else self.matmul_share
        precision = "highest" if record.shape.is_full_float32 else None
        matmul = self._seconds(record.flops_by_dtype, share, precision)
        launch = LAUNCH_SECONDS if record.hbm_bytes else 0.0
        return Duration(cause, max(matmul, memory) + launch)

    def _kernel_seconds(self, record: InstructionRecord) -> float:
        """A kernel's time; grouped kernels multiply whole tiles, as XLA's own matmuls do."""
        unit = self.target.chip.matrix_unit or 1
        grid = self.tiles.grid(record, unit) if self.tiles else None
        is_known = unit > _NARROW_UNIT and set(record.flops_by_dtype) == {"bf16"}
        if grid and is_known and not self.has_tokamax_experts:
            return self._in_tiles(record, grid)
        of_tiles = grid.visited if grid else None
        visited = of_tiles if self.tiles else visited_share(record, unit)
        if visited is None:
            return self._of_kernel(record, record.flops_by_dtype)
        seconds = sum(
            self._seconds({dtype: flops}, self._grouped_share(dtype))
            for dtype, flops in record.flops_by_dtype.items()
        )
        return max(visited * seconds, self._hbm_seconds(record))

    def _in_tiles(self, record: InstructionRecord, grid: Grid) -> float:
        """The time of a kernel in bfloat16 and known tiles: its steps multiply while they copy."""
        chip, shares = self.target.chip, self.efficiencies
        share = shares.tpu_matmul / chip.default_clock
        matmul = grid.visited * self._seconds(record.flops_by_dtype, share)
        bandwidth = chip.memory_bandwidth_bytes_per_sec * (chip.memory_share or shares.tpu_fusion)
        cycles = grid.steps * _CYCLES_PER_GROUPED_STEP
        return max(matmul, grid.bytes / bandwidth) + cycles / core_cycles_per_sec(chip) / self.clock

    def _is_narrow(self, dtype: str) -> bool:
        """Whether matmuls of these operands have a higher peak than bfloat16's."""
        chip = self.target.chip
        return chip.peak_flops_per_sec(dtype) > chip.peak_flops_per_sec("bf16")

    def _grouped_share(self, dtype: str) -> float:
        """The share of a dtype's peak that a grouped kernel reaches."""
        shares, narrow = self.efficiencies, self._is_narrow(dtype)
        share = shares.narrow_grouped_matmul if narrow else shares.grouped_matmul
        if self.has_tokamax_experts and not narrow:
            share = shares.tokamax_grouped_matmul
        return share / self.target.chip.default_clock

    def _is_kernel(self, record: InstructionRecord) -> bool:
        """Whether it is one of XLA's own TPU kernels, such as ``ragged_dot``'s."""
        is_custom = self.target.platform == "tpu" and record.opcode == "custom-call"
        return is_custom and record.flops > 0

    def saved_by_blocks(self, record: InstructionRecord, block: int) -> float:
        """Seconds that a run of a splash kernel would take less with blocks of so many positions.

        Where the mask cuts a block, more masked pairs are in it, which this does not count; of a
        window's blocks it counts all.
        """
        flops = sum((half_of_all_pairs(record) or record.flops_by_dtype).values())
        times = [
            time_on_tpu(record, flops, self.target.chip, self.attention, size)
            for size in (1, block)
        ]
        before, after = (time.vector_seconds if time else 0.0 for time in times)
        return (before - after) / self.clock

    def _of_kernel(self, record: InstructionRecord, flops: Mapping[str, int]) -> float:
        """The time of a kernel that multiplies this much."""
        chip = self.target.chip
        if attention := time_on_tpu(record, sum(flops.values()), chip, self.attention):
            matmul = self._seconds(flops, attention.matmul_share)
            return matmul + attention.vector_seconds / self.clock
        return self._seconds(flops, self.efficiencies.kernel)

    def _roofline(self, record: InstructionRecord) -> Duration:
        shares, memory = self.efficiencies, self._hbm_seconds(record)
        start, vector = _start_seconds(record), self._vector_seconds(record)
        if record.flops:
            matmul = record.shape.passes * self._seconds(record.flops_by_dtype, self.matmul_share)
            return Duration("matmul", start + max(matmul, memory, vector))
        fusion = self.target.chip.memory_share or shares.tpu_fusion
        copy = fusion if record.shape.keeps_tiles else shares.tpu_copy
        own = {"fusion": fusion, "copy": copy}
        memory *= shares.hbm / own.get(record.opcode, shares.hbm)
        return Duration(_vector_cause(record), start + max(memory, vector))

    def _vector_seconds(self, record: InstructionRecord) -> float:
        """The time of elementwise operations; a transcendental function is one: a lower bound."""
        rate = _VECTOR_OPS_PER_CYCLE * core_cycles_per_sec(self.target.chip) * self.clock
        operations = _sort_ops(record) or record.elementwise + record.transcendental
        return operations / rate if rate else 0.0

    def _seconds(
        self, flops_by_dtype: Mapping[str, int], efficiency: float, precision: str | None = None
    ) -> float:
        chip = self.target.chip
        return sum(
            flops / chip.peak_flops_per_sec(dtype, precision) / efficiency / self.clock
            for dtype, flops in flops_by_dtype.items()
        )

    def _hbm_seconds(self, record: InstructionRecord) -> float:
        shares = self.efficiencies
        share = shares.gpu_hbm if self.target.platform == "cuda" else shares.hbm
        return record.hbm_bytes / self.target.chip.memory_bandwidth_bytes_per_sec / share


def host_gbps(chip: Chip) -> float:
    """10⁹ bytes/s between a device and host memory, one way; an assumed value if not known."""
    given = chip.interconnect
    return given.get(HOST, given.get(_TAKEN_HOST, _TYPICAL_HOST))


def _start_seconds(record: InstructionRecord) -> float:
    """What an instruction takes before and after its work; none if it has only single numbers."""
    if record.opcode == "custom-call" or record.opcode in _ONLY_ORDER or is_free(record.opcode):
        return 0.0
    arrays = (*record.shape.results, *record.shape.operand_arrays)
    return _START_SECONDS if any(array.dims for array in arrays) else 0.0


def _sort_ops(record: InstructionRecord) -> int:
    """Operations of a sort, whose network has k(k + 1)/2 stages for 2^k rows; 0 for others."""
    rounds = max(0, record.shape.sorted - 1).bit_length()
    elements = sum(math.prod(array.dims) for array in record.shape.results)
    return _SORT_OPS * elements * rounds * (rounds + 1) // 2


def _vector_cause(record: InstructionRecord) -> str:
    return "copy" if record.opcode.startswith("copy") else "vector"
