"""The search over models whose best point is known: found with few trials, resumed, explained."""

import dataclasses
import itertools
import math
import random

import pytest

from mfu_jax.errors import UserError
from mfu_jax.planning.tune.evidence import Trial, TrialLog
from mfu_jax.planning.tune.result import TOKENS, render_tune, tune_verdict
from mfu_jax.planning.tune.running import Tuning, tune
from mfu_jax.planning.tune.space import SearchAxis, Space, listed_axes
from tests.support import planned_models

LIMIT = 1000
AXES = {
    "per_device_batch_size": (1, 2, 4, 8),
    "remat_policy": ("none", "minimal", "full"),
    "num_vocab_tiling": (1, 4),
    "scan_layers": ("true", "false"),
}
GRID = math.prod(map(len, AXES.values()))


def axes(start=(0, 2, 0, 0)):
    return [
        SearchAxis(
            name=name, choices={str(value): {name: str(value)} for value in values}, start=begin
        )
        for (name, values), begin in zip(AXES.items(), start, strict=True)
    ]


class Machine:
    """Memory is 100 + batch × what is kept, of 1,000; each choice has its own share of the time."""

    def __init__(self, seed=0, start=(0, 2, 0, 0)):
        self.space = Space(axes(start))
        self.rng = random.Random(seed)
        self.shares = {
            (name, str(value)): self.rng.uniform(-0.2, 0.2)
            for name, values in AXES.items()
            for value in values
        }
        self.tried = []
        self.seconds = 0.0

    def cost(self, point):
        return math.exp(sum(self.shares[pair] for pair in self.space.labels(point).items()))

    def memory(self, point):
        labels = self.space.labels(point)
        kept = {"none": 200, "minimal": 100, "full": 50}[labels["remat_policy"]]
        return 100 + int(labels["per_device_batch_size"]) * kept

    def trial(self, point, seconds, by="run"):
        self.tried.append((by, point))
        self.seconds += 10
        memory = self.memory(point)
        return Trial(
            values={},
            by=by,
            source="measured" if by == "run" else "planned",
            fits=memory <= LIMIT,
            memory_peak_bytes=memory,
            step_time_seconds=self.cost(point) if memory <= LIMIT else None,
        )

    def best(self):
        points = itertools.product(*map(range, self.space.sizes))
        return min((p for p in points if self.memory(p) <= LIMIT), key=self.cost)

    def tuning(self, **changes):
        known = Tuning(
            target="1 × cpu",
            space=self.space,
            flags=lambda point: [
                f"{key}={text}" for key, text in self.space.settings(point).items()
            ],
            unit="steps/s",
            run=self.trial,
            limit_bytes=LIMIT,
            monotonic=lambda: self.seconds,
        )
        return dataclasses.replace(known, **changes)


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_is_found_in_two_fifths_of_the_grid(seed):
    machine = Machine(seed)
    result = tune(machine.tuning(most_runs=int(0.4 * GRID)), TrialLog(None, {}))
    assert len(machine.tried) <= 0.4 * GRID
    best = machine.cost(machine.best())
    assert result.winner.step_time_seconds <= 1.03 * best


def test_only_points_whose_plan_fits_are_run():
    machine = Machine(3)
    planned = machine.tuning(plan=lambda p, s: machine.trial(p, s, by="plan"), most_plans=20)
    result = tune(planned, TrialLog(None, {}))
    runs = [point for by, point in machine.tried if by == "run"]
    plans = {point for by, point in machine.tried if by == "plan"}
    assert runs
    assert set(runs) <= plans
    assert all(machine.memory(point) <= LIMIT for point in runs)
    assert result.winner.source == "measured"
    assert set(result.planned_over_measured.values()) == {1.0}


