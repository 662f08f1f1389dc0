"""Eight virtual CPU devices for every test that wants a mesh; started processes share programs."""

import contextlib
import gc
import logging
import os
import platform
import signal
import threading
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import hypothesis
import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
# What tests compile runs for moments: most of the suite's time was the optimisation of code.
_FLAGS = {"--xla_force_host_platform_device_count": 8, "--xla_backend_optimization_level": 0}
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # a later XLA has no such option
    # Other fusions of the same matmuls; tests/flops has those of users.
    _FLAGS |= {"--xla_cpu_use_fusion_emitters": 0, "--xla_cpu_parallel_codegen_split_count": 1}
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [_given, *(f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _given)]
)
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import jax  # noqa: E402  # reads the environment now; what is set below is for child processes
from jax._src import monitoring  # noqa: E402

from tests.support.lanes import Lanes  # noqa: E402
from tests.support.paths import ROOT  # noqa: E402

# A shell that runs the tests in the background ignores these; processes that tests start must not.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine is no failure: no test has a deadline.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also what starts processes or compiles")


def pytest_configure(config: pytest.Config) -> None:
    platform.platform()  # starts a process once, which would count for the first test that asks
    lanes = Lanes(config.getoption("--full"))
    config.pluginmanager.register(lanes)
    jax.monitoring.register_event_duration_secs_listener(lanes.on_compile)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache() -> None:
    """Processes that tests start, in this run or the next, take their programs from one folder."""
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / f"programs-{_cpu()}"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _cpu() -> str:
    """Tells CPUs apart for which XLA compiles different code."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return f"{zlib.crc32(line.encode()):08x}"
    return platform.machine()


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """What one module leaves costs the next ones nothing.

    A collection of garbage visits what a module made itself. Loggers that its tests do not close no
    longer listen, and the lanes go on counting where a test has cleared JAX's listeners.
    """
    gc.collect()
    gc.freeze()
    callbacks, listeners = [*gc.callbacks], monitoring.get_event_duration_listeners()
    yield
    gc.callbacks[:] = callbacks
    monitoring._event_duration_secs_listeners = listeners
    for thread in threading.enumerate():
        function = next(iter(getattr(thread, "_args", ())), None)
        writer = getattr(function, "__self__", None)
        if type(writer).__name__ == "LogWriter":  # of a log until exit: it shows signs of life
            writer.close(0.0)


@pytest.fixture(autouse=True)
def lines_of_this_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """What threads of earlier tests have to say is no line of this one's."""
    if "caplog" not in request.fixturenames:
        yield
        return
    earlier = {t.ident for t in threading.enumerate()} - {threading.get_ident()}
    handler = request.getfixturevalue("caplog").handler

    def is_own(record: logging.LogRecord) -> bool:
        return record.thread not in earlier

    handler.addFilter(is_own)
    yield
    handler.removeFilter(is_own)
