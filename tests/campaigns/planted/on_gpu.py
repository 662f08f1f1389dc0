"""Plants faults in the reference trainer's step on this machine's GPU; asks for advice.

    python -m tests.campaigns.planted.on_gpu [--only chain,remat] [--turns 7] [--steps 10]
        [--keep FOLDER] [--write]

Every step is compiled with and without the fault. Then the two take turns at running, untraced; a
trace of the faulty step follows, and the first advice of `mfu-jax profile` is compared with the
median difference between the turns. The exit code is 1 if a fault is not named first, its gain is
off by more than 20%, or a healthy step gets advice. A fault whose removal brings less than 5% of a
step must not be named. `--keep` keeps the traces, with their programs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from mfu_jax.util.formatting import columns
from scripts import results
from tests.campaigns.planted.step_faults import ON_GPU, FaultPair, Side

_WITHIN = 0.2
_LEAST = 0.05  # of a step: smaller gains deserve no advice
_WHAT = "faults in the step on an H100"
_HEAD = ("fault", "step", "advice", "gain", "measured", "off", "others")
_COMPILERS = 8  # threads


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of faults, joined by commas")
    parser.add_argument("--turns", type=int, default=7, help="of each step of a pair")
    parser.add_argument("--steps", type=int, default=10, help="of each turn, and traced")
    parser.add_argument("--keep", type=Path, help="folder for the traces")
    parser.add_argument("--keys", nargs="*", default=[], help="more keys of the trainer's config")
    parser.add_argument("--write", action="store_true", help="write to scripts/results/")
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",") if arguments.only else list(ON_GPU)
    began = time.monotonic()
    runs = _compiled([ON_GPU[name] for name in names], arguments.keys)
    print(f"compiled in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            folder = (arguments.keep or Path(scratch)) / name
            row = _row(name, runs, folder, arguments.turns, arguments.steps)
            print("  ".join(row[0]), file=sys.stderr, flush=True)
            rows.append(row)
    print("\n".join(columns([_HEAD, *(row for row, _ in rows)], "<><>>><")))
    if arguments.write:
        results.write("planted_faults", _WHAT, results.named(_HEAD, [row for row, _ in rows]))
    return 0 if all(right for _, right in rows) else 1


class _Run:
    """A compiled step, and what it takes to run it.

    Args:
        side: what to compile.
        keys: more keys of the trainer's config.
    """

    def __init__(self, side: Side, keys: Sequence[str]) -> None:
        from mfu_jax.trainer.config import pyconfig
        from mfu_jax.trainer.step.mesh import make_mesh, with_mesh_sizes
        from mfu_jax.trainer.step.state import abstract_state, resolve_attention
        from mfu_jax.trainer.step.train_step import lower_train_step

        config = with_mesh_sizes(pyconfig.load([*side.words, *keys]))
        self._mesh = make_mesh(config)
        self._config = resolve_attention(config, self._mesh)
        with side.plant():
            shapes = abstract_state(self._config, self._mesh)
            self._lowered = lower_train_step(self._config, self._mesh, shapes)
        self._state: Any = None

    def compile(self) -> None:
        self.compiled = self._lowered.compile()

    def start(self) -> None:
        """Makes weights and a batch."""
        from mfu_jax.trainer.data.batches import make_iterator
        from mfu_jax.trainer.step.mesh import put_batch, rows_per_process
        from mfu_jax.trainer.step.state import create_state

        rows = rows_per_process(self._config, self._mesh)
        data = make_iterator(self._config, split="train", rows_per_process=rows, accumulation=1)
        self._batch = put_batch(next(data), self._mesh)
        self._state = create_state(self._config, self._mesh)
        self.seconds(2)

    def stop(self) -> None:
        """Frees the weights."""
        self._state, self._batch = None, {}

    def seconds(self, steps: int) -> float:
        """Mean seconds per step."""
        import jax

        jax.block_until_ready(self._state)
        began = time.perf_counter()
        for _ in range(steps):
            self._state, metrics = self.compiled(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))
        return (time.perf_counter() - began) / steps

    def trace(self, folder: Path, steps: int) -> None:
        """Traces marked steps and one more, which ends the last one; dumps the program."""
        import jax

        from mfu_jax.dumps.files import write
        from mfu_jax.dumps.recording import record
        from mfu_jax.instrumentation.program_analysis import model_flops
        from mfu_jax.storage.trace_folders import dump_path
        from mfu_jax.trainer.run.run_logger import model_of

        jax.profiler.start_trace(str(folder))
        for step in range(steps + 1):
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                self._state, metrics = self.compiled(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))
        jax.profiler.stop_trace()
        path = Path(dump_path(folder, "train_step"))
        path.parent.mkdir(parents=True, exist_ok=True)
        write(record(self.compiled, model=model_flops(model_of(self._config))), path)


def _compiled(pairs: Sequence[FaultPair], keys: Sequence[str]) -> dict[Side, _Run]:
    """All sides, each once; the compiler works on several at once."""
    sides = dict.fromkeys(side for pair in pairs for side in (pair.faulty, pair.healthy))
    runs = {side: _Run(side, keys) for side in sides}
    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(_Run.compile, runs.values()))
    return runs


def _row(
    name: str, runs: dict[Side, _Run], folder: Path, turns: int, steps: int
) -> tuple[tuple[str, ...], bool]:
    from mfu_jax.profiling.profile import read_profile

    fault = ON_GPU[name]
    faulty, healthy = runs[fault.faulty], runs[fault.healthy]
    times = []
    for run in {faulty, healthy}:
        run.start()
    for turn in range(turns):
        first, second = (faulty, healthy) if turn % 2 else (healthy, faulty)
        seconds = {id(run): run.seconds(steps) for run in (first, second)}
        times.append((seconds[id(faulty)], seconds[id(healthy)]))
    faulty.trace(folder, steps)
    for run in {faulty, healthy}:
        run.stop()
    advice = read_profile(folder).advice
    step = median(slow for slow, _ in times)
    first_cause, gain = (advice[0].cause, advice[0].gain_seconds) if advice else ("none", 0.0)
    others = ", ".join(f"{one.cause} {_ms(one.gain_seconds)}" for one in advice[1:])
    if not fault.cause:
        return (name, _ms(step), first_cause, _ms(gain), "", "", others), not advice
    brought = median(slow - fault.share * fast for slow, fast in times)
    off = gain / brought - 1 if brought else 0.0
    is_right = first_cause == fault.cause and abs(off) <= _WITHIN
    if brought < _LEAST * step:
        is_right = fault.cause not in {one.cause for one in advice}
    row = (name, _ms(step), first_cause, _ms(gain), _ms(brought), f"{off:+.0%}", others)
    return row, is_right


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
