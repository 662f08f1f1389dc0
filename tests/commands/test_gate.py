"""`mfu-jax gate`: its exit codes and what it prints."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mfu_jax.cli import main
from tests.support.messages import is_told
from tests.support.metrics_lines import line, write_run
from tests.support.run_noise import KINDS, step_times


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, str]:
    rng = random.Random(2)
    means = {"base": 1.0, "again": 1.0, "slower": 1.03, "faster": 0.9}
    for name, mean in means.items():
        times = step_times(KINDS["heavy"], 600, rng, mean=mean)
        write_run(tmp_path / name / "metrics.jsonl", times)
    return {name: str(tmp_path / name) for name in means}


def test_the_exit_code_tells_a_regression(
    runs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gate", runs["slower"], "--baseline", runs["base"]]) == 1
    assert "FAILED: regression of at least 1.0%: step time" in capsys.readouterr().out
    for name in ("again", "faster"):
        assert main(["gate", runs[name], f"--baseline={runs['base']}"]) == 0
        assert "passed: no regression of 1.0% or more" in capsys.readouterr().out
    assert main(["gate", runs["slower"], "--baseline", runs["base"], "--threshold", "8%"]) == 0
    assert main(["gate", runs["slower"], "--baseline", runs["base"], "--threshold=0.01"]) == 1


def test_the_verdict_leads_with_what_the_gate_found(
    runs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = answer(capsys, runs["slower"], "--baseline", runs["base"])
    verdict = found["verdict"]
    assert (code, verdict["kind"], verdict["passed"]) == (1, "gate", False)
    assert verdict["sentence"].startswith(f"FAILED: {found['message']}; ")
    assert verdict["losses"][0]["name"] == "slower step time"
    slowdown = found["checks"][0]["slowdown"]
    assert verdict["losses"][0]["fraction"] == pytest.approx(slowdown / (1 + slowdown))
    both = f"mfu-jax report {runs['base']} {runs['slower']} --html=report.html"
    assert verdict["next_steps"][0]["text"] == both
    main(["gate", runs["again"], "--baseline", runs["base"]])
    assert capsys.readouterr().out.startswith("passed: no regression of 1.0% or more: ")


def test_one_bad_last_step_is_no_regression(
    runs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (Path(runs["again"]) / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])
    last["perf/step_time_seconds"], last["perf/mfu"] = 2.36, 0.124
    path = tmp_path / "spike.jsonl"
    path.write_text("".join([*lines[:-1], json.dumps(last) + "\n"]))
    assert main(["gate", str(path), "--baseline", runs["base"]]) == 0
    assert "passed" in capsys.readouterr().out


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["gate", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_wait_for_data_is_a_regression_although_steps_take_as_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(4)
    times = [step_times(KINDS["independent"], 300, rng) for _ in range(2)]
    wait = "goodput/data_wait_seconds"
    base = str(write_run(tmp_path / "a.jsonl", times[0], **{wait: 0.0}))
    slow = str(write_run(tmp_path / "b.jsonl", times[1], **{wait: 0.1}))
    code, found = answer(capsys, slow, "--baseline", base)
    assert code == 1
    failed = {check["metric"]: check["failed"] for check in found["checks"]}
    assert failed == {"step_time_seconds": False, "step_time_and_data_wait_seconds": True}
    assert found["checks"][1]["slowdown"] == pytest.approx(0.1, abs=0.01)
    assert answer(capsys, base, "--baseline", base)[0] == 0

    # A baseline that timed no waits has them in its steps.
    untimed = str(write_run(tmp_path / "c.jsonl", times[0]))
    code, found = answer(capsys, slow, "--baseline", untimed)
    assert (code, found["checks"][1]["slowdown"]) == (1, pytest.approx(0.1, abs=0.01))
    assert len(answer(capsys, untimed, "--baseline", untimed)[1]["checks"]) == 1


def test_rare_long_waits_for_data_that_a_trimmed_mean_misses_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(4)
    times = [step_times(KINDS["independent"], 300, rng) for _ in range(2)]
    base, slow = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_run(base, times[0])
    slow.write_text(
        "".join(
            line(n, seconds, **({} if n % 10 else {"goodput/data_wait_seconds": 2 * seconds}))
            for n, seconds in enumerate(times[1])
        )
    )
    code, found = answer(capsys, str(slow), "--baseline", str(base))
    assert (code, found["regression"], found["could_tell"]) == (0, False, False)
    assert "waits for data take" in found["message"]
    assert answer(capsys, str(base), "--baseline", str(slow))[1]["could_tell"]


def test_noise_that_hides_a_slowdown_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(6)
    for name in "ab":
        write_run(tmp_path / f"{name}.jsonl", [rng.uniform(0.5, 1.5) for _ in range(40)])
    code, found = answer(capsys, str(tmp_path / "b.jsonl"), "--baseline", str(tmp_path / "a.jsonl"))
    assert code == 0
    assert found["message"].startswith("could not tell a slowdown of 1.0%: step time ")
    assert "noise hides slowdowns below " in found["message"]
    assert found["verdict"]["sentence"].startswith("could not tell a slowdown of 1.0%: step time ")
    assert (found["could_tell"], found["verdict"]["passed"]) == (False, True)


def test_a_short_run_does_not_raise_the_threshold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noise slower than 20 steps may hide 2.7%; of a run that is much faster, it hides nothing."""
    a, b, c = (
        str(write_run(tmp_path / f"{name}.jsonl", [seconds] * 20))
        for name, seconds in (("a", 1.0), ("b", 1.0), ("c", 0.9))
    )
    code, found = answer(capsys, b, "--baseline", a)
    assert (code, found["could_tell"]) == (0, False)
    assert found["message"].startswith("could not tell a slowdown of 1.0%: ")
    assert found["message"].endswith("noise hides slowdowns below 2.7%")
    for run, threshold in ((b, "5%"), (c, "1%")):
        code, found = answer(capsys, run, "--baseline", a, f"--threshold={threshold}")
        assert (code, found["could_tell"]) == (0, True)
        assert found["message"].startswith(f"no regression of {threshold[0]}.0% or more: ")


