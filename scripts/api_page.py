"""The docstrings of every public name, as one page of Markdown.

python -m scripts.api_page > api.md
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import mfu_jax
from mfu_jax.instrumentation.instrumented_step import InstrumentedStep
from mfu_jax.instrumentation.wrapped_step import DisabledStep
from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.loop.phases import Phase, StepScope
from mfu_jax.settings import Settings

HEAD = """# Public names

Generated from the docstrings by `python -m scripts.api_page`. Examples run as tests.
"""
# Classes that users receive but never construct.
RETURNED = (InstrumentedStep, DisabledStep, StepScope, Phase, Settings, LoggerConfig)
MODULES = (mfu_jax.dumps, mfu_jax.flags, mfu_jax.hardware)


def make_api_page() -> str:
    """The whole page."""
    parts = [HEAD]
    names = sorted(set(mfu_jax.__all__) - {module.__name__.split(".")[-1] for module in MODULES})
    for name in names:
        parts += describe(f"mfu_jax.{name}", getattr(mfu_jax, name))
    for module in MODULES:
        parts.append(f"## `{module.__name__}`\n\n{text_of(module)}\n")
        for name, value in vars(module).items():
            where = f"{getattr(value, '__module__', '')}."
            if (
                where.startswith(f"{module.__name__}.")
                and not name.startswith("_")
                and callable(value)
            ):
                parts += describe(f"{module.__name__}.{name}", value, level=3)
    for kind in RETURNED:
        parts += describe(f"{kind.__module__}.{kind.__name__}", kind)
    return "\n".join(parts)


def describe(name: str, value: Any, *, level: int = 2) -> list[str]:
    """Heading, signature, docstring, and the same for the public methods of a class."""
    parts = [f"{'#' * level} `{name}`\n\n```python\n{signature_of(name, value)}\n```\n"]
    parts.append(text_of(value) + "\n")
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if method.startswith("_") or method in value.__dict__.get("__slots__", ()):
                continue
            if isinstance(function, property):
                parts.append(f"**`.{method}`** {text_of(function)}\n")
            elif callable(function) or isinstance(function, staticmethod | classmethod):
                shown = signature_of(method, getattr(value, method))
                parts.append(f"**`.{shown}`** {text_of(function)}\n")
    return parts


def signature_of(name: str, value: Any) -> str:
    """``name(arguments) -> result`` on one line."""
    short = name.split(".")[-1]
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):
        return short
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)
    # A default's repr must not depend on the machine.
    signature = re.sub(r"<(?:function|built-in function) ([\w.]+)[^>]*>", r"\1", signature)
    return short + re.sub(r"<([\w.]+) object at \w+>", "…", signature)


def text_of(value: Any) -> str:
    """The docstring as Markdown; sections and examples become text blocks."""
    first, *rest = (inspect.getdoc(value) or "").split("\n\n")
    blocks = [" ".join(first.split("\n"))]
    for block in rest:
        is_laid_out = block.startswith(("    ", ">>>")) or re.match(r"[A-Z]\w+:\n", block)
        blocks.append(f"```text\n{block}\n```" if is_laid_out else block)
    return "\n\n".join(blocks)


if __name__ == "__main__":
    print(make_api_page())
