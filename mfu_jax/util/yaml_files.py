"""The one YAML reader: safe, fast, errors on one line. Also finds the bundled configs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError, nearest
from mfu_jax.util.user_files import read_text
from mfu_jax.util.values import shown

_PACKAGE = Path(__file__).resolve().parents[1]
# Beside the package in a checkout, inside it in a wheel.
CONFIG_FOLDER = next(
    (f for f in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if (f / "base.yml").exists()),
    _PACKAGE / "configs",
)
# Configs are a few kilobytes; a larger file is something else.
_MOST_BYTES = 2**20


def read_mapping(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file.

    Raises:
        UserError: the file is missing, unreadable, not YAML, not a mapping, or repeats a key.
    """
    import yaml

    text = read_text(path, "a YAML file of a few KiB", _MOST_BYTES)
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        node = loader.get_single_node()
        _refuse_repeated_keys(node, path)
        values = None if node is None else loader.construct_document(node)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} is not plain YAML: {_one_line(error)}") from None
    except (KeyError, IndexError, AttributeError) as error:  # PyYAML's, for !!bool x, !!int ""
        raise UserError(
            f"{path} is not plain YAML: a tag does not fit its value ({error})"
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path}: expected `key: value` lines, got a {type(values).__name__}")
    return values


def model_file(name: str) -> Path:
    """The bundled architecture file for `name`.

    Raises:
        UserError: there is none; the message suggests the nearest name.
    """
    path = CONFIG_FOLDER / "models" / f"{name}.yml"
    if Path(name).name != name or not os.path.isfile(path):  # Path.is_file raises for a long name
        known = model_names()
        raise UserError(
            f"unknown model {shown(name)}",
            hint=nearest(name, known) or f"the bundled ones are {', '.join(known)}",
        )
    return path


def model_names() -> list[str]:
    """Names of the bundled architectures."""
    return sorted(p.stem for p in (CONFIG_FOLDER / "models").glob("*.yml"))


def _refuse_repeated_keys(node: Any, path: Path) -> None:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue  # not one of our keys; the constructor or the caller refuses it
        if key.value in seen:
            line = key.start_mark.line + 1
            raise UserError(f"{path}, line {line}: {key.value!r} is given twice")
        seen.add(key.value)


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or (str(error).splitlines() or [""])[0][:200]
    return f"line {mark.line + 1}: {problem}" if mark else problem
