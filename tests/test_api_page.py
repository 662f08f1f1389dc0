"""docs/api.md says what the docstrings say."""

from __future__ import annotations

import importlib.util
from typing import Any

import mfu_jax
from tests.support.paths import SCRIPTS


def generator() -> Any:
    path = SCRIPTS / "make_api_page.py"
    spec = importlib.util.spec_from_file_location("make_api_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    module = generator()
    page = module.PAGE.read_text(encoding="utf-8")
    assert page == module.make_page(), "run python scripts/make_api_page.py"


def test_every_public_name_has_a_docstring_on_the_page() -> None:
    page = generator().PAGE.read_text(encoding="utf-8")
    for name in mfu_jax.__all__:
        assert f"`mfu_jax.{name}`" in page
        assert getattr(mfu_jax, name).__doc__
