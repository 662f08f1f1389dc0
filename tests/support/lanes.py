"""Two lanes of tests. The fast one runs what neither starts a process nor compiles much.

A test that does either is marked ``@pytest.mark.full`` and runs with ``--full`` only; of a
parametrised one, the fast lane still runs the cases named by ``keep``:

    @pytest.mark.full(keep=["llama"])
    @pytest.mark.parametrize("family", FAMILIES)

So that the lanes stay honest, the fast lane fails an unmarked test that starts a process or
compiles more than `MOST_PROGRAMS`.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

MOST_PROGRAMS = 60
"""Programs that XLA may compile for a test of the fast lane: each operation outside jit is one."""

_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Lanes:
    """The plugin: counts what the running test starts and compiles.

    Args:
        is_full: whether all tests run.
    """

    def __init__(self, is_full: bool) -> None:
        self._is_full = is_full
        self._started = 0
        self._compiled = 0
        sys.addaudithook(self._audit)

    def _audit(self, event: str, _: tuple[Any, ...]) -> None:
        self._started += event in _STARTS

    def on_compile(self, event: str, seconds: float, **_: Any) -> None:
        """A listener of `jax.monitoring`."""
        self._compiled += event == _COMPILED

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leaves tests of the full lane out, or puts their modules first.

        What takes long begins early, so that no worker is left with it while others have nothing.

        Raises:
            pytest.UsageError: a case to keep does not exist.
        """
        if not any("[" in argument for argument in config.args):  # all cases were collected
            _check_kept(items)
        if not self._is_full:
            config.hook.pytest_deselected(items=[item for item in items if is_for_full(item)])
            items[:] = [item for item in items if not is_for_full(item)]
        long = {item.path for item in items if item.get_closest_marker("full")}
        items.sort(key=lambda item: item.path not in long)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        """Starts counting; fixtures of a wider scope count for the first test that asks."""
        self._started = self._compiled = 0
        yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Fails a test that belongs to the other lane."""
        yield
        if self._is_full or item.get_closest_marker("full"):
            return
        if self._started or self._compiled > MOST_PROGRAMS:
            pytest.fail(
                f"the test started {self._started} processes and compiled {self._compiled} "
                f"programs; the fast lane allows none and {MOST_PROGRAMS}; usually a new test "
                f"of a command or of a model; mark it @pytest.mark.full",
                pytrace=False,
            )


def _check_kept(items: list[pytest.Item]) -> None:
    cases: dict[str, set[str]] = {}
    kept: dict[str, set[str]] = {}
    for item in items:
        if (marker := item.get_closest_marker("full")) and marker.kwargs.get("keep"):
            test = item.nodeid.partition("[")[0]
            cases.setdefault(test, set()).add(_case(item))
            kept[test] = set(marker.kwargs["keep"])
    for test, wanted in kept.items():
        if unknown := sorted(wanted - cases[test]):
            raise pytest.UsageError(f"{test}: keep= names {unknown}, which are no cases of it")


def _case(item: pytest.Item) -> str:
    return item.name.partition("[")[2].removesuffix("]")


def is_for_full(item: pytest.Item) -> bool:
    """Whether a test runs with ``--full`` only: it is marked, and its case is not kept."""
    marker = item.get_closest_marker("full")
    if marker is None:
        return False
    return _case(item) not in marker.kwargs.get("keep", ())
