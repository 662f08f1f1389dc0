"""The one YAML reader: safe, fast, errors on one line. Also finds the bundled configs."""

from __future__ import annotations

import functools
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
_DEEPEST_NESTING = 50
# Configs are a few kilobytes; a larger file is something else.
_MOST_BYTES = 2**20
_MOST_NODES = 50_000  # scalars, lists and mappings, counted again for each alias


def read_mapping(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file.

    Raises:
        UserError: the file is missing, unreadable, not YAML, not a mapping, or repeats a key.
    """
    import yaml

    text = read_text(path, "a YAML file of a few KiB", _MOST_BYTES)
    try:
        loader = _loader()(text)
        node = loader.get_single_node()
        _refuse_bombs(node)
        _refuse_repeated_keys(node, path)
        values = None if node is None else loader.construct_document(node)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:
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
            f"unknown model {shown(name)}"
            + (nearest(name, known) or f"; the bundled ones are {', '.join(known)}")
        )
    return path


def model_names() -> list[str]:
    """Names of the bundled architectures."""
    return sorted(p.stem for p in (CONFIG_FOLDER / "models").glob("*.yml"))


@functools.cache
def _loader() -> Any:
    """A safe loader that refuses deep nesting, in C if PyYAML was built with it.

    Composing nodes 50,000 deep overflows the C stack. PyYAML calls these two methods on entering
    and leaving each node, so counting levels needs no second pass over the file.
    """
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):
        depth = 0

        def descend_resolver(self, *_: Any) -> None:
            self.depth += 1
            if self.depth > _DEEPEST_NESTING + 1:  # a scalar is also a node
                raise ValueError(f"it nests more than {_DEEPEST_NESTING} levels")

        def ascend_resolver(self) -> None:
            self.depth -= 1

    return Loader


def _refuse_bombs(node: Any) -> None:
    """Refuses alias bombs: thirty lines can stand for 9³⁰ items, which a merge (``<<``) expands.

    Raises:
        ValueError: too many nodes, or too deep a nesting, once each alias is expanded.
    """
    sizes: dict[int, tuple[int, int]] = {}

    def measure(node: Any) -> tuple[int, int]:
        """Number of nodes and levels from `node` down, including it."""
        if isinstance(node.value, str):
            return 1, 1
        if id(node) not in sizes:
            sizes[id(node)] = _MOST_NODES, 0  # an alias of itself
            parts = [measure(part) for part in _parts(node)]
            nodes = 1 + sum(count for count, _ in parts)
            levels = 1 + max((depth for _, depth in parts), default=0)
            if nodes > _MOST_NODES:
                raise ValueError(f"it stands for more than {_MOST_NODES:,} values")
            if levels > _DEEPEST_NESTING + 1:
                raise ValueError(f"its aliases nest more than {_DEEPEST_NESTING} levels")
            sizes[id(node)] = nodes, levels
        return sizes[id(node)]

    if node is not None:
        measure(node)


def _parts(node: Any) -> list[Any]:
    """The items of a list, the keys and values of a mapping."""
    if node.id == "mapping":
        return [part for pair in node.value for part in pair]
    return list(node.value)


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
