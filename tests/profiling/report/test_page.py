"""The page: its numbers are those of the JSON, whatever names the trace holds."""

from __future__ import annotations

import dataclasses
import re
from html import escape
from pathlib import Path

import pytest

from mfu_jax.dumps import ProgramDump, write
from mfu_jax.profiling.profile import Profile, read_profile
from mfu_jax.profiling.report.page import page
from mfu_jax.profiling.report.text import render
from tests.support import accelerator_traces as traces
from tests.support import html_pages
from tests.support.accelerator_traces import STEPS
from tests.support.xspace import Plane

US = 1e-6
HOSTILE = "</script><script>document.title='x'</script><img src=x onerror=alert(1)>\"'&\n\x00"


def profile_of(folder: Path, *planes: Plane) -> Profile:
    kind = "NVIDIA H100 80GB HBM3"
    traces.write_program(folder, kind)
    traces.write_trace(folder, *planes)
    return read_profile(folder)


def kernels(names: list[str]) -> Plane:
    """A GPU with one more stream: these kernels, one after the other, in each step."""
    plane = traces.gpu()
    length = 20 * 10**6 // len(names)
    events = [
        (name, (80 + 100 * step) * 10**6 + i * length, length, {})
        for step in range(STEPS)
        for i, name in enumerate(names)
    ]
    plane.line("Stream #8(Compute)", events)
    return plane


def table(text: str, by: str) -> dict[str, list[float]]:
    """The numbers of the first table of a kind by the rows' names."""
    start = text.index(f'<table data-by="{by}"')
    body = text[start : text.index("</table>", start)]
    rows = {}
    for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL):
        name = re.search(r'<th scope="row" title="(.*?)">', row)
        if name:
            rows[name[1]] = [float(v) for v in re.findall(r'data-value="(.*?)"', row)]
    return rows


def check_numbers(text: str, profile: Profile) -> None:
    answer = profile.to_json()
    assert html_pages.headlines(text) == {
        "MFU": answer["mfu"],
        "largest loss": answer["verdict"]["losses"][0]["fraction"],
        "HFU": answer["hfu"],
        "step time": answer["step_time_seconds"],
        "coverage": answer["coverage"],
        "steps": answer["steps"],
    }
    seconds = html_pages.values(text, "data-seconds")
    assert seconds == [bar["seconds"] for bar in answer["waterfall"]]
    points = html_pages.values(text, "data-points")
    assert points == [100.0, *(bar["mfu_points"] for bar in answer["waterfall"])]
    for by in ("scope", "op", "kernel", "phase"):
        fields = ("seconds", "share_of_step", "runs", "flops", "mfu", "hfu", "hbm_bytes")
        shown = {name: row[:7] for name, row in table(text, by).items()}
        expected = {r["name"]: [r[field] for field in fields] for r in answer[f"by_{by}"]}
        assert shown == expected


def test_the_numbers_are_those_of_the_json(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, traces.host(), traces.gpu())
    text = page(profile)
    check_numbers(text, profile)
    assert 100 * US in html_pages.values(text, "data-value")  # of accelerator_traces
    titles = [e.text for e in html_pages.elements(text) if e.tag == "h2"]
    assert {"Where the peak went", "Scopes", "Ops", "By kernel", "By phase", "FLOPs"} <= set(titles)


def test_advice_is_on_the_page(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, traces.host(), traces.gpu())
    text = page(profile)
    rows = profile.to_json()["advice"]
    assert html_pages.values(text, "data-gain") == [row["gain_seconds"] for row in rows]
    items = [e.text for e in html_pages.elements(text) if "data-gain" in e.attributes]
    assert items[0].startswith(
        "slow data: saves 21.7% of the step, 21.6 µs"
    )  # 22, less 0.35 to record it
    assert all(row["evidence"] in item for row, item in zip(rows, items, strict=True))


def test_the_verdict_comes_first_on_the_page_in_the_text_and_in_the_json(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, traces.host(), traces.gpu())
    sentence = profile.to_json()["verdict"]["sentence"]
    assert re.match(
        r"[\d.]+% MFU \(exact FLOPs, peak 989.4 TFLOP/s bf16\); below what models of", sentence
    )
    assert "on H100 SXM reach, 14.6% to 40.4% (4 published runs); largest loss: " in sentence
    assert "next: prefetch batches in other threads or processes, against slow data" in sentence
    (verdict,) = (
        e for e in html_pages.elements(page(profile)) if e.attributes.get("class") == "verdict"
    )
    assert verdict.text == sentence
    text = render(profile, by=())
    assert " ".join(text.split()).startswith(sentence)
    assert max(map(len, text.split("\n\n")[0].splitlines())) <= 100
    assert text.index("advice, ") < text.index("where the peak went")
    assert re.search(rf"step time +[^\n]*, mean of {profile.measured.steps} steps\n", text)


