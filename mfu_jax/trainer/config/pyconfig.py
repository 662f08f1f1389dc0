"""YAML files and key=value arguments → one validated, frozen `Config`.

``configs/base.yml`` has every key and its default, which gives its type. Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError, nearest
from mfu_jax.settings import MetricsKeys
from mfu_jax.storage.addresses import Address, path_of
from mfu_jax.trainer.config.image_rules import TOWERS
from mfu_jax.trainer.config.keys import base_defaults, key_kinds
from mfu_jax.trainer.config.mesh_axes import own_names
from mfu_jax.trainer.config.messages import as_argument
from mfu_jax.trainer.config.scaling import scaled_down
from mfu_jax.trainer.config.validation import validate
from mfu_jax.util.arguments import own_key, parse
from mfu_jax.util.values import field_types, typed
from mfu_jax.util.yaml_files import CONFIG_FOLDER, model_file, read_mapping

_log = logging.getLogger("mfu_jax")
# Additions to the error about a value.
_HINTS = {"context": "it is a tensor of remat_policy=custom; context_parallelism splits sequences"}
_DECLARED = {field.name for field in dataclasses.fields(MetricsKeys)} - {"convention"}
_Keys: Any = dataclasses.make_dataclass(
    "_Keys", key_kinds(without=_DECLARED).items(), frozen=True, kw_only=True
)


@dataclass(frozen=True, kw_only=True)
class Config(_Keys, MetricsKeys):
    """One training run. ``configs/base.yml`` explains each key and gives its default."""

    def __post_init__(self) -> None:
        validate(self)

    def replace(self, **values: Any) -> Config:
        """A copy with other values of some keys."""
        copy: Config = dataclasses.replace(self, **values)
        return copy

    @property
    def run_directory(self) -> Path | Address:
        """The folder for everything that the run writes."""
        return path_of(self.base_output_directory) / self.run_name

    @property
    def metrics_path(self) -> Path | Address | None:
        """The JSONL file; None: not written."""
        return _auto_path(self.metrics_file, self.run_directory / "metrics.jsonl")

    @property
    def tensorboard_path(self) -> Path | Address | None:
        """The folder of TensorBoard's events; None: not written."""
        return _auto_path(self.tensorboard_dir, self.run_directory / "tensorboard")

    @property
    def profile_path(self) -> Path | Address | None:
        """The folder of device traces; None: not written."""
        return _auto_path(self.profile_dir, self.run_directory / "profile")

    @property
    def heartbeat_path(self) -> Path | Address | None:
        """The heartbeat file; None: not written, as for a run folder in an object store."""
        default = self.run_directory / "heartbeat.json"
        return _auto_path(self.heartbeat_file, "" if isinstance(default, Address) else default)


def load(arguments: Sequence[str] = ()) -> Config:
    """Reads ``[FILE.yml] key=value …`` into a `Config`.

    Without a file, it reads the bundled ``configs/demo.yml``.

    Raises:
        UserError: something is wrong in the files or arguments; the message names the key.

    >>> load(["configs/base.yml", "steps=7", "learning_rate=3e-4"]).steps
    7
    """
    words = parse(arguments)
    overrides = {own_key(key, field_types(Config)): text for key, text in words.pairs}
    path = _config_path(words.one_name("YAML file")) if words.names else CONFIG_FOLDER / "demo.yml"
    values = read_mapping(path)
    if path.resolve().parent == CONFIG_FOLDER.resolve():
        return from_mapping({}, defaults=values, overrides=overrides)
    return from_mapping(values, overrides=overrides, where=str(path))


