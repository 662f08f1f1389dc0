"""Writes a run's records again, to a sink that lacks them.

usage: mfu-jax replay RUN --sink NAME [key=value …] [--json]

RUN             the run's folder, or its metrics file
--sink=NAME     where to: csv, tensorboard, wandb, mlflow, prometheus, console or your own
--from_step=N   the first step to write; by default the one after the last that the sink got,
                where the run's log says that it was behind, else 0
key=value       arguments of the sink, such as path=steps.csv, folder=tb or project=mine
--json          one JSON object on stdout

The records come from the run's log, in its order, by the code that a live run uses; so the output
is the one that a live run would have written. The exit code is 1 if the sink did not take all.

example: mfu-jax replay runs/a --sink=csv path=a.csv"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mfu_jax.errors import UserError, first_line
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.run_log import events
from mfu_jax.logger.run_log.follower import Follower
from mfu_jax.logger.run_log.reading import LoggedRecords, read_events, steps_behind
from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.logger.sinks.base import Sink, find_sink, make_sink
from mfu_jax.runs.live.following import local_metrics_file
from mfu_jax.storage.addresses import Address, path_of
from mfu_jax.storage.targets import run_logs
from mfu_jax.util.arguments import Arguments, parse
from mfu_jax.util.formatting import counted, json_text
from mfu_jax.util.user_files import opened
from mfu_jax.util.values import number_of
from mfu_jax.verdict import Verdict

_OWN_KEYS = ("sink", "from_step")
_FOR_SINKS = (events.SETUP, events.TEXT, events.FAILURE)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        UserError: there are no records, no such sink, it cannot be made, or it is the
            run's own file.
    """
    arguments = parse(argv, flags=("--json",))
    path = local_metrics_file(arguments.one_name("run"))
    with opened(path, "the metrics file of a run"):  # or it ends here, before a sink is made
        pass
    values = arguments.values
    if "sink" not in values:
        raise UserError(
            "no sink; expected --sink=NAME", hint="for example --sink=wandb project=mine"
        )
    name = values["sink"]
    kind = find_sink(name)
    behind = steps_behind(path, 0).get("" if kind is None else kind.__name__, -1)
    first = number_of(values, "from_step", int, behind + 1)
    if any(_is_own(path, text) for key, text in arguments.pairs if key not in _OWN_KEYS):
        raise UserError(
            f"{str(path)!r} is the run's own file, whose records would be lost",
            hint="pass another path",
        )
    sink = _made(name, kind, arguments, first)
    last, lost = _follow(path, sink, first)
    if "--json" in arguments.flags:
        print(json_text({"sink": name, "first_step": first, "last_step": last, "lost": lost}))
    else:
        print("no record to write" if last is None else f"written up to step {last}")
        if lost:
            print(f"{name}: {counted(lost, 'record')} could not be written")
    return int(lost > 0)


def _is_own(path: Path, text: str) -> bool:
    """Whether a sink's argument names the run's records or a run log beside them."""
    try:
        found = path_of(text)
        own = (path, *run_logs(path))
        return not isinstance(found, Address) and any(file.samefile(found) for file in own)
    except (OSError, ValueError):  # no file, or no path at all
        return False


def _made(name: str, kind: type[Sink] | None, arguments: Arguments, first: int) -> Sink:
    """The sink; its output goes on at step `first` if it has such an argument."""
    given: dict[str, Any] = {
        key: _value(text) for key, text in arguments.pairs if key not in _OWN_KEYS
    }
    if kind is not None and "resume_from_step" in inspect.signature(kind).parameters:
        given.setdefault("resume_from_step", first)
    try:
        if kind is not None:
            inspect.signature(kind).bind(**given)  # whose message names the argument alone
        return make_sink(name, **given)
    except TypeError as error:
        raise UserError(
            f"the sink {name!r} cannot be made ({first_line(error)}); expected its arguments "
            "as key=value, such as path=steps.csv",
            hint="see help(mfu_jax.sinks)",
        ) from None


def _value(text: str) -> Any:
    """A number, truth value or None, if the text is one; else the text."""
    if text == "None":  # as docs and signatures write it
        return None
    value = yaml.safe_load(text)
    return value if isinstance(value, int | float) else text


def _follow(path: Path, sink: Sink, first: int) -> tuple[int | None, int]:
    """Writes the records from step `first` on; returns the last, and how many were not taken."""
    beside = path.with_name(events.events_name(path.name, 0))
    periods = [e["log_period"] for e in read_events(beside, events.LOGGER)]
    logged = read_events(beside, events.STEPS, *_FOR_SINKS)
    early = [_event(e) for e in itertools.takewhile(lambda e: e["e"] != events.STEPS, logged)]
    late = [_event(e) for e in logged if e["e"] != events.STEPS]
    totals = [*read_events(beside, events.SUMMARY)]
    log = RunLog()
    reader = LoggedRecords(path, periods[-1] if periods else 1, after=first - 1)
    follower = Follower(log, sink)
    follower.start()
    with log.lock:
        follower.put(early)
    follower.settle().wait()
    with log.lock:
        follower.begin_behind(reader)
        follower.put(late)
    follower.settle(is_last=True).wait()
    last = None if follower.last is None else follower.last.step
    follower.count_rest(is_on_disk=False)
    follower.finish(_summary(totals)).wait()
    return last, follower.lost.total()


def _event(values: dict[str, Any]) -> events.Event:
    return events.Event(values["e"], (values["t"], values["m"]), values)


def _summary(totals: Sequence[dict[str, Any]]) -> Summary:
    """The totals that the run wrote at its end, if it did."""
    if not totals:
        return Summary(steps=0)
    known = Summary.__dataclass_fields__.keys()
    found = {name: value for name, value in totals[-1].items() if name in known}
    if isinstance(found.get("last_loss"), str):  # NaN, or infinite
        found["last_loss"] = float(found["last_loss"])
    if "verdict" in found:
        found["verdict"] = Verdict.of_json(found["verdict"])
    return Summary(**found)