def test_runs_of_points_without_a_plan_that_fits_are_measured_all_the_same():
    """The start, although its plan does not fit, and what explains the winner."""
    space = Space(
        [SearchAxis(name=n, choices={str(i): {n: str(i)} for i in range(4)}) for n in "abc"]
    )

    def trial(by, point, seconds):
        return Trial(
            values={},
            by=by,
            source="planned" if by == "plan" else "measured",
            fits=by == "run" or point != space.start,
            step_time_seconds=seconds,
        )

    tuning = Tuning(
        target="x",
        space=space,
        flags=lambda point: [],
        plan=lambda point, _: trial("plan", point, 1 - 0.05 * sum(point)),
        run=lambda point, _: trial("run", point, 1 - 0.06 * sum(point)),
        most_plans=8,
    )
    result = tune(tuning, TrialLog(None, {}))
    assert result.start.source == result.winner.source == "measured"
    assert result.gain_fraction > 0.5
    assert len(result.changes) > 1


def test_changes_multiply_to_the_gain():
    machine = Machine(0)
    result = tune(machine.tuning(), TrialLog(None, {}))
    product = math.prod(1 + change.gain_fraction for change in result.changes)
    assert product == pytest.approx(1 + result.gain_fraction)
    assert {change.source for change in result.changes} == {"measured"}
    text = render_tune(result)
    assert result.flags in text
    assert tune_verdict(result).sentence.startswith("1 × cpu: ")
    alone = dataclasses.replace(result, rows=(result.start,), winner=result.start, changed={})
    assert tune_verdict(alone).next_steps[0].text == "a larger budget=: only the start was tried"
    assert tune_verdict(dataclasses.replace(alone, points=1)).next_steps[0].text.startswith("keep")


def test_the_tables_fit_a_terminal_and_the_winner_is_placed():
    machine = Machine(0)
    result = tune(machine.tuning(), TrialLog(None, {}))
    flags = {f"--xla_tpu_a_flag_with_a_long_name_{i}": "true" for i in range(3)}
    wide = [dataclasses.replace(t, values={**t.values, **flags}) for t in result.rows[1:]]
    change = dataclasses.replace(result.changes[0], before="none", after=str(flags))
    result = dataclasses.replace(result, rows=(result.rows[0], *wide), changes=(change,), flags="")
    text = render_tune(result)
    assert max(map(len, text.splitlines())) <= 100
    assert all(name in text for name in flags)
    rate = 0.4 * 459e12 / 250e9  # 250 GFLOPs a token
    best = dataclasses.replace(result.winner, mfu=0.4, tokens_per_sec_per_chip=rate)
    placed = dataclasses.replace(result, winner=best, chip="TPU v5p", unit=TOKENS)
    assert tune_verdict(placed).like_runs.like.startswith("models like this (")
    assert tune_verdict(dataclasses.replace(placed, chip="")).like_runs is None


def test_a_spent_budget_goes_on_from_the_file(tmp_path):
    path = tmp_path / "evidence.jsonl"
    machine = Machine(5)
    evidence = TrialLog(path, {"model": "a"})
    first = tune(machine.tuning(budget_seconds=45), evidence)
    evidence.close()
    assert len(machine.tried) == 4
    assert any("budget" in note for note in first.notes)
    with path.open("ab") as file:  # as a kill leaves it
        file.write(b'{"values": {"per_dev')
    evidence = TrialLog(path, {"model": "a"})
    assert len(evidence.trials) == 4
    assert "cut short" in evidence.notes[0]
    tune(machine.tuning(), evidence)
    evidence.close()
    assert len(machine.tried) == len(set(machine.tried))

    with pytest.raises(UserError, match="not the evidence of this search"):
        TrialLog(path, {"model": "b"})