def test_without_advice_its_place_says_so(tmp_path: Path) -> None:
    profile = dataclasses.replace(profile_of(tmp_path, traces.gpu()), advice=())
    assert "no known remedy saves 2% of a step" in render(profile, by=())
    assert "no known remedy saves 2% of a step" in page(profile)
    step, place = profile.to_json()["verdict"]["next_steps"]
    assert place["text"].startswith("tokens_per_step=N, ")
    assert step["gain_fraction"] is None
    assert step["text"] == f"mfu-jax profile {tmp_path} by=kernel"


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    text = page(profile_of(tmp_path, traces.host(), traces.gpu()))
    found = html_pages.elements(text)
    assert not html_pages.outside(text)
    assert not re.search(r"url\(|@import|https?:", text)
    (policy,) = (e for e in found if e.attributes.get("http-equiv") == "Content-Security-Policy")
    assert str(policy.attributes["content"]).startswith("default-src 'none'")
    assert len([e for e in found if e.tag == "script"]) == 1


def hostile(folder: Path) -> Profile:
    host = Plane("/host:CPU")
    marks = [("train", 100 * 10**6 * n, 10**6, {"step_num": n}) for n in range(STEPS)]
    sleeps = [(HOSTILE, 100 * 10**6 * n + 81 * 10**6, 10**7, {}) for n in range(STEPS)]
    host.line("python", sorted([*marks, *sleeps], key=lambda event: event[1]))
    return profile_of(folder, host, kernels([HOSTILE]))


@pytest.mark.full
@pytest.mark.skipif(html_pages.CHROMIUM is None, reason="no Chromium here")
def test_hostile_names_harm_no_browser(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(hostile(tmp_path)))
    dom = html_pages.in_browser(file, tmp_path / "browser")
    assert "<title>jit_step: MFU" in dom
    assert "has-script" in dom


def test_hostile_names_are_text(tmp_path: Path) -> None:
    profile = hostile(tmp_path)
    text = page(profile)
    found = html_pages.elements(text)
    assert len([e for e in found if e.tag == "script"]) == 1
    assert not any(e.tag == "img" for e in found)
    assert not any(key.startswith("on") for e in found for key in e.attributes)
    assert "\x00" not in text
    assert escape("</script><script>") in text
    terminal = render(profile, by=["scope", "op"])
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", terminal)


def test_tables_of_long_names_fit_a_terminal(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, traces.host(), kernels([f"kernel_{'long' * 50}"]))
    terminal = render(profile, by=["scope", "op", "kernel"])
    tables = terminal[terminal.index("by scope") :].partition("\n\nnote: ")[0].splitlines()
    assert max(map(len, tables)) <= 100
    assert "kernel_" + "long" * 10 in "".join(terminal.split())


@pytest.mark.full
def test_ten_thousand_ops_are_a_small_page(tmp_path: Path) -> None:
    names = [f"kernel_{i}_{'long' * 50}" for i in range(10_000)]
    profile = profile_of(tmp_path, traces.host(), kernels(names))
    text = page(profile)
    assert len(text.encode()) < 2_000_000
    assert [bar.name for bar in profile.waterfall if "other kinds" in bar.name]
    assert len(profile.waterfall) < 20
    shown = [e for e in html_pages.elements(text) if e.text.startswith("rest: ")]
    assert any(e.text == f"rest: {10_000 + 4 - 150:,} more" for e in shown)
    answer = profile.to_json()
    assert sum(row["seconds"] for row in answer["by_op"]) == pytest.approx(98 * US)
    start = text.index('<table data-by="op"')
    seconds = [float(v) for v in re.findall(r'<tr><th.*?data-value="(.*?)"', text[start:])[:151]]
    assert sum(seconds) == pytest.approx(98 * US)  # the rest's row included


@pytest.mark.full
@pytest.mark.skipif(html_pages.CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_the_numbers_of_the_json(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, traces.host(), traces.gpu())
    file = tmp_path / "page.html"
    file.write_text(page(profile))
    dom = html_pages.in_browser(file, tmp_path / "browser")
    assert 'class="has-script"' in dom
    check_numbers(dom, profile)


CLICKS = """<script>{
const click = (by, title) => [...document.querySelectorAll(`table[data-by=${by}] th button`)]
  .find((button) => button.textContent === title).click();
click("op", "time"); click("op", "time");
}</script></body>"""


@pytest.mark.full
@pytest.mark.skipif(html_pages.CHROMIUM is None, reason="no Chromium here")
def test_the_script_sorts(tmp_path: Path) -> None:
    profile_of(tmp_path, traces.host(), traces.gpu())
    deep = ProgramDump(text=traces.TEXT.replace("jvp(norm)/mul", "jvp(layers)/norm/mul"))
    write(deep, tmp_path / "programs" / "step.mfu")
    text = page(read_profile(tmp_path, hardware="h100")).replace("</body>", CLICKS)
    assert set(table(text, "scope")) == {"mlp", "(all-gather)", "layers/norm"}
    file = tmp_path / "page.html"
    file.write_text(text)
    forbidden = html_pages.in_browser(file, tmp_path / "browser")  # no script runs but ours
    assert list(table(forbidden, "op")) == list(table(text, "op"))
    file.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", text))
    dom = html_pages.in_browser(file, tmp_path / "browser2")
    seconds = [row[0] for row in table(dom, "op").values()]
    assert seconds == sorted(seconds) != [row[0] for row in table(text, "op").values()]
