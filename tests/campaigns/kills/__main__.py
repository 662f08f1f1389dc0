"""Kills training jobs again and again, and compares the report with what the killer saw.

    python -m tests.campaigns.kills                           # 200 kills of real trainers: some
                                                              # 10 minutes on two quiet cores
    python -m tests.campaigns.kills --folder DIR              # the same, kept; again: it goes on
    python -m tests.campaigns.kills --kind loop --kills 3     # one job

The truth is in marks that the job writes itself, beside all loggers, and in the killer's own log of
starts, kills and ends. Kinds: ``loop``, a loop around a `MetricLogger`; ``pair``, two processes of
such a loop, killed together; ``trainer``, the reference trainer; ``trainers``, a job of two of its
processes, killed together. Without a kind, three jobs are started 51 times each, two at a time, and
a table of the worst errors is printed at the end.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.campaigns.children import Child, fork
from tests.campaigns.kills.errors import Errors, compare, table
from tests.campaigns.kills.jobs import Job, run_loop, run_trainer
from tests.campaigns.kills.truth import Seen, read_log, write_log
from tests.campaigns.promises import seeded

# Kind and seed of each job, the longest first: two of them run at a time.
WHOLE = (("trainers", 0), ("trainer", 1), ("trainer", 2))
KILLS = 50
DOWN_SECONDS = 0.3
_ENDLESS = 10**6  # a job that is killed never reaches its end
_STEPS_AFTER_KILLS = 50
_END_SECONDS = 300.0


class Campaign:
    """One job in one folder.

    Args:
        folder: of everything that it writes; a job that was interrupted goes on.
        kind: ``loop``, ``pair``, ``trainer`` or ``trainers``.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self._count = 2 if kind in ("pair", "trainers") else 1
        self._run = run_trainer if kind.startswith("trainer") else run_loop
        self._log = folder / "killer.json"
        self.seen: list[list[Seen]] = read_log(self._log) or [[] for _ in range(self._count)]
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, steps: int = _ENDLESS) -> list[Child]:
        """Starts or resumes all processes of the job."""
        children = []
        with socket.create_server(("localhost", 0)) as server:
            address = f"localhost:{server.getsockname()[1]}"
        for process, seen in enumerate(self.seen):
            job = Job(
                folder=self.folder,
                steps=steps,
                process=process,
                count=self._count,
                address=address,
                marks=self._marks(process, len(seen)),
            )
            before = time.time()
            children.append(
                fork(
                    lambda job=job: self._run(job),
                    self.folder / f"out{process}",
                    {"JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache")}
                    | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
                    | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
                    | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
                )
            )
            # A machine under load may take its time over a fork.
            seen.append(Seen((before + time.time()) / 2))
        return children

    def _marks(self, process: int, number: int) -> Path:
        return self.folder / f"marks{process}.{number}"

    def end(self, children: list[Child], number: int) -> list[int | None]:
        """Sends a signal, waits for all processes, and keeps what was seen; 0: none."""
        for child, seen in zip(children, self.seen, strict=True):
            if number and child.poll() is None:
                now = time.time()  # afterwards, what the kernel clears up may come first
                os.kill(child.pid, number)
                seen[-1].told = signal.Signals(number).name
                seen[-1].killed = now if number == signal.SIGKILL else None
        codes = []
        for process, (child, seen) in enumerate(zip(children, self.seen, strict=True)):
            codes.append(child.wait(_END_SECONDS))
            gone = time.time()
            path = self._marks(process, len(seen) - 1)
            lines = path.read_text().splitlines() if path.exists() else []
            words = [line.split() for line in lines]
            seen[-1].marks = [(float(at), event, int(n)) for at, event, n in words]
            exits = [at for at, event, _ in seen[-1].marks if event == "exit"]
            if exits:  # it was faster than the kill
                seen[-1].killed = None
            seen[-1].end = exits[0] if exits else seen[-1].killed or gone
        write_log(self._log, self.seen)
        return codes

    def begun(self) -> bool:
        """Whether every process of the job has completed a step."""
        paths = [self._marks(p, len(seen) - 1) for p, seen in enumerate(self.seen)]
        return all(path.exists() and "-step" in path.read_text() for path in paths)

    def kill(self, chance: random.Random) -> None:
        """Starts the job, and kills it at a random moment of its life.

        Raises:
            RuntimeError: it ended by itself before.
        """
        children = self.start()
        try:
            if chance.random() < 0.9:  # the others die in their start-up
                children[0].wait_until(self.begun, _END_SECONDS)
            time.sleep(chance.uniform(0.0, 2.0))
        except BaseException:
            self.end(children, signal.SIGKILL)  # the killer is stopped: one more kill
            raise
        codes = self.end(children, chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        if not all(seen[-1].told for seen in self.seen):
            raise RuntimeError(f"ended with {codes} before the kill: {self._last_words()}")
        time.sleep(chance.uniform(0.0, 2 * DOWN_SECONDS))

    def finish(self) -> None:
        """Lets the job run to its end.

        Raises:
            RuntimeError: it failed.
        """
        done = max((n for seen in self.seen for one in seen for n in one.steps), default=0)
        codes = self.end(self.start(done + _STEPS_AFTER_KILLS), 0)
        if any(codes):
            raise RuntimeError(f"ended with {codes}: {self._last_words()}")

    def _last_words(self) -> str:
        return (self.folder / "out0").read_text()[-2000:]

    def run(self, kills: int, seed: int) -> Errors:
        """Kills it so often, lets it end, and compares; what was done before counts."""
        while (number := len(self.seen[0])) < kills:
            self.kill(random.Random(f"{seed} {number}"))
            print(f"{self.folder.name}: kill {number + 1} of {kills}", flush=True)
        if number == kills:
            self.finish()
        return compare(self.folder / "default", self.seen)


def run_whole(folder: Path, kills: int, workers: int, first: int) -> Errors:
    """All jobs of `WHOLE`, some at a time, each in processes of its own.

    Args:
        folder: of everything that they write.
        kills: of each job.
        workers: jobs at a time.
        first: added to the seeds.

    Raises:
        RuntimeError: a job failed; its output has been printed.
    """
    jobs = [(kind, first + seed) for kind, seed in WHOLE]
    waiting, running = list(jobs), []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                kind, seed = waiting.pop(0)
                keys = [f"--kind={kind}", f"--seed={seed}", f"--kills={kills}"]
                keys += [f"--folder={folder / f'{kind}{seed}'}"]
                command = [sys.executable, "-m", "tests.campaigns.kills", *keys]
                running.append(subprocess.Popen(command))
            time.sleep(0.2)
            running = [job for job in running if job.poll() is None]
    finally:
        for job in running:
            job.send_signal(signal.SIGINT)
            job.wait()
    found = [read_log(folder / f"{kind}{seed}" / "killer.json") for kind, seed in jobs]
    if not all(seen and len(seen[0]) == kills + 1 for seen in found):
        raise RuntimeError("a job did not come to its end: see above; the same command goes on")
    names = [folder / f"{kind}{seed}" / "default" for kind, seed in jobs]
    return Errors.of([compare(*job) for job in zip(names, found, strict=True)])


def main() -> int:
    """Runs one job, or the whole campaign."""
    parser = seeded(__doc__)
    parser.add_argument("--kills", type=int, default=KILLS, help="of each job")
    parser.add_argument("--kind", help="of one job")
    parser.add_argument("--folder", type=Path, help="keeps everything")
    parser.add_argument("--workers", type=int, default=2, help="jobs at a time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = (given.folder or Path(name)).absolute()
        if given.kind:
            found = Campaign(folder, given.kind).run(given.kills, given.seed)
        else:
            found = run_whole(folder, given.kills, given.workers, given.seed)
    print(table(found))
    return 1 if found.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