def test_a_trial_that_the_budget_cut_off_is_not_repeated_until_there_is_more_time(tmp_path):
    machine = Machine(5)
    slow = []

    def run(point, seconds):
        if len(slow) < 2 and point != machine.space.start and point not in slow:
            machine.tried.append(("run", point))
            slow.append(point)
            machine.seconds += seconds
            return Trial(values={}, by="run", source="failed", note="not finished")
        return machine.trial(point, seconds)

    def again(budget):
        evidence = TrialLog(tmp_path / "evidence.jsonl", {})
        machine.tried.clear()
        try:
            return tune(machine.tuning(run=run, budget_seconds=budget), evidence)
        finally:
            evidence.close()

    text = render_tune(again(45))
    assert "cut off by the budget, after 35 s" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100
    again(30)
    assert [point for _, point in machine.tried] == [slow[1]] != [slow[0]]
    again(1000)
    assert set(slow) & {point for _, point in machine.tried}


def test_a_budget_that_ends_within_the_start_is_said():
    machine = Machine(5)

    def run(point, seconds):
        machine.seconds += seconds
        return Trial(values={}, by="run", source="failed", note="not finished")

    with pytest.raises(UserError, match="no trial was done within 45 s"):
        tune(machine.tuning(run=run, budget_seconds=45), TrialLog(None, {}))


