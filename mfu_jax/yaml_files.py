"""Reads YAML mappings, safely and with errors that fit on one line; finds the bundled ones."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError, nearest

_PACKAGE = Path(__file__).resolve().parent
# In a checkout the folder stands beside the package, in a wheel inside it.
CONFIG_FOLDER = next(
    (f for f in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if (f / "base.yml").exists()),
    _PACKAGE / "configs",
)
_DEEPEST_NESTING = 50
# Configs are a few kilobytes; what is larger is something else.
_LARGEST_FILE_BYTES = 4 * 2**20


def read_config_text(path: Path) -> str:
    """The text of a config file.

    Raises:
        UserError: it is missing, unreadable, no regular file, or far too large for a config.
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
        UserError: the file is missing, unreadable, no YAML, no mapping, or names a key twice.
    """
    import yaml

    text = read_config_text(path)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _refuse_deep_nesting(yaml.parse(text, Loader=loader), path)
        _refuse_repeated_keys(yaml.compose(text, Loader=loader), path)
        values = yaml.load(text, Loader=loader)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(f"{path} is not plain YAML: {_one_line(error)}") from None
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


def _refuse_deep_nesting(events: Iterable[Any], path: Path) -> None:
    """Counts in the stream of events: building nodes 50,000 deep overflows the C stack."""
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind in ("MappingStartEvent", "SequenceStartEvent")
        depth -= kind in ("MappingEndEvent", "SequenceEndEvent")
        if depth > _DEEPEST_NESTING:
            raise UserError(
                f"{path} nests more than {_DEEPEST_NESTING} levels; expected `key: value` lines; "
                f"usually it is no config; pass one"
            )


def _refuse_repeated_keys(node: Any, path: Path) -> None:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, _ in node.value:
        if key.value in seen:
            line = key.start_mark.line + 1
            raise UserError(f"{path}, line {line}: {key.value!r} is given twice")
        seen.add(key.value)


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or (str(error).splitlines() or [""])[0][:200]
    return f"line {mark.line + 1}: {problem}" if mark else problem
