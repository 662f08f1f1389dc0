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

from tests.campaigns.planted.judging import Judged, add_arguments, judge, verdict
from tests.campaigns.planted.step_faults import ON_GPU, FaultPair, Side

_WHAT = "faults in the step on an H100"
_HEAD = ("fault", "step", "advice", "gain", "measured", "off", "others")
_COMPILERS = 8  # threads


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--turns", type=int, default=7, help="of each step of a pair")
    parser.add_argument("--steps", type=int, default=10, help="of each turn, and traced")
    parser.add_argument("--keep", type=Path, help="folder for the traces")
    parser.add_argument("--keys", nargs="*", default=[], help="more keys of the trainer's config")
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
            print("  ".join(row.cells), file=sys.stderr, flush=True)
            rows.append(row)
    return verdict(_WHAT, _HEAD, rows, is_written=arguments.write)


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
        write(record(self.compiled, model=model_of(self._config)), path)


def _compiled(pairs: Sequence[FaultPair], keys: Sequence[str]) -> dict[Side, _Run]:
    """All sides, each once; the compiler works on several at once."""
    sides = dict.fromkeys(side for pair in pairs for side in (pair.faulty, pair.healthy))
    runs = {side: _Run(side, keys) for side in sides}
    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(_Run.compile, runs.values()))
    return runs


def _row(name: str, runs: dict[Side, _Run], folder: Path, turns: int, steps: int) -> Judged:
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
    brought = median(slow - fault.share * fast for slow, fast in times)
    return judge(name, fault.cause, advice, step=step, brought=brought)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
