"""The pages: the numbers are those of the JSON, and names cannot break out of the text."""

import lzma
import re

import pytest

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.planning.result.page import plan_page
from mfu_jax.planning.result.plan import Plan, StepWork
from mfu_jax.planning.result.planner import make_plan
from mfu_jax.planning.targets import parse_target
from mfu_jax.util.formatting import seconds_text
from tests.support.html_pages import headlines
from tests.support.paths import RECORDED


@pytest.fixture(scope="module")
def plan():
    text = lzma.decompress((RECORDED / "v5p_llama70b.hlo.xz").read_bytes()).decode()
    work = StepWork(model_flops=7_360_126_541_365_248, tokens=16_384, convention="exact")
    plan = make_plan(ProgramDump(text=text), parse_target(topology="v5p:8x8x8"), work=work)
    return plan.for_run(tokens=1e12, price=4.0)


def test_the_numbers_of_a_plan(plan):
    shown = headlines(plan_page(plan))
    assert float(shown["step time"]) == plan.step_time_seconds
    assert float(shown["MFU"]) == plan.mfu
    assert (
        float(shown["days"])
        == plan.days
        == pytest.approx(1e12 / 16_384 * plan.step_time_seconds / 512 / 86400)
    )
    assert float(shown["cost"]) == plan.cost == pytest.approx(plan.days * 512 * 24 * 4.0)


def test_transfers_are_those_of_the_json(plan):
    page = plan_page(plan)
    table = page[page.index("Transfers</a>") : page.index("Memory</a>")]
    assert plan.to_json()["collectives"]
    for row in plan.to_json()["collectives"]:
        assert row["kind"] in table
        for part in ("seconds", "hidden_seconds", "exposed_seconds"):
            assert f">{seconds_text(row[part])}<" in table


def test_every_span_of_the_layer_is_drawn(plan):
    assert plan_page(plan).count("<rect ") == len(plan.layer.spans) > 10


def test_a_plan_that_does_not_fit_has_a_page():
    page = plan_page(Plan(target="<b>8 chips</b>", chips=8, fits=False, notes=("a <note>",)))
    assert "does NOT fit" in page
    assert "<b>8 chips" not in page


def test_memory_of_the_host_has_no_share_of_the_devices():
    sizes = {"host": 5 * 2**30, "parameters": 3 * 2**30, "temporaries": 2**30}
    page = plan_page(Plan(target="8 chips", chips=8, fits=True, memory=sizes))
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page[page.index(">Memory</a></h2>") :])
    assert cells == ["5.00 GiB", "n/a", "3.00 GiB", "75.0%", "1.00 GiB", "25.0%"]
