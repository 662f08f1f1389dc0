"""Programs that are counted here are compiled as a user's are, with XLA's own choice of fusions."""

from collections.abc import Iterator
from typing import Any

import pytest
from jax._src import compiler

from tests.support.jax_versions import FASTER_TO_COMPILE


@pytest.fixture(autouse=True, scope="module")
def fusions_of_users() -> Iterator[None]:
    """Of all tests and fixtures of a module, but where a test sets the option itself."""
    compile_options = compiler.get_compile_options
    of_users = {name: not fast for name, fast in FASTER_TO_COMPILE.items()}

    def as_users(*args: Any, env_options_overrides: Any = None, **kwargs: Any) -> Any:
        overrides = of_users | dict(env_options_overrides or {})
        return compile_options(*args, env_options_overrides=overrides, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", as_users)
        yield