def test_evidence_does_not_cut_another_file(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine, without an end")
    with pytest.raises(UserError, match="not the evidence"):
        TrialLog(path, {})
    assert path.read_text() == "mine, without an end"


def test_a_choice_that_always_fails_is_given_up():
    machine = Machine(1)

    def run(point, seconds):
        if machine.space.labels(point)["scan_layers"] == "false":
            machine.tried.append(("run", point))
            return Trial(values={}, by="run", source="failed", note="exit code 1: no such kernel")
        return machine.trial(point, seconds)

    result = tune(machine.tuning(run=run), TrialLog(None, {}))
    failed = [p for _, p in machine.tried if machine.space.labels(p)["scan_layers"] == "false"]
    assert 1 <= len(failed) <= 2
    assert result.winner.values["scan_layers"] == "true"
    assert "no such kernel" in render_tune(result)


def test_batches_grow_from_those_that_fit():
    machine = Machine(2)
    result = tune(machine.tuning(), TrialLog(None, {}))
    batches = [int(machine.space.settings(p)["per_device_batch_size"]) for _, p in machine.tried]
    fits = [machine.memory(point) <= LIMIT for _, point in machine.tried]
    for i, batch in enumerate(batches[1:], 1):
        assert batch <= 2 * max(b for b, ok in zip(batches[:i], fits[:i], strict=True) if ok)
    assert result.winner.source == "measured"


def test_a_large_space_is_searched_one_change_at_a_time():
    names = "abcdefg"
    space = Space(
        [SearchAxis(name=n, choices={str(i): {n: str(i)} for i in range(4)}) for n in names]
    )
    tried = []

    def plan(point, seconds):
        tried.append(point)
        return Trial(
            values={}, by="plan", source="planned", fits=True, step_time_seconds=100 - sum(point)
        )

    tune(
        Tuning(target="x", space=space, flags=lambda p: [], plan=plan, most_plans=40),
        TrialLog(None, {}),
    )
    for i, point in enumerate(tried[1:], 1):
        apart = [sum(a != b for a, b in zip(point, known, strict=True)) for known in tried[:i]]
        assert min(apart) == 1


def test_a_run_of_a_larger_batch_is_expected_to_take_longer():
    """Compiling takes as long, the 10 steps take as much longer as the batch is larger."""
    machine = Machine(5)
    begun = []

    def run(point, seconds):
        batch = machine.space.batch(point)
        begun.append((batch, seconds))
        machine.seconds += 10 * batch  # 10 s for compiling, in the trial
        return dataclasses.replace(machine.trial(point, seconds), step_time_seconds=batch)

    for budget in range(30, 300, 15):
        begun.clear()
        tune(machine.tuning(run=run, steps=10, budget_seconds=budget), TrialLog(None, {}))
        assert all(seconds >= 10 + 10 * batch for batch, seconds in begun)


@pytest.fixture(scope="module")
def lists():
    return listed_axes({"remat_policy": "none,minimal,full", "per_device_batch_size": "1..8"})[0]


def _planned(model, axes, **options):
    """A search by plans of a model whose memory and time are linear in the batch."""
    space = Space(axes)

    def plan(point, seconds):
        policy, batch = space.labels(point).values()
        return model.trial(policy, float(batch))

    tuning = Tuning(
        target="8 chips",
        space=space,
        flags=lambda p: [space.changes(p)],
        plan=plan,
        limit_bytes=planned_models.LIMIT,
        **options,
    )
    return tune(tuning, TrialLog(None, {}))


@pytest.mark.parametrize("seed", range(60))
def test_plans_of_random_models(seed, lists):
    model = planned_models.Model.random(random.Random(seed))
    result = _planned(model, lists, most_plans=8)
    trials = [model.trial(p, b) for p in planned_models.POLICIES for b in range(1, 9)]
    best = max(trial.tokens_per_sec_per_chip or 0 for trial in trials)
    assert result.plans <= 8
    if result.winner is None:
        assert best == 0
    else:
        assert result.winner.tokens_per_sec_per_chip >= 0.97 * best


def test_the_pareto_front_by_brute_force(lists):
    rows = _planned(planned_models.Model.random(random.Random(3)), lists).rows
    known = [r for r in rows if r.fits and r.memory_peak_bytes and r.tokens_per_sec_per_chip]
    assert len(known) > 2
    for row in known:
        better = [
            r
            for r in known
            if r.memory_peak_bytes <= row.memory_peak_bytes
            and r.tokens_per_sec_per_chip >= row.tokens_per_sec_per_chip
            and r is not row
        ]
        assert row.pareto == (not better)


class Squeezing(planned_models.Model):
    """Memory is no line, and a refusal says little: XLA recomputes until little is missing."""

    def peak(self, policy, batch):
        held = super().peak(policy, batch + max(0.0, batch - 3))
        limit, gib = planned_models.LIMIT, planned_models.GIB
        return held if held <= limit else limit + gib // 4 + round(batch * gib / 100)


@pytest.mark.parametrize("largest", [12, 31, 57])
def test_refusals_that_say_little(largest):
    """20 GiB are left; every sequence but the first three takes twice as much as those."""
    model = Squeezing(
        state_gib=8,
        fixed_gib=4,
        activations_gib={"full": 20 / (2 * largest - 2.5)},
        fixed_seconds=0.2,
        matmul_seconds=0.2,
        other_seconds=0.1,
    )
    limit = planned_models.LIMIT
    assert model.peak("full", largest) <= limit < model.peak("full", largest + 1)
    policies = SearchAxis(name="remat_policy", choices={"full": {}})
    result = _planned(model, [policies, *listed_axes({"per_device_batch_size": "1..96"})[0]])
    best = model.trial("full", largest).tokens_per_sec_per_chip
    assert result.winner.tokens_per_sec_per_chip == best
    assert result.plans <= 2 * math.log2(96)


@pytest.mark.parametrize("best", [1, 3, 10, 31, 57, 80, 96])
def test_a_long_numeric_axis_with_one_optimum_takes_few_plans(best):
    """30% slower with each doubling away from the best; 2·log2(96) is 13."""

    def plan(point, seconds):
        time = 1 + 0.3 * abs(math.log2((point[0] + 1) / best))
        return Trial(values={}, by="plan", source="planned", fits=True, step_time_seconds=time)

    axis = listed_axes({"block": "1..96"})[0]
    tuning = Tuning(target="x", space=Space(axis), flags=lambda p: [], plan=plan)
    result = tune(tuning, TrialLog(None, {}))
    assert result.plans <= 2 * math.log2(96)
    assert result.winner.step_time_seconds <= 1.03


def test_nothing_to_choose_is_an_error():
    with pytest.raises(UserError, match="nothing to search"):
        Space([SearchAxis(name="scan_layers", choices={"true": {}})])
