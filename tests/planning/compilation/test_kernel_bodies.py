"""Kernels of a newer jaxlib are rewritten for this one: here, this one's for an older one."""

import base64
import re
import shlex
import sys

import pytest

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.planning.compilation import kernel_bodies
from mfu_jax.planning.compilation.kernel_bodies import in_own_form, rewritten, written_version
from tests.support import program_kernel_bodies as programs
from tests.support.jax_versions import reads_recorded_kernels
from tests.support.recorded import text_of

pytestmark = reads_recorded_kernels
OLDER = 12  # recorded are 14 and newer


@pytest.fixture
def other_python(tmp_path):
    """Another interpreter, as far as a path can tell."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    script.chmod(0o755)
    return str(script)


def _bodies(text):
    return [base64.b64decode(body) for body in re.findall(r'"body":\s*"([^"]+)"', text)]


@pytest.mark.full
def test_an_older_form_is_another_text_with_the_same_flops(other_python, monkeypatch):
    text = text_of("v5e_misnamed")
    monkeypatch.setattr(kernel_bodies, "written_version", lambda: OLDER)
    older = in_own_form(ProgramDump(text=text), other_python).text
    assert len(_bodies(older)) == len(_bodies(text)) > 0
    assert not set(_bodies(older)) & set(_bodies(text))
    executed = executed_flops(older)
    assert (executed.total, executed.unaccounted) == (6 * 2 * programs.SIZE**3, ())


@pytest.mark.full
def test_what_this_one_reads_stays_as_it_is(other_python):
    program = ProgramDump(text=text_of("v5e_misnamed"))
    assert in_own_form(program, other_python) == program
    assert in_own_form(program, sys.executable) is program


@pytest.mark.full
@pytest.mark.parametrize("python", ["/no/such/python", "/bin/false"])
def test_an_interpreter_that_cannot_rewrite_leaves_them(python, monkeypatch):
    monkeypatch.setattr(kernel_bodies, "written_version", lambda: OLDER)
    program = ProgramDump(text=text_of("v5e_misnamed"))
    assert in_own_form(program, python) is program


def test_a_jaxlib_without_the_pass_leaves_them(other_python, monkeypatch):
    def lacks():
        raise KeyError("stable_mosaic.version")

    monkeypatch.setattr(kernel_bodies, "written_version", lacks)
    program = ProgramDump(text=text_of("v5e_misnamed"))
    assert in_own_form(program, other_python) is program


@pytest.mark.parametrize("body", [b"ML\xefR damaged", b"module {}", b"\xff\xfe"])
def test_bodies_that_cannot_be_read_stay(body):
    text = f'x = custom-call(), backend_config={{"body":"{base64.b64encode(body).decode()}"}}'
    assert rewritten(text, written_version()) == text
