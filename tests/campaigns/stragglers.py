"""Four real processes over loopback, one of them slow in a known way: is it named, and why?

    python -m tests.campaigns.stragglers                # 100 plants, 100 healthy runs:
                                                             # some 20 minutes on two quiet cores
    python -m tests.campaigns.stragglers --keep=FILE    # the same; again: it goes on

Every run is an episode of a job: a fresh `MetricLogger` over steps with gloo collectives, with a
delay planted in one process, or in none. The parent draws the plants; process 0 prints what the
logger found. Kinds: ``before`` and ``after`` (more work on the device before or after the
collective), ``inside`` (the process is stopped again and again while it is in the collective),
``data``, ``python``, ``busy`` (other programs on its core), ``none``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaigns.promises import Promise, seeded, verdict

PROCESSES = 4
KINDS = ("before", "inside", "after", "data", "python", "busy")
CAUSE = {
    "before": "compute",
    "after": "compute",
    "inside": "stopped",
    "data": "data",
    "python": "python",
    "busy": "starved",
}
PERIOD = 12
WINDOWS = 4
# More than the step of a loaded machine takes: a delay that hides behind the device is none.
_DELAY_SECONDS = 0.2
_ROUNDS = 60  # of the step's own matmuls; a slow process does fifty times as many
_WIDTH = 128


class Episode(NamedTuple):
    """One run: what was planted where, and what the logger found."""

    kind: str
    victim: int
    found: tuple[tuple[int, str], ...]

    @property
    def is_right(self) -> bool:
        """Nobody is named without need; else the victim, and nobody else, with its cause."""
        wanted = () if self.kind == "none" else ((self.victim, CAUSE[self.kind]),)
        return self.found == wanted


def draw(runs: int, seed: int, healthy: int = 0) -> list[tuple[str, int]]:
    """Plants of each kind equally often, with healthy runs among them."""
    chooser = random.Random(seed)
    kinds = [KINDS[i % len(KINDS)] for i in range(runs)] + ["none"] * healthy
    if healthy:
        chooser.shuffle(kinds)
    return [(kind, chooser.randrange(PROCESSES)) for kind in kinds]


def run_job(plants: list[tuple[str, int]]) -> Iterator[Episode]:
    """Runs all episodes in one job of four processes, each told when it is over."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    }
    command = [sys.executable, "-m", "tests.campaigns.stragglers", "--worker"]
    text = json.dumps(plants)
    workers = [
        subprocess.Popen(
            [*command, str(process), str(port), text],
            stdout=subprocess.PIPE if process == 0 else subprocess.DEVNULL,
            stderr=None if os.environ.get("STRAGGLERS_VERBOSE") else subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        for process in range(PROCESSES)
    ]
    try:
        yield from _watch(workers, plants)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _watch(
    workers: list[subprocess.Popen[str]], plants: list[tuple[str, int]]
) -> Iterator[Episode]:
    """Follows process 0; plants from outside what a process cannot do to itself."""
    with contextlib.ExitStack() as plant:
        assert workers[0].stdout is not None
        for line in workers[0].stdout:
            word, _, rest = line.partition(" ")
            if word == "begin":
                kind, victim = plants[int(rest)]
                if kind in ("inside", "busy"):
                    from_outside = _stops if kind == "inside" else _busy
                    plant.enter_context(from_outside(workers[victim].pid))
            elif word == "end":
                plant.close()
                number, found = json.loads(rest)
                yield Episode(*plants[number], tuple((p, c) for p, c in found))


@contextlib.contextmanager
def _stops(pid: int) -> Iterator[None]:
    """Stops a process for a while, again and again: several times in the shortest window."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.03):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.2)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _busy(pid: int) -> Iterator[None]:
    """Others are on its core: all its threads share one with programs of higher priority."""
    core = {min(os.sched_getaffinity(0))}
    before = os.sched_getaffinity(pid)
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    for spinner in spinners:
        os.sched_setaffinity(spinner.pid, core)
    priority = os.getpriority(os.PRIO_PROCESS, pid)
    _pin(pid, core, 19)
    try:
        yield
    finally:
        _pin(pid, before, priority)
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def _pin(pid: int, cores: set[int], priority: int) -> None:
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task), cores)
            os.setpriority(os.PRIO_PROCESS, int(task), priority)


def work(process: int, port: int, plants: list[tuple[str, int]]) -> None:
    """One of the four processes."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", PROCESSES, process)
    step, state, rounds = _program(process)
    say = print if process == 0 else (lambda *_, **__: None)
    for _ in range(5):
        state, loss = step(state, *rounds("none", False))
        loss.block_until_ready()
    for number, (kind, victim) in enumerate(plants):
        say(f"begin {number}", flush=True)
        found = _episode(kind, process == victim, step, state, rounds)
        say(f"end {json.dumps([number, found])}", flush=True)


def _program(process: int) -> tuple[Any, Any, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("d",))
    split, whole = PartitionSpec("d"), PartitionSpec()

    def body(w: Any, x: Any, before: Any, after: Any) -> Any:
        def turn(_: Any, y: Any) -> Any:
            return jnp.tanh(y @ w)

        y = jax.lax.fori_loop(0, before[0], turn, x)
        gradient = jax.lax.psum(x.T @ y, "d") / 1e6
        tail = jax.lax.fori_loop(0, after[0], turn, x @ gradient)
        return w - 1e-9 * gradient + 1e-9 * jnp.sum(tail) * 0, jnp.sum(tail)[None]

    step = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(whole, split, split, split),
            out_specs=(whole, split),
            check_vma=False,
        )
    )
    rows = np.random.default_rng(process).random((64, _WIDTH), np.float32)
    w = jax.device_put(np.eye(_WIDTH, dtype=np.float32), NamedSharding(mesh, whole))

    def spread(local: Any) -> Any:
        return jax.make_array_from_process_local_data(NamedSharding(mesh, split), local)

    x = spread(rows)

    def rounds(kind: str, is_victim: bool) -> tuple[Any, Any, Any]:
        counts = [
            _ROUNDS * (50 if is_victim and kind == name else 1) for name in ("before", "after")
        ]
        return x, *(spread(np.array([count], np.int32)) for count in counts)

    return step, w, rounds


