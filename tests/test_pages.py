"""What is generated in README.md and docs/ is up to date, and its example runs."""

from __future__ import annotations

import functools
import importlib
import inspect
import pydoc
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mfu_jax
from mfu_jax.logger.sinks.base import OURS, find_sink
from scripts import make_pages, results
from tests.support.paths import DOCS, ROOT

PAGES = (
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", results.FOLDER / "README.md"),
    ROOT / "examples" / "README.md",
    *sorted(DOCS.glob("*.md")),
)


def test_the_pages_are_up_to_date() -> None:
    stale = [p.name for p, text in make_pages.pages().items() if p.read_text() != text]
    assert not stale, "run python -m scripts.make_pages"


def test_every_public_name_has_a_docstring_in_the_help() -> None:
    page = pydoc.plain(pydoc.render_doc(mfu_jax))
    for name in mfu_jax.__all__:
        assert re.search(rf"\b{name}\b", page)
        assert getattr(mfu_jax, name).__doc__


def test_the_three_lines_run_and_leave_the_step_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    @jax.jit
    def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * gradient, {"loss": loss}

    batches = [jnp.full((2, 8), float(i)) for i in range(3)]
    plain = jnp.ones((8, 4))
    for batch in batches:
        plain, _ = train_step(plain, batch)
    options = {"peak_tflops_per_device": 1.0}
    monkeypatch.setattr(mfu_jax, "instrument", functools.partial(mfu_jax.instrument, **options))
    names = {"train_step": train_step, "batches": batches, "state": jnp.ones((8, 4))}
    exec("\n".join(make_pages.three_lines().splitlines()[1:-1]), names)
    assert (names["state"] == plain).all()
    records = (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()
    assert len(records) == len(batches)
    assert (tmp_path / "runs/a/metrics.jsonl.summary.json").exists()
    assert list((tmp_path / "runs/a/tensorboard").glob("events*"))


def test_the_ledger_on_the_pages_explains_every_flop() -> None:
    assert "+ unexplained                                   0 " in make_pages.ledger_block()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_every_path_of_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    paths = re.findall(r"`((?:mfu_jax|tests|scripts|configs|docs|layers)/[\w./-]*)`", text)
    missing += [p for p in paths if "NAME" not in p and not (ROOT / p).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_of_the_package_on_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    imports = re.findall(r"from (mfu_jax[\w.]*) import (\w[\w, ]*)", text)
    names = {f"{module}.{name.strip()}" for module, line in imports for name in line.split(",")}
    names |= set(re.findall(r"\bmfu_jax(?:\.\w+)+", text))
    assert [name for name in sorted(names) if not exists(name)] == []


def test_every_message_of_the_troubleshooting_page_is_said_somewhere() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    source = "".join(path.read_text() for path in (ROOT / "mfu_jax").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # a literal over several lines
    assert len(messages) > 20
    assert [message for message in messages if message not in source] == []


def test_what_the_changelog_says_moved_is_at_its_new_place() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    moved = re.findall(r"\| `(?:python -m )?(mfu_jax[\w.]+)` \|$", text, re.MULTILINE)
    assert len(moved) > 10
    assert [name for name in moved if not exists(name)] == []


def is_written(name: str) -> bool:
    """Whether the file of an adapter, whose library is not installed, is or defines a name."""
    package, room, module, *defined = name.split(".")
    source = (ROOT / package / room / f"{module}.py").read_text(encoding="utf-8")
    return all(re.search(rf"^(def|class) {each}\b", source, re.MULTILINE) for each in defined)


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    found: Any = mfu_jax
    for i, part in enumerate(name.split(".")[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(name.split(".")[:i]))
            except ModuleNotFoundError as error:
                return not str(error.name).startswith("mfu_jax") and is_written(name)
        found = getattr(found, part)
    return True


def test_every_test_and_decorator_that_contributors_are_sent_to_exists() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for folders, pattern in ((("tests",), r"`(test_\w+)`"), (("mfu_jax", "layers"), r"`@(\w+)\(")):
        names = re.findall(pattern, page)
        files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
        source = "\n".join(path.read_text() for path in files)
        assert names
        assert [name for name in names if f"def {name}(" not in source] == []


def test_the_page_of_sinks_has_every_sink_with_its_arguments() -> None:
    text = (DOCS / "sinks.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE))
    assert rows.keys() == OURS.keys()
    for name, said in rows.items():
        sink = find_sink(name)
        assert sink is not None
        for parameter in inspect.signature(sink).parameters.values():
            assert parameter.kind is parameter.VAR_KEYWORD or f"`{parameter.name}`" in said
