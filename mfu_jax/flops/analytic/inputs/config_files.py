"""Reads a model's name, a MaxText YAML or a Hugging Face config.json into a mapping."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError, first_line, nearest
from mfu_jax.util.user_files import read_text
from mfu_jax.util.values import shown
from mfu_jax.util.yaml_files import model_file, model_names, read_mapping

_MOST_BYTES = 4 * 2**20  # a config.json may name each of a million labels


def read_source(source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The mapping behind a name or path, and the values added by its ``base_config``.

    Raises:
        UserError: the file is not found, not readable, or not a mapping.
    """
    path = Path(source)
    try:
        if path.is_dir():
            path = path / "config.json"
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {shown(source)}: {first_line(error)[:80]}") from None
    if not (path.suffix in (".yml", ".yaml", ".json") or exists or "/" in source):
        return read_mapping(model_file(source)), {}
    if not exists:
        raise UserError(
            f"no such file: {path}; expected a file, or a bundled model's name",
            hint=nearest(path.stem, model_names()),
        )
    if path.suffix == ".json":
        return _read_json(path), {}
    values = read_mapping(path)
    return values, _inherited(path, values.pop("base_config", None))


def _inherited(path: Path, parent: Any) -> dict[str, Any]:
    """The values of a MaxText YAML's chain of ``base_config`` files.

    A name is relative to the file's own folder or a parent of it (MaxText: its configs folder).
    MaxText's ``base.yml`` may be missing: its defaults are built in.
    """
    seen = {path.resolve()}
    values: dict[str, Any] = {}
    while isinstance(parent, str):
        beside = (folder / parent for folder in path.resolve().parents)
        found = next((file for file in beside if os.path.isfile(file)), None)
        if found is None and Path(parent).name == "base.yml":
            break
        if found is None:
            raise UserError(
                f"{path}: base_config={shown(parent)} is not found beside the file or above it"
            )
        path = found
        if path.resolve() in seen:
            raise UserError(
                f"{path} is its own base_config",
                hint="leave one of the two out",
            )
        seen.add(path.resolve())
        more = read_mapping(path)
        parent = more.pop("base_config", None)
        values = with_defaults(values, more)
    return values


def with_defaults(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`values`, plus those of `defaults` that they do not set, with or without ``base_``."""
    given = {key.removeprefix("base_") for key in values}
    return {
        **{k: v for k, v in defaults.items() if k.removeprefix("base_") not in given},
        **values,
    }


def model_name_of(source: str) -> str:
    """A model's name from a path: the file's, or for a config.json its folder's."""
    path = Path(source)
    if path.name == "config.json":
        return path.resolve().parent.name
    return path.stem if path.suffix in (".yml", ".yaml", ".json") else path.name


def _read_json(path: Path) -> dict[str, Any]:
    import json  # most models are bundled or in YAML, and need no json

    text = read_text(path, "a JSON file of a few KiB", _MOST_BYTES)
    try:
        values = json.loads(text, object_pairs_hook=_once_each)
    except UserError as error:
        raise UserError(f"{path}: {error.what}", hint=error.hint) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not usable JSON: {first_line(error)}") from None
    if not isinstance(values, dict):
        kind = "null" if values is None else f"a {type(values).__name__}"
        raise UserError(f"{path}: expected a JSON object, got {kind}")
    if "model_type" not in values:
        raise UserError(
            f"{path} has no model_type, which says what its other fields mean; every Hugging Face "
            "config.json has one",
            hint="usually another file of the model, such as its tokenizer's; pass its config.json",
        )
    return values


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, which must not repeat a key."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UserError(
            f"{shown(twice)} is given twice",
            hint="leave one of the two out",
        )
    return values
