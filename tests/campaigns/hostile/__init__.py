"""Hostile arguments and files for every command of `mfu-jax`, and what became of each.

`hostile_inputs` draws inputs with hypothesis and runs them in a `Worker`. The promise: an exit code
of 0, 1 or 2, no traceback, one short line on stderr for wrong input and one with a hint, strict
JSON for ``--json``, under 10 seconds and under 1 GB.

    python -m tests.campaigns.hostile --count 3000 --seed 0
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.campaigns.hostile.cases import KINDS, Case
from tests.campaigns.hostile.files import special_files
from tests.campaigns.promises import Promise
from tests.support.messages import is_told
from tests.support.paths import ROOT

MOST_SECONDS = 10.0
MOST_BYTES = 2**30
MOST_CHARACTERS = 1500
_GRACE_SECONDS = 5.0  # then a command hangs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a case; `failures` are the broken promises, in words."""

    case: Case
    argv: tuple[str, ...]
    code: int | None
    errors: str
    seconds: float
    growth_bytes: int
    failures: tuple[str, ...]


class Worker:
    """The process that runs the cases; killed after a hang, then started again."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def run(self, argv: Sequence[str], stdin: str = "") -> dict[str, Any]:
        """The answer of `worker.run`; if there was none, ``raised`` says why."""
        process = self._process = self._process or _start()
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps([list(argv), stdin]), file=process.stdin, flush=True)
        limit = MOST_SECONDS + _GRACE_SECONDS
        ready, _, _ = select.select([process.stdout], [], [], limit)
        line = process.stdout.readline() if ready else ""
        if not line:
            self.stop()
            return {"raised": "the process died" if ready else f"no answer after {limit:g} s"}
        answer: dict[str, Any] = json.loads(line)
        return answer


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.campaigns.hostile.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def hostile_inputs(random_seed: int, count: int) -> list[Result]:
    """Draws inputs, equally many of each kind, and runs them.

    Args:
        random_seed: the same one gives the same inputs.
        count: in all; of files there are only some 600 different ones.
    """
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name, Worker() as worker:
        folder = Path(name)
        special = special_files(folder)
        draws = settings(
            max_examples=-(-count // len(KINDS)),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        for kind in KINDS:

            @seed(random_seed)
            @draws
            @given(kind())
            def collect(case: Case) -> None:
                results.append(run_case(case, folder, special, worker))

            collect()
    return results


def run_case(case: Case, folder: Path, special: Mapping[str, Path], worker: Worker) -> Result:
    """Writes the case's file, runs it, and names the promises that it broke."""
    path = folder / f"input{case.suffix}"
    path.write_bytes(case.content.encode(errors="surrogatepass"))
    argv = tuple(_filled(word, {**special, "file": path}) for word in case.argv)
    if argv[:1] == ("watch",) and not {"--once", "--json"} & {*argv}:
        argv = (*argv, "--once")  # it would wait for the first step
    answer = worker.run(argv, case.content)
    return Result(
        case=case,
        argv=argv,
        code=answer.get("code"),
        errors=answer.get("errors", ""),
        seconds=answer.get("seconds", MOST_SECONDS),
        growth_bytes=answer.get("growth", 0),
        failures=tuple(failures(argv, answer)),
    )


def _filled(word: str, paths: Mapping[str, Path]) -> str:
    for name, path in paths.items():
        word = word.replace(f"{{{name}}}", str(path))
    return word


def failures(argv: Sequence[str], answer: Mapping[str, Any]) -> list[str]:
    """The promises that an answer breaks, in words."""
    if answer["raised"]:
        return [answer["raised"]]
    errors, code = answer["errors"], answer["code"]
    lines = errors.split("\n")[:-1]
    checks = {
        f"exit code {code}": code not in (0, 1, 2),
        f"a bug: {errors}": "bug" in errors or "Traceback" in errors,
        f"{len(lines)} lines on stderr": code != 0 and bool(errors) and not is_told(errors),
        "a refusal in silence": code != 0 and not errors and not answer["output"],
        "a long line on stderr": any(len(line) > MOST_CHARACTERS for line in lines),
        "control characters on stderr": not errors.replace("\n", "").isprintable(),
        f"{answer['seconds']:.0f} seconds": answer["seconds"] > MOST_SECONDS,
        f"{answer['growth'] / 1e6:.0f} MB": answer["growth"] > MOST_BYTES,
        "JSON that is not": "--json" in argv and code == 0 and not _is_json(answer["output"]),
    }
    return [text for text, broken in checks.items() if broken]


def _is_json(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return "usage: mfu-jax" in text  # --help wins
    return True


def promises(results: Sequence[Result]) -> list[Promise]:
    """One for each kind of input."""
    by_kind: defaultdict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_kind[result.case.kind].append(result)
    return [_promise(kind, found) for kind, found in by_kind.items()]


def _promise(kind: str, results: Sequence[Result]) -> Promise:
    slowest = max(result.seconds for result in results)
    largest = max(result.growth_bytes for result in results)
    return Promise(
        f"hostile {kind} on the command line",
        count=len(results),
        worst=f"one line, at most {slowest:.1f} s and {largest / 2**20:.0f} MiB",
        failures=[f"{text}: {_short(r.argv)}" for r in results for text in r.failures],
    )


def _short(argv: Sequence[str]) -> str:
    return " ".join(ascii(word) if len(word) < 70 else ascii(word[:60]) + "…" for word in argv)
