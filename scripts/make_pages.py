"""Writes the generated parts of README.md, docs/ and scripts/results/; run it after changing the
three-line example, the ledger's text or a result.

    python -m scripts.make_pages

- every block between ``<!-- include NAME -->`` and ``<!-- end -->``: the three-line example, whose
  source is the first Python block of ``docs/integration.md``, the output of `COMMAND`, and how far
  predictions were off
- ``scripts/results/README.md``, from the results, and the measured runs beside their predictions in
  ``plan_vs_measured.json``, from ``compared_runs.yml``
"""

from __future__ import annotations

import contextlib
import io
import re
import statistics
from pathlib import Path

from mfu_jax import cli
from mfu_jax.planning.step_time.compared_runs import compared_runs
from scripts import results

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# The ledger that the pages show. The recorded program has 80 scanned layers of Llama 3 70B's width
# with flash attention; test_recorded_programs.py derives the four numbers by hand.
COMMAND = (
    "compare",
    "tests/programs/v5p_llama70b.hlo.xz",
    "convention=exact",
    "model_flops=7360126541365248",
    "attention=527830005841920",
    "xla=212843144151040",
)
_LINE = 140  # columns per line in a block; kernels have long names
_BLOCK = re.compile(r"(<!-- include ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """Every page with a generated part: path → expected text."""
    blocks = {
        "three-lines": three_lines(),
        "ledger": ledger_block(),
        "compared-runs": compared_runs_block(),
    }
    made = {
        results.FOLDER / "plan_vs_measured.json": plan_vs_measured(),
        results.FOLDER / "README.md": results.index(),
    }
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if _BLOCK.search(text):
            made[path] = _BLOCK.sub(lambda found: found[1] + blocks[found[2]] + found[3], text)
    return made


def three_lines() -> str:
    """The example that every page shows, as a fenced block."""
    page = (DOCS / "integration.md").read_text(encoding="utf-8")
    match = re.search(r"^```python\n.*?^```\n", page, re.DOTALL | re.MULTILINE)
    assert match is not None
    return match[0]


def ledger_block() -> str:
    """`COMMAND` and its output, as a fenced block; long lines are cut."""
    lines = [line if len(line) <= _LINE else f"{line[: _LINE - 1].rstrip()}…" for line in _ledger()]
    command = " ".join(["$ mfu-jax", *COMMAND[:3], "\\\n     ", *COMMAND[3:]])
    return "\n".join(["```", command, *lines, "```", ""])


def compared_runs_block() -> str:
    """Errors of predictions, for dense models and those with experts."""
    lines = []
    for experts, models in ((False, "dense models"), (True, "models with experts")):
        errors = sorted(
            abs(run.error) for run in compared_runs() if not run.fitted and run.experts == experts
        )
        lines.append(
            f"{models.capitalize()}, {len(errors)} runs: median error "
            f"{statistics.median(errors):.1%}, largest {errors[-1]:.1%}."
        )
    return "\n".join([*lines, ""])


def plan_vs_measured() -> str:
    """The study of plans, with every measured run beside its prediction, including the worst."""
    first, *others = results.read("plan_vs_measured")
    rows = []
    for run in compared_runs():
        notes = filter(None, ["fitted" if run.fitted else "", run.note])
        rows.append(
            {
                "run": run.run,
                "step of": run.step,
                "measured s": run.measured_seconds,
                "bound s": run.bound_seconds,
                "predicted s": run.predicted_seconds,
                "error": f"{run.error:+.1%}",
                "note": "; ".join(notes),
            }
        )
    return results.text("plan_vs_measured", [first | {"rows": rows}, *others])


def _ledger() -> list[str]:
    output = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(output):
        code = cli.main([*COMMAND])
    assert code == 0
    return output.getvalue().splitlines()


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
