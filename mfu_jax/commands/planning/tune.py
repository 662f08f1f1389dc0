"""Finds the fastest settings, on your devices or by plans alone.

usage: mfu-jax tune [FILE.yml] [key=value …] [--json]
       mfu-jax tune [FILE.yml] topology=v6e-8 [key=value …] [--json]
       mfu-jax tune --run RUN.json|- [key=value …] [--json]

Keys are model=NAME and those of configs/base.yml. key=value is where the search begins, key=a,b or
1..8 what it may choose. It chooses batch, remat policy and saved names, attention and its blocks,
vocabulary tiling, scanned or unrolled layers, the mesh, and compiler flags by platform.
The first form runs steps on the attached devices, each trial in a child process; plans choose
which. With topology= or hardware= there are only plans, and no device is used. With --run, the
search begins with a measured run's settings, compiler flags and chips, as mfu-jax plan reads them.
A killed or spent search goes on with the same command.
  topology=NAME:SHAPE  TPU chips: v5p:8x8x8, or a slice name: v5p-128, v6e-8
  slices=N             number of TPU slices, connected by the data-center network
  hardware=NAME        GPU name, with devices=N
  network_gbits=N      Gb/s of one device to other hosts: 200 of an H100 in an A3 Mega (without
                       it 400, as in most hosts of H100)
  memory_fraction=N    share of a GPU's memory that JAX takes (XLA_PYTHON_CLIENT_MEM_FRACTION):
                       a step must fit in it, and XLA hides transfers within it (without it:
                       fit in all, hide within 0.75)
  keep=KEY,KEY         keys that stay as given; tokens_per_step: batch × accumulation stays
  precisions=LIST      matmul precisions that you allow: float32, bfloat16, fp8, int8 …
  budget=10min         starts no trial that would end later (s, min, h; default 10min)
  plans=N, runs=N      at most so many (default: plans of a third of the combinations, at most 60)
  trial_steps=N        measured steps of a run (default 6), after two for warming up
  xla_flags=FLAGS      compiler flags of every trial
  follow=nearest       for --run: begins with the nearest step where the trainer cannot follow it
  evidence=FILE.jsonl  where trials are kept (default: in ~/.cache/mfu_jax/tune, by the search)
  cache=FOLDER         cache of compiled programs (default ~/.cache/mfu_jax/plans; empty: none)
  compile_seconds=N    time limit for the compiler (default 1800)
  --json               one JSON object on stdout

example: mfu-jax tune model=llama3-8b topology=v6e-8 dtype=bfloat16"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.planning.compilation import cache
from mfu_jax.planning.compilation.compiling import Limits, compiler_flags
from mfu_jax.planning.measured_runs import MeasuredRun, load_run
from mfu_jax.planning.result.plan import Plan
from mfu_jax.planning.step_sources import compiled_plan
from mfu_jax.planning.targets import CHIPS, Target, target_of
from mfu_jax.planning.tune.attached_devices import AttachedDevices, attached
from mfu_jax.planning.tune.evidence import Trial, TrialLog
from mfu_jax.planning.tune.result import show
from mfu_jax.planning.tune.running import Tuning, planned, tune
from mfu_jax.planning.tune.space import BATCH, Point, Space, is_swept, listed, seconds_of
from mfu_jax.trainer.config.pyconfig import Config, load
from mfu_jax.trainer.planned.planned_run import followed
from mfu_jax.trainer.planned.planned_step import TrainerStep
from mfu_jax.trainer.planned.trial_run import WARMUP_STEPS, flags_variable, trial_run
from mfu_jax.trainer.planned.tuned_axes import ACCUMULATION, TOKENS, axes_of
from mfu_jax.util.arguments import Arguments, check_key, own_key, parse
from mfu_jax.util.values import field_types, number_of, typed

_OWN = (
    *(*CHIPS, "keep", "precisions", "budget", "plans", "runs", "trial_steps", "xla_flags"),
    *("evidence", "cache", "compile_seconds", "follow"),
)
_BUDGET, _STEPS = "10min", 6


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 1 if nothing fits."""
    arguments = parse(argv, flags=("--json", "--run"))
    search = _Command(arguments)
    path = search.evidence_path()
    with contextlib.closing(TrialLog(path, search.about())) as evidence:
        result = tune(search.tuning(), evidence, _progress)
    return show(result, is_json="--json" in arguments.flags, evidence=str(path))