def from_mapping(
    values: Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    where: str = "config",
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Merges base.yml < `defaults` < model file < `values` < `overrides`.

    Args:
        values: a user's own file. If it copies base.yml, only differences from base.yml count.
        overrides: keys from the command line.
        where: the file's name, for messages.
        defaults: a bundled file, whose sizes yield to those of a named model.

    Raises:
        UserError: a key is unknown, a value is wrong, or a size contradicts the named model.
    """
    base = base_defaults()
    values, overrides = own_names(values, where), own_names(overrides or {}, "command line")
    for source, name in ((values, where), (overrides, "command line")):
        for key in source:
            if key not in base:
                hint = nearest(key, base) or "configs/base.yml lists them all"
                raise UserError(f"{name}: unknown key {key!r}", hint=hint)
    model_name = str(overrides.get("model_name", values.get("model_name", "")))
    chosen = {**base, **values, **overrides}
    sees, scale = (_typed(key, chosen[key]) for key in ("images_per_sequence", "scale"))
    model = _model_values(model_name, base, sees=bool(sees)) if model_name else {}
    if scale == "tiny":
        if not model:
            raise UserError(
                "scale=tiny scales a named model",
                hint="give model_name, as in llama3-8b",
            )
        model = scaled_down(model)
    own = _own_values(values, model, base)
    given = {**own, **overrides}
    if not _typed("override_model_config", given.get("override_model_config", False)):
        remaining = {key: value for key, value in own.items() if key not in overrides}
        _refuse_contradictions(remaining, where, model_name, model)
        _refuse_contradictions(overrides, "command line", model_name, model)
    merged = {**base, **(defaults or {}), **model, **given}
    return Config(**{key: _typed(key, value) for key, value in merged.items()})


def _own_values(
    values: Mapping[str, Any], model: Mapping[str, Any], base: Mapping[str, Any]
) -> dict[str, Any]:
    """What a user's file chooses; in a copy of base.yml, only what differs from it.

    A file that gives every size of the model counts as such a copy; in any other file, a value
    equal to the default was chosen.
    """
    is_copy = model.keys() <= values.keys()
    return {k: v for k, v in values.items() if v != base[k] or not is_copy}


def _refuse_contradictions(
    given: Mapping[str, Any], where: str, model_name: str, model: Mapping[str, Any]
) -> None:
    """Refuses a size that contradicts the named model's."""
    for key in (key for key in model if key in given):
        wanted, has = _typed(key, given[key]), _typed(key, model[key])
        if wanted != has:
            raise UserError(
                f"{where}: {key}={as_argument(wanted)} contradicts model_name={model_name}, "
                f"which has {key}={as_argument(has)}",
                hint="leave it out, or set override_model_config=true",
            )


def _typed(key: str, value: Any) -> Any:
    return typed(key, value, field_types(Config)[key], hint=_HINTS.get(key, ""))


def _model_values(name: str, base: Mapping[str, Any], *, sees: bool) -> Mapping[str, Any]:
    """The sizes of a bundled model, without those of towers that are not built."""
    values = read_mapping(model_file(name))
    sees = sees and values.get("decoder_block") in TOWERS
    text = {key: value for key, value in values.items() if sees or not _is_of_tower(key)}
    foreign = [key for key in text if key not in base]
    blocks = typing.get_args(field_types(Config)["decoder_block"])
    if text.get("decoder_block", "default") not in blocks:
        foreign.insert(0, f"decoder_block={text['decoder_block']}")
    if foreign:
        raise UserError(
            f"model_name {name!r} needs {', '.join(foreign)}, which the reference trainer does not "
            f"build (its blocks are {', '.join(blocks)})",
            hint=f"mfu-jax flops {name} counts it",
        )
    if len(text) < len(values):
        has_tower = values.get("decoder_block") in TOWERS
        more = "; images_per_sequence=1 adds its tower" if has_tower else ""
        _log.info("%s: its text model is trained, without its towers%s", name, more)
    return text


def _is_of_tower(key: str) -> bool:
    """Whether a key is about images or sound."""
    return key.endswith(("_for_vit", "_for_audio")) or key in ("use_multimodal", "use_audio")


def _config_path(text: str) -> Path:
    """The file itself, or the bundled file of that name (``configs/base.yml`` in a wheel)."""
    path = Path(text)
    bundled = CONFIG_FOLDER / path.name
    exists = os.path.exists  # unlike Path.exists, False for a name that is too long
    if not exists(path) and path.parent.name in ("", "configs") and exists(bundled):
        return bundled
    return path


def _auto_path(setting: str, default: Path | Address | str) -> Path | Address | None:
    chosen = default if setting == "auto" else setting
    return path_of(chosen) if chosen else None
