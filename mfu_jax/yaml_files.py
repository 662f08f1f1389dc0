"""The one reader of YAML: safe, fast, errors on one line. Also finds the bundled configs."""

from __future__ import annotations

import functools
import stat
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError, nearest

_PACKAGE = Path(__file__).resolve().parent
# The folder is beside the package in a checkout, inside it in a wheel.
CONFIG_FOLDER = next(
    (f for f in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if (f / "base.yml").exists()),
    _PACKAGE / "configs",
)
_DEEPEST_NESTING = 50
# Configs are a few kilobytes; a larger file is something else.
_LARGEST_FILE_BYTES = 4 * 2**20


def read_config_text(path: Path) -> str:
    """The text of a config file.

    Raises:
        UserError: it is missing, unreadable, not a regular file, or far too large for a config.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UserError(f"{path} is a folder; expected a file")
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file; expected a YAML or JSON file")
        if status.st_size > _LARGEST_FILE_BYTES:
            raise UserError(
                f"{path} has {status.st_size / 2**20:.0f} MiB; a config has a few KiB (is it a "
                f"weights or tokenizer file?)"
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file.

    Raises:
        UserError: the file is missing, unreadable, not YAML, not a mapping, or names a key twice.
    """
    import yaml

    text = read_config_text(path)
    try:
        loader = _loader()(text)
        node = loader.get_single_node()
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
    """The bundled architecture file of `name`.

    Raises:
        UserError: there is none; the nearest name is given.
    """
    path = CONFIG_FOLDER / "models" / f"{name}.yml"
    if Path(name).name != name or not path.exists():
        known = model_names()
        raise UserError(
            f"unknown model {name!r}"
            + (nearest(name, known) or f"; the bundled ones are {', '.join(known)}")
        )
    return path


def model_names() -> list[str]:
    """The bundled architectures."""
    return sorted(p.stem for p in (CONFIG_FOLDER / "models").glob("*.yml"))


@functools.cache
def _loader() -> Any:
    """A safe loader, in C where PyYAML was built with it, that refuses deep nesting.

    Composing nodes 50,000 deep overflows the C stack. PyYAML calls these two methods on the way
    into and out of every node, so that no second pass over the file is needed to count.
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


def _refuse_repeated_keys(node: Any, path: Path) -> None:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue  # not a key of ours; the constructor or the caller refuses it
        if key.value in seen:
            line = key.start_mark.line + 1
            raise UserError(f"{path}, line {line}: {key.value!r} is given twice")
        seen.add(key.value)


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or (str(error).splitlines() or [""])[0][:200]
    return f"line {mark.line + 1}: {problem}" if mark else problem