class _Command:
    """The command's words, read: what is searched, and on what."""

    def __init__(self, arguments: Arguments) -> None:
        values = arguments.values
        self.values, self.files = values, arguments.names
        self.of_run: MeasuredRun | None = None
        self.notes: tuple[str, ...] = ()
        kinds = field_types(Config)
        given = {own_key(k, ("model_name",)): v for k, v in values.items() if k not in _OWN}
        if "--run" in arguments.flags:
            self.of_run, self.files = load_run(arguments.one_name("file with a run, or -")), ()
            step = followed(self.of_run, values.get("follow", ""))
            given = {**step.keys, **given}
            self.notes = (
                *(f"another program than the run's, without {part}" for part in step.other_work),
                *step.notes({}),
            )
        for key, text in given.items():
            check_key(key, kinds)
            for one in listed(key, text) if is_swept(text) else ():
                typed(key, one, kinds[key])
        self.flags = compiler_flags(values.get("xla_flags", ""))
        self.steps = number_of(values, "trial_steps", int, _STEPS, is_positive=True)
        self.budget = seconds_of(values.get("budget", _BUDGET))
        keep = _words(values.get("keep", ""))
        for key in keep:
            check_key(key, (*kinds, TOKENS), usually="keep= names keys of the trainer")
        is_given = values.get("topology") or values.get("hardware")
        self.has_runs = not (is_given or self.of_run)
        if not is_given and (without := [key for key in CHIPS if values.get(key)]):
            instead = "plan for the run's" if self.of_run else "run on the attached devices"
            raise UserError(
                f"{without[0]}={values[without[0]]} without chips to plan for: the search would "
                f"{instead}",
                hint="pass topology=… or hardware=…, too, or leave it out",
            )
        self.devices: AttachedDevices | None = None
        self.target: Target | None
        if self.has_runs:
            devices = self.devices = attached()
            self.target = devices.target()
            self.platform, count = devices.platform, devices.count
            self.limit_bytes = devices.memory_bytes
        else:
            target = self.of_run.target if self.of_run and not is_given else target_of(values)
            self.target = target
            self.platform, count = "gpu" if target.platform == "cuda" else "tpu", target.devices
        self.chip = chip = self.target.chip if self.target else None
        if self.target:
            self.limit_bytes = self.target.usable_memory_bytes
        axes, self.fixed = axes_of(
            self._config({key: text for key, text in given.items() if not is_swept(text)}),
            given,
            platform=self.platform,
            devices=count,
            chip=chip,
            runs=self.has_runs,
            keep=keep,
            precisions=_words(values.get("precisions", "")),
            flags=self.of_run.flags if self.of_run else (),
        )
        self.space = Space(axes)
        self.tokens = self._tokens(self.space.start) if TOKENS in keep else 0.0
        self.source = None if self.target is None else TrainerStep(self.target, self.files)

    def _words(self, keys: Mapping[str, str]) -> list[str]:
        return [*self.files, *(f"{key}={text}" for key, text in keys.items())]

    def _config(self, keys: Mapping[str, str]) -> Config:
        return load(self._words(keys))

    def about(self) -> dict[str, Any]:
        """What all trials have in common."""
        devices = None if self.devices is None else dataclasses.asdict(self.devices)
        fixed = dataclasses.asdict(self._config(self.fixed))
        del fixed["webhook_url"]  # a secret, which no trial uses
        run = self.of_run
        return {
            "fixed": {k: str(v) for k, v in sorted(fixed.items())},
            "target": str(self.target),
            "devices": devices,
            "flags": list(self.flags),
            "versions": dict(cache.installed_versions(sys.executable)),
            **({} if run is None else {"run": str((run.tiles, run.attention))}),
        }

    def evidence_path(self) -> Path:
        """Where the trials are kept."""
        if given := self.values.get("evidence"):
            return Path(given)
        text = json.dumps(self.about(), sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cache.default_folder().with_name("tune") / f"{name}.jsonl"

    def tuning(self) -> Tuning:
        """The search."""
        values = self.values
        return Tuning(
            target=str(self.target or self.devices),
            chip=self.chip.name if self.chip else "",
            space=self.space,
            flags=self.command_line,
            plan=functools.partial(self.plan, self.source) if self.source else None,
            run=self.run if self.has_runs else None,
            invalid=self.invalid,
            limit_bytes=self.limit_bytes,
            budget_seconds=self.budget,
            most_plans=number_of(values, "plans", int, is_positive=True),
            most_runs=number_of(values, "runs", int, is_positive=True),
            steps=WARMUP_STEPS + self.steps,
            notes=self.notes,
        )

    def keys(self, point: Point) -> tuple[dict[str, str], dict[str, str]]:
        """The trainer's keys of a point, and its compiler flags."""
        settings = self.space.settings(point)
        flags = {key: text for key, text in settings.items() if key.startswith("--")}
        keys = {key: text for key, text in settings.items() if key not in flags}
        return {**self.fixed, **keys}, flags

    def words(self, point: Point) -> list[str]:
        """The trainer's arguments."""
        keys, _ = self.keys(point)
        if self.source is not None:
            return self.source.run_words(keys)
        return self._words(keys)

    def command_line(self, point: Point) -> list[str]:
        """The command that trains with a point's settings."""
        flags = [*self.flags, *(f"{key}={text}" for key, text in self.keys(point)[1].items())]
        clock = self.chip.clock_state if self.chip else ""
        is_planned = not (self.has_runs or self.of_run)
        if clock and is_planned and not any(clock.split("=")[0] in flag for flag in flags):
            flags.append(clock)  # the plan's peaks are those of this clock
        variable = f"{flags_variable(self.platform)}={shlex.quote(' '.join(flags))}"
        return [*[variable] * bool(flags), "mfu-jax", "train", *map(shlex.quote, self.words(point))]

    def invalid(self, point: Point) -> UserError | None:
        """Why the trainer would refuse a point."""
        if self.tokens and self._tokens(point) != self.tokens:
            return UserError("its step has another number of tokens")
        keys, _ = self.keys(point)
        if self.source is not None:
            return self.source.invalid(keys)
        try:
            load(self.words(point))
        except UserError as error:
            return error
        return None

    def _tokens(self, point: Point) -> float:
        """Sequences per device and step."""
        config = self._config(self.keys(point)[0])
        return float(getattr(config, BATCH) * getattr(config, ACCUMULATION))

    def plan(self, source: TrainerStep, point: Point, seconds: float) -> Trial:
        """A plan of a point's step."""
        keys, flags = self.keys(point)
        most = number_of(self.values, "compile_seconds", float, Limits.seconds)

        def make() -> Plan:
            work = None  # as the source says; of a run's step, with the run's kernels
            if run := self.of_run:
                work = source.work(keys)
                work = dataclasses.replace(work, tiles=run.tiles, attention=run.attention)
            return compiled_plan(
                source,
                source.target,
                keys,
                limits=Limits(seconds=min(most, seconds)),
                folder=cache.chosen_folder(self.values),
                flags=(*self.flags, *(f"{key}={text}" for key, text in flags.items())),
                run_flags=() if run else None,  # the run's are among the point's
                work=work,
            )

        return planned(make)

    def run(self, point: Point, seconds: float) -> Trial:
        """A few steps with a point's settings."""
        _, flags = self.keys(point)
        given = dict(flag.partition("=")[::2] for flag in self.flags)
        return trial_run(
            self.words(point),
            {**given, **flags},
            platform=self.platform,
            devices_per_chip=self.chip.devices_per_chip if self.chip else 1,
            steps=self.steps,
            seconds=seconds,
        )


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _progress(word: str) -> None:
    print(f"mfu-jax tune: {word} …", file=sys.stderr, flush=True)
