"""The cache: what is found again, and what is compiled again. Compiles are counted by the child."""

import dataclasses
import lzma

import pytest

from mfu_jax.planning.compilation import cache
from mfu_jax.planning.compilation.cache import compile_cached, installed_versions, key_of
from mfu_jax.planning.compilation.compiling import Request, TooLarge
from mfu_jax.planning.targets import parse_target
from tests.support.fake_compiler import TEXT

TARGET = parse_target(topology="v6e-8")
REFUSAL = "exceeds available HBM: Ran out of memory (37.82G) exceeds available HBM (31.25G)."


@pytest.fixture
def request_(tmp_path):
    log = str(tmp_path / "log")
    return Request(
        module="tests.support.fake_compiler",
        target=TARGET,
        config={"arguments": ["a=1"], "log": log},
    )


def _compiles(request):
    try:
        with open(request.config["log"]) as file:
            return len(file.readlines())
    except FileNotFoundError:
        return 0


@pytest.mark.full
def test_the_second_plan_compiles_nothing(request_, tmp_path):
    first, notes = compile_cached(request_, folder=tmp_path)
    assert (first.as_text(), notes, _compiles(request_)) == (TEXT, (), 1)
    second, notes = compile_cached(request_, folder=tmp_path)
    assert second == first
    assert _compiles(request_) == 1
    assert notes[0].startswith("compiled earlier: ")


@pytest.mark.full
def test_without_a_folder_nothing_is_kept(request_):
    compile_cached(request_, folder=None)
    compile_cached(request_, folder=None)
    assert _compiles(request_) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"flags": ("--xla_new=1",)},
        {"config": {"arguments": ["a=2"]}},
        {"target": parse_target(topology="v6e-16")},
        {"identity": {"source": "changed"}},
        {"module": "another"},
        {"profile": "costs {}"},
    ],
)
def test_what_decides_the_program_is_in_the_key(request_, change):
    assert key_of(dataclasses.replace(request_, **change)) != key_of(request_)


def test_versions_and_xlas_environment_are_in_the_key(request_, monkeypatch):
    before = key_of(request_)
    with monkeypatch.context() as patched:
        patched.setenv("XLA_FLAGS", "--xla_new=1")
        assert key_of(request_) != before
    assert key_of(request_) == before
    monkeypatch.setattr(
        "mfu_jax.planning.compilation.child_process.versions", lambda: {"jax": "99"}
    )
    assert key_of(request_) != before
    assert installed_versions(request_.python) == {"jax": "99"}


@pytest.mark.full
def test_a_refusal_is_kept_too(request_, tmp_path):
    request = dataclasses.replace(request_, config={**request_.config, "message": REFUSAL})
    first, _ = compile_cached(request, folder=tmp_path)
    second, _ = compile_cached(request, folder=tmp_path)
    assert isinstance(first, TooLarge)
    assert second == first
    assert _compiles(request) == 1


@pytest.mark.full
def test_what_was_left_out_is_said_again(request_, tmp_path):
    request = dataclasses.replace(request_, flags=("--xla_old=true",))
    compile_cached(request, folder=tmp_path)
    _, notes = compile_cached(request, folder=tmp_path)
    assert notes[0] == "left out, unknown to what is installed: xla_old"


@pytest.mark.full
@pytest.mark.parametrize("suffix", [".json", ".mfu"])
@pytest.mark.parametrize("content", [b"", b"\xff\x00garbage", lzma.compress(b"not a dump")])
def test_a_damaged_entry_is_compiled_again(request_, tmp_path, suffix, content):
    compile_cached(request_, folder=tmp_path)
    (tmp_path / f"{key_of(request_)}{suffix}").write_bytes(content)
    program, notes = compile_cached(request_, folder=tmp_path)
    assert program.as_text() == TEXT
    assert "was damaged" in notes[0]
    assert _compiles(request_) == 2
    assert compile_cached(request_, folder=tmp_path)[1][0].startswith("compiled earlier")


@pytest.mark.full
def test_a_folder_that_cannot_be_written_is_a_note(request_, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    program, notes = compile_cached(request_, folder=blocked / "cache")
    assert program.as_text() == TEXT
    assert notes[0].startswith("not kept in the cache")


@pytest.mark.full
def test_a_refused_program_is_found_again_with_its_schedule(tmp_path):
    config = {"scheduled": True, "message": REFUSAL}
    request = Request(module="tests.support.fake_compiler", target=TARGET, config=config)
    first = compile_cached(request, folder=tmp_path).program
    again = compile_cached(request, folder=tmp_path).program
    assert first == again
    assert again.program.as_text() == first.program.as_text() == TEXT


@pytest.mark.parametrize(
    ("chips", "named"),
    [
        ({"topology": "v6e-8"}, "jax 0.10.2, libtpu 0.0.42.1"),
        ({"hardware": "h100", "devices": 8}, "jax 0.10.2, jax-cuda13-plugin 0.10.2"),
    ],
)
def test_the_compiler_is_named_with_its_versions(chips, named, monkeypatch):
    installed = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1"}
    installed |= {"jax-cuda13-plugin": "0.10.2", "flax": "0.12.0"}
    monkeypatch.setattr(cache, "installed_versions", lambda python: installed)
    assert cache.compiler_of(Request(module="m", target=parse_target(**chips))) == named
