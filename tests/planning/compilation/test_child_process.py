"""A checkout of MaxText on PYTHONPATH, as another interpreter sees it."""

import sys

import pytest

from mfu_jax.errors import UserError
from mfu_jax.planning.compilation.cache import installed_versions
from mfu_jax.planning.compilation.compiling import Request, compile_program
from mfu_jax.planning.targets import parse_target


@pytest.fixture
def other_python(tmp_path):
    """The same interpreter under another name, which is how plans tell them apart."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    return str(link)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    package = tmp_path / "checkout" / "maxtext"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "base.yml").write_text("a: 1")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return package


@pytest.mark.full
def test_a_checkout_is_known_by_its_files(other_python, checkout):
    before = installed_versions(other_python)["maxtext source"]
    assert installed_versions(other_python)["maxtext source"] == before
    (checkout / "base.yml").write_text("a: 2")
    changed = installed_versions(other_python)["maxtext source"]
    assert changed != before
    (checkout / "base.yml").rename(checkout / "other.yml")
    assert installed_versions(other_python)["maxtext source"] not in (before, changed)


@pytest.mark.full
def test_what_pip_copied_is_known_by_its_version(other_python, checkout, monkeypatch):
    copied = checkout.parent / "site-packages"
    copied.mkdir()
    checkout.rename(copied / "maxtext")
    monkeypatch.setenv("PYTHONPATH", str(copied))
    assert "maxtext source" not in installed_versions(other_python)


@pytest.mark.full
def test_the_compiling_module_imports_the_checkout(other_python, checkout):
    (checkout / "__init__.py").write_text("raise SystemExit('the checkout was imported')")
    request = Request(
        module="mfu_jax.planning.compilation.maxtext_step",
        python=other_python,
        target=parse_target(topology="v6e-8"),
        config={"arguments": []},
    )
    with pytest.raises(UserError, match="the checkout was imported"):
        compile_program(request)