def _episode(
    kind: str, is_victim: bool, step: Any, state: Any, rounds: Any
) -> list[tuple[int, str]]:
    """Steps under a logger; what it found, in process 0."""
    from mfu_jax import MetricLogger
    from mfu_jax.logger.hosts.monitor import HostMonitor

    arguments = rounds(kind, is_victim)
    logger = MetricLogger(sinks=[], host_log_period=PERIOD, warmup_steps=3)
    loss = None
    for number in range(PERIOD * WINDOWS + 2):  # a step is recorded when the next one is
        with logger.waiting("data"):
            if kind == "data" and is_victim:
                time.sleep(_DELAY_SECONDS)
        if kind == "python" and is_victim:
            time.sleep(_DELAY_SECONDS)
        state, losses = step(state, *arguments)
        loss = losses.addressable_data(0)
        logger.record(number, {"loss": loss})
    logger.flush()
    (hosts,) = (m for m in logger._pipeline._monitors if isinstance(m, HostMonitor))
    deadline = time.monotonic() + 5.0
    while process_is_first() and hosts._view.step < PERIOD * WINDOWS:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    view = hosts._view
    if os.environ.get("STRAGGLERS_VERBOSE"):
        for report in view.reports:
            print(kind, report, file=sys.stderr)
        print([str(slow) for slow in view.suspects], file=sys.stderr)
    logger.close()
    return [(slow.process, slow.cause) for slow in view.slow]


def process_is_first() -> bool:
    """Whether this process draws the conclusions."""
    import jax

    return jax.process_index() == 0


def table(episodes: Iterable[Episode]) -> str:
    """How many runs of each kind were right, and how many named somebody who was healthy."""
    right, total, innocent = Counter[str](), Counter[str](), Counter[str]()
    for episode in episodes:
        total[episode.kind] += 1
        right[episode.kind] += episode.is_right
        victim = None if episode.kind == "none" else episode.victim
        innocent[episode.kind] += any(process != victim for process, _ in episode.found)
    planted = [kind for kind in total if kind != "none"]
    lines = [f"{'delay':<12}{'runs':>6}{'right':>7}{'others named':>14}"]
    lines += [f"{k:<12}{total[k]:>6}{right[k]:>7}{innocent[k]:>14}" for k in sorted(total)]
    runs, found = sum(total[k] for k in planted), sum(right[k] for k in planted)
    if runs:
        lines.append(f"right process and cause: {found} of {runs}, {found / runs:.1%}")
    if healthy := total["none"]:
        false = healthy - right["none"]
        lines.append(f"false alarms: {false} of {healthy} healthy runs, {false / healthy:.1%}")
    return "\n".join(lines)


def promises(episodes: Sequence[Episode]) -> list[Promise]:
    """95 of 100 delays are named, with their cause, and at most 1 of 100 healthy runs."""
    delays = Promise("processes with a delay", allowed=0.05)
    healthy = Promise("healthy jobs", allowed=0.01)
    for episode in episodes:
        promise = healthy if episode.kind == "none" else delays
        promise.count += 1
        promise.expect(
            episode.is_right, f"{episode.kind} in process {episode.victim}: {episode.found}"
        )
    return [delays, healthy]


def _kept(path: Path | None) -> list[Episode]:
    """The episodes that an earlier call wrote."""
    if path is None or not path.exists():
        return []
    rows = map(json.loads, path.read_text().splitlines())
    return [Episode(kind, victim, tuple((p, c) for p, c in found)) for kind, victim, found in rows]


def main() -> int:
    """Runs the campaign, or one worker of it."""
    if sys.argv[1:2] == ["--worker"]:
        work(int(sys.argv[2]), int(sys.argv[3]), [tuple(p) for p in json.loads(sys.argv[4])])
        return 0
    parser = seeded(__doc__)
    parser.add_argument("--runs", type=int, default=100, help="with a delay")
    parser.add_argument("--healthy", type=int, default=100, help="without")
    parser.add_argument("--kind", default="", help="of all delays")
    parser.add_argument(
        "--keep", type=Path, help="a line of JSON for each run; runs in it are kept"
    )
    options = parser.parse_args()
    plants = draw(options.runs, options.seed, options.healthy)
    if options.kind:
        plants = [(options.kind if kind != "none" else kind, victim) for kind, victim in plants]
    episodes = _kept(options.keep)
    for episode in run_job(plants[len(episodes) :]):
        episodes.append(episode)
        if options.keep:
            with options.keep.open("a") as file:
                file.write(json.dumps(episode) + "\n")
        mark = "" if episode.is_right else "  WRONG"
        print(
            f"{episode.kind} in process {episode.victim}: {list(episode.found)}{mark}", flush=True
        )
    print(table(episodes))
    return verdict(promises(episodes)) if len(episodes) == len(plants) else 1


if __name__ == "__main__":
    raise SystemExit(main())
