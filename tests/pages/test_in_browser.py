"""Every kind of page in a browser: its answer is that of ``--json``, and it is accessible."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import pytest

from mfu_jax import cli
from mfu_jax.dumps import ProgramDump, write
from mfu_jax.util.formatting import percent, seconds_text
from tests.commands.planning.test_plan import FLOPS, TEXT
from tests.support import accelerator_traces as traces
from tests.support import html_pages
from tests.support.metrics_lines import write_run
from tests.support.written_logs import WrittenLog

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(html_pages.CHROMIUM is None, reason="no Chromium here"),
]
KINDS = ("one run", "three runs", "profile", "plan")
WIDTHS = (1440, 768, 390)
_RUN_AXE = """<script>axe.run().then(({violations}) => {
  const found = violations.filter(({impact}) => ["serious", "critical"].includes(impact));
  parent.report(name, [document.documentElement.scrollWidth,
    found.map(({id, nodes}) => [id, nodes.map((node) => node.html.slice(0, 200))])]);
});</script>"""
# The least height of a picture's text on the screen, and what the arrow keys show.
_LOOK = """<script>
const heights = [...document.querySelectorAll("svg text")].map((text) => {
  const svg = text.ownerSVGElement;
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  return parseFloat(getComputedStyle(text).fontSize) * scale;
});
const svg = document.querySelector("figure[data-x] svg");
svg?.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
parent.report(name, [heights.length && Math.min(...heights),
  document.querySelector("figure[data-x] output")?.textContent]);