def test_a_slowdown_that_may_be_chance_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1.5% in runs that scatter by 3.5%: the interval reaches some 1.5% to either side."""
    rng = random.Random(5)
    for name, mean in (("a", 1.0), ("b", 1.015)):
        write_run(tmp_path / f"{name}.jsonl", [mean * rng.uniform(0.94, 1.06) for _ in range(160)])
    code, found = answer(capsys, str(tmp_path / "b.jsonl"), "--baseline", str(tmp_path / "a.jsonl"))
    assert code == 0
    assert 0.01 < found["checks"][0]["slowdown"] < found["checks"][0]["high"] < 0.05
    assert "noise hides slowdowns below " in found["message"]


def test_the_junit_file_has_a_case_for_each_check(runs: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "gate.xml"
    words = ["gate", runs["slower"], "--baseline", runs["base"], "--junit", str(file)]
    assert main(words) == 1
    suite = ElementTree.parse(file).getroot()
    assert suite.attrib == {
        **{"name": "mfu-jax gate", "tests": "1", "failures": "1", "errors": "0"}
    }
    (case,) = suite
    assert case.attrib["name"] == "step time"
    (failure,) = case
    assert failure.tag == "failure"
    assert failure.attrib["message"].startswith("step time 1.0")
    assert main(["gate", runs["again"], "--baseline", runs["base"], f"--junit={file}"]) == 0
    assert ElementTree.parse(file).getroot().attrib["failures"] == "0"


def test_the_annotation_is_one_line_that_github_takes(
    runs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["gate", runs["slower"], "--baseline", runs["base"], "--github"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("::error title=mfu-jax gate::regression of at least 1.0%25: step time ")
    main(["gate", runs["again"], "--baseline", runs["base"], "--github"])
    assert "\n::notice title=mfu-jax gate::no regression" in capsys.readouterr().out


def test_a_pull_requests_comment_has_the_answer_first_and_a_row_for_each_check(
    runs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gate", runs["slower"], "--baseline", runs["base"], "--markdown"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("**mfu-jax gate: FAILED** regression of at least 1.0%: step time ")
    assert "FAILED" not in lines[2]
    assert "largest loss: slower step time" in lines[2]
    assert lines[4:6] == ["| check | run against baseline |", "|---|---|"]
    assert lines[6].startswith("| step time | 1.0")
    assert lines[6].count("|") == 3
    assert lines[-3:][1:] == ["```", "</details>"]
    assert main(["gate", runs["again"], "--baseline", runs["base"], "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("**mfu-jax gate: passed** no regression of 1.0% or")


def test_a_run_that_is_its_own_baseline_is_told_so(
    runs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gate", runs["base"], "--baseline", runs["again"]]) == 0
    assert not capsys.readouterr().err
    assert (
        main(["gate", runs["base"], "--baseline", runs["again"], "--baseline", runs["base"]]) == 0
    )
    assert "is its own baseline, which hides regressions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected one run, got none"),
        (["{base}"], "no baseline"),
        (["{base}", "--baseline"], "--baseline has no value"),
        (["{base}", "--baseline", "{base}/none.jsonl"], "No such file"),
        (["{empty}", "--baseline", "{base}"], "holds no metrics file"),
        (["{base}", "--baseline", "{base}", "--threshold", "5"], "usually a percentage without"),
        (["{base}", "--baseline", "{base}", "--threshold=-1%"], "hint: leave it out for 1%"),
        (["{base}", "--baseline", "{base}", "--threshold", "x"], "threshold"),
        (["{base}", "--baseline", "{base}", "warmup_steps=-1"], "expected 0 or more"),
        (["{again}", "--baseline", "{base}", "--junit", "{short}/b.xml"], "--junit"),
        (["{short}", "--baseline", "{base}"], "3 of the run are too few"),
    ],
)
def test_wrong_input_is_exit_code_2(
    words: list[str],
    message: str,
    runs: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    runs["empty"] = str(tmp_path / "empty")
    runs["short"] = str(write_run(tmp_path / "short.jsonl", [1.0] * 3))
    assert main(["gate", *(word.format(**runs) for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert is_told(error, hint=True)


def test_what_several_baselines_differ_by_is_no_regression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(3)
    factors = {"a": 1.0, "b": 1.03, "c": 0.98, "d": 1.01, "e": 0.99, "run": 1.03, "slow": 1.25}
    names = {}
    for name, mean in factors.items():
        times = step_times(KINDS["independent"], 100, rng, mean=mean)
        names[name] = str(write_run(tmp_path / name / "metrics.jsonl", times))
    all_of_them = [word for name in "abcde" for word in ("--baseline", names[name])]
    assert answer(capsys, names["run"], "--baseline", names["a"])[0] == 1
    code, found = answer(capsys, names["run"], *all_of_them)
    assert code == 0
    assert found["comparison"]["a"] == ", ".join(names[name] for name in "abcde")
    assert [found["comparison"][f"steps_{run}"] for run in "ab"] == [5 * 100, 100]
    assert answer(capsys, names["slow"], *all_of_them)[0] == 1


def test_a_baseline_with_other_tokens_decides_by_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice the tokens in twice the time, in one of two baselines."""
    a, run = (write_run(tmp_path / f"{name}.jsonl", [1.0] * 50) for name in ("a", "run"))
    b = write_run(tmp_path / "b.jsonl", [2.0] * 50, tokens=2048.0)
    code, found = answer(capsys, str(run), "--baseline", str(a), "--baseline", str(b))
    assert code == 0
    assert found["comparison"]["decided_by"] == "tokens_per_sec_per_device"