</script>"""
_FRAMES = """<!doctype html><title>{}</title><script>
const found = {};
function report(name, value) {
  found[name] = value;
  document.title = JSON.stringify(found);
}
</script>"""


def words_of(kind: str, folder: Path) -> list[str]:
    """The command whose page is of that kind, with the files that it reads."""
    runs = {"a": (0.5, 0.2), "b": (0.25, 0.2), "c": (1.0, 0.1)}
    for name, (seconds, rate) in runs.items():
        times = [seconds * (1 + 0.01 * (n % 5)) for n in range(60)]
        rates = {"learning/current_learning_rate": rate, "learning/loss": 2.5, "eval/loss": 3.0}
        write_run(folder / name / "metrics.jsonl", times, **rates)
        log = WrittenLog(folder / name)
        log.start(100.0, 102.0)
        log.steps(102.0 + sum(times), 0, [round(1e6 * t) for t in times], optimal_s=0.2)
        log.stop(105.0 + sum(times))
        values = {"devices": "1 × cpu", "peak of one device": "10 TFLOP/s/device in bf16"}
        ledger = "  FLOPs per step  FLOPs  of executed\n  model  1,000  50.00%  x\n"
        log.line("setup", 101.0, values=values, texts={"config": f"lr={rate}", "ledger": ledger})
    traces.write_program(folder / "trace", "NVIDIA H100 80GB HBM3")
    traces.write_trace(folder / "trace", traces.host(), traces.gpu())
    write(ProgramDump(text=TEXT), folder / "step.mfu")
    plan = [str(folder / "step.mfu"), "topology=v5p:1x1x1", f"model_flops={FLOPS}"]
    return {
        "one run": ["report", str(folder / "a")],
        "three runs": ["report", *(str(folder / name) for name in runs)],
        "profile": ["profile", str(folder / "trace")],
        "plan": ["plan", *plan, "tokens_per_step=8"],
    }[kind]


def page_of(kind: str, folder: Path) -> str:
    file = folder / "page.html"
    assert cli.main([*words_of(kind, folder), "--html", str(file)]) == 0
    return file.read_text(encoding="utf-8")


def looked_at(texts: Mapping[str, str], script: str, folder: Path) -> dict[str, Any]:
    """What a script reports of each page; without the policy, which forbids it.

    Args:
        texts: pages by name; a name begins with the width of its window.
        script: at the end of each.
        folder: for files.
    """
    frames = [_FRAMES]
    for name, text in texts.items():
        text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", text)
        inner = escape(text.replace("</body>", f"{script}</body>"))
        width, height = name.split()[0], 900
        frames.append(f'<iframe name="{name}" width={width} height={height} srcdoc="{inner}">')
        frames.append("</iframe>")
    file = folder / "looked_at.html"
    file.write_text("".join(frames), encoding="utf-8")
    dom = html_pages.in_browser(file, folder / "browser", "--virtual-time-budget=60000")
    title = next(e.text for e in html_pages.elements(dom) if e.tag == "title")
    found: dict[str, Any] = json.loads(title)
    assert found.keys() == texts.keys()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_verdict_and_the_three_numbers_are_those_of_the_json(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page_of(kind, tmp_path)
    dom = html_pages.in_browser(tmp_path / "page.html", tmp_path / "browser")
    capsys.readouterr()
    cli.main([*words_of(kind, tmp_path), "--json"])
    answer = json.loads(capsys.readouterr().out)
    verdicts = [run["verdict"] for run in answer.get("runs", [answer])]
    found = html_pages.elements(dom)
    (sentence,) = (e.text for e in found if e.attributes.get("class") == "verdict")
    if kind == "three runs":
        results = [compared["verdict"] for compared in answer["comparisons"]]
        first, second = (re.sub(r"\bA\b", "a", result)[1:] for result in results)
        assert sentence == f"b{first}; c{second}."
    else:
        assert sentence == verdicts[0]["sentence"]
    for name, (value, text) in _THREE.items():
        shown = [e for e in found if e.attributes.get("data-headline") == name]
        assert [float(e.attributes["data-value"] or "") for e in shown] == list(
            map(value, verdicts)
        )
        assert [e.text for e in shown] == [text(value(verdict)) for verdict in verdicts]


_THREE: Mapping[str, tuple[Callable[[Any], float], Callable[[float], str]]] = {
    "MFU": (lambda verdict: verdict["mfu"], percent),
    "largest loss": (lambda verdict: verdict["losses"][0]["fraction"], percent),
    "step time": (lambda verdict: verdict["step_time_seconds"], seconds_text),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pictures_text_is_readable_and_arrow_keys_show_its_values(
    kind: str, tmp_path: Path
) -> None:
    text = page_of(kind, tmp_path)
    seen = looked_at({str(width): text for width in WIDTHS}, _LOOK, tmp_path)
    expected = {"one run": "step 0: 40.0%", "three runs": "step 0: a 40.0%, b 80.0%, c 20.0%"}
    for least, shown in seen.values():
        assert least == 0 or least >= 11
        assert shown == expected.get(kind)


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, from npm."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm here, which brings axe-core")
    folder = tmp_path_factory.mktemp("axe")
    done = subprocess.run(
        [npm, "pack", "axe-core@4", "--silent"], cwd=folder, capture_output=True, timeout=120
    )
    if done.returncode:
        pytest.skip("npm brings no axe-core")
    (package,) = folder.glob("*.tgz")
    with tarfile.open(package) as archive:
        source = archive.extractfile("package/axe.min.js")
        assert source is not None
        return source.read().decode().replace("</script", "<\\/script")


@pytest.mark.parametrize("kind", KINDS)
def test_axe_finds_no_serious_fault(kind: str, tmp_path: Path, axe: str) -> None:
    light = page_of(kind, tmp_path)
    dark = light.replace("(prefers-color-scheme: dark)", "all")
    assert light != dark
    pages = {f"{width} light": light for width in WIDTHS}
    pages |= {f"{width} dark": dark for width in WIDTHS}
    pages["390 with a fault"] = light.replace("<footer>", "<button></button><footer>")
    seen = looked_at(pages, f"<script>{axe}</script>{_RUN_AXE}", tmp_path)
    assert [rule for rule, _ in seen.pop("390 with a fault")[1]] == ["button-name"]
    for name, (needed, faults) in seen.items():
        assert needed <= int(name.split()[0]), "the page itself scrolls sideways"
        assert faults == []
