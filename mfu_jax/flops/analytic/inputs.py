"""A model's name or file → `ModelShape`: bundled names, MaxText YAML, Hugging Face config.json."""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.huggingface import from_hf_config
from mfu_jax.flops.analytic.shapes.fields import parse_value, shown
from mfu_jax.flops.analytic.shapes.model import ModelShape
from mfu_jax.flops.analytic.training import training_model
from mfu_jax.yaml_files import model_file, model_names, read_config_text, read_mapping

# MaxText's base.yml (e591f30): what its model files leave out. The sizes that every model has are
# not here: a file without them is an error, not a model of MaxText's default size.
_MAXTEXT_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "indexer_n_heads": 64,
    "indexer_head_dim": 128,
    "indexer_topk": 2048,
    "gdn_num_key_heads": 16,
    "gdn_num_value_heads": 32,
    "gdn_key_head_dim": 128,
    "gdn_value_head_dim": 128,
    "gdn_conv_kernel_dim": 4,
    "engram_num_heads": 8,
    "engram_head_dim": 1280,
    "engram_max_ngram_size": 3,
    "engram_kernel_size": 4,
}

# Which exponent of global_parameter_scale a size grows with: heads and MLP first, then the width,
# then the layers, each doubling in turn.
_SCALED = {
    "base_emb_dim": "width",
    "base_num_query_heads": "heads",
    "base_num_kv_heads": "heads",
    "base_mlp_dim": "heads",
    "base_moe_mlp_dim": "heads",
    "base_num_decoder_layers": "layers",
}


def shape_of(config: Any) -> ModelShape:
    """`config` as a shape: a `ModelShape`, a mapping, a bundled model's name or a file, a
    configuration object of transformers, or an object with MaxText's field names.

    A mapping, name or file is what `load_shape` takes: resolved or ``base_*`` names, or a
    ``config.json``. Fields that are not about the architecture or the step are ignored.

    Raises:
        UserError: a field is missing, of the wrong type, or out of range.
    """
    if isinstance(config, ModelShape):
        return config
    if isinstance(config, Mapping | str | PurePath):
        return load_shape(config)
    if callable(to_dict := _attribute(config, "to_dict")) and _attribute(config, "model_type"):
        return shape_of(to_dict())  # a configuration object of transformers
    values = {
        name: value
        for name in ModelShape.field_names()
        if (value := _attribute(config, name)) is not None
    }
    return ModelShape.made(values, f"a {type(config).__name__}")


def _attribute(config: Any, name: str) -> Any:
    """None where there is none; configs of older MaxText raise what their mapping raises."""
    try:
        return getattr(config, name, None)
    except (KeyError, ValueError):
        return None


def load_shape(source: Any, overrides: Mapping[str, Any] | None = None) -> ModelShape:
    """The shape that `source` names, with `overrides` (field → value) over it.

    Args:
        source: a bundled model's name, the path of a MaxText model YAML or of a config.json (or of
            its folder), a mapping with the content of either, or an object with MaxText's field
            names.
        overrides: fields of `ModelShape` or MaxText's ``base_*`` names; they win over the source.

    Raises:
        UserError: the source is not found, not readable or not understood, or a field is wrong.

    Warns:
        UserWarning: an override changes nothing, because this model has no such part.

    >>> load_shape("llama3-8b", {"num_decoder_layers": 2}).num_decoder_layers
    2
    """
    overrides = dict(overrides or {})
    shape = _loaded(source, overrides)
    for key in overrides:
        if key not in _OF_THE_STEP and not _changes(key, source, overrides, shape):
            warnings.warn(
                f"{key}={shown(overrides[key])} changes nothing: a model with decoder_block="
                f"{shape.decoder_block!r} and its other fields has no such part",
                stacklevel=2,
            )
    return shape


_OF_THE_STEP = frozenset(
    {
        *("model_name", "override_model_config", "per_device_batch_size", "max_target_length"),
        *("gradient_accumulation_steps", "use_multimodal", "use_audio"),
        "make_vocab_size_divisible_by",
    }
)


def _changes(key: str, source: Any, overrides: dict[str, Any], shape: ModelShape) -> bool:
    """Whether the model would be another one, or none, without this override.

    An override that says what is so anyway is none that goes unheard.
    """
    try:
        without = _loaded(source, {k: v for k, v in overrides.items() if k != key})
        return without == shape or training_model(without) != training_model(shape)
    except UserError:
        return True


def _loaded(source: Any, overrides: dict[str, Any]) -> ModelShape:
    inherited: dict[str, Any] = {}
    if isinstance(source, str | Path):
        values, inherited = _read(str(source))
        values.setdefault("model_name", _stem(str(source)))
    elif isinstance(source, Mapping):
        values = dict(source)
    else:
        shape = shape_of(source)
        return shape.replace(**_known(overrides, type(shape))) if overrides else shape
    if "model_type" in values or "architectures" in values:
        return _from_hugging_face(values, overrides)
    values = _under(_with_named_model(values), inherited)
    if "global_parameter_scale" in overrides and not any(key in values for key in _SCALED):
        values = _as_base(values)
    for key in overrides:
        values.pop(_other_spelling(key), None)
    return _from_maxtext({**values, **overrides}, overrides)


def _from_hugging_face(values: dict[str, Any], overrides: dict[str, Any]) -> ModelShape:
    name = values.pop("model_name", "")
    shape = from_hf_config(values)
    changes = {"model_name": shape.model_name or name, **_known(overrides, type(shape))}
    return shape.replace(**changes)


def _read(source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The mapping that a name or path stands for, and what its ``base_config`` says beside it."""
    path = Path(source)
    try:
        if path.is_dir():
            path = path / "config.json"
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {source[:80]!r}: {_first_line(error)[:80]}") from None
    if not (path.suffix in (".yml", ".yaml", ".json") or exists or "/" in source):
        return read_mapping(model_file(source)), {}
    if not exists:
        raise UserError(
            f"no such file: {path}; expected a file, or a bundled model's name"
            f"{nearest(path.stem, model_names())}"
        )
    if path.suffix == ".json":
        return _read_json(path), {}
    values = read_mapping(path)
    return values, _inherited(path, values.pop("base_config", None))


def _inherited(path: Path, parent: Any) -> dict[str, Any]:
    """What the files that a MaxText YAML names as its ``base_config``, one after another, say.

    A name is relative to the file's own folder or to one above it (MaxText: its configs folder).
    MaxText's ``base.yml`` is often not at hand: its defaults are known.
    """
    seen = {path.resolve()}
    values: dict[str, Any] = {}
    while isinstance(parent, str):
        found = next((f for f in (d / parent for d in path.resolve().parents) if f.is_file()), None)
        if found is None and Path(parent).name == "base.yml":
            break
        if found is None:
            raise UserError(
                f"{path}: base_config={shown(parent)} is not found beside the file or above it"
            )
        path = found
        if path.resolve() in seen:
            raise UserError(f"{path} is its own base_config; leave one of the two out")
        seen.add(path.resolve())
        more = read_mapping(path)
        parent = more.pop("base_config", None)
        values = _under(values, more)
    return values


def _under(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`values`, and those of `defaults` that they say nothing about, in either spelling."""
    said = {key.removeprefix("base_") for key in values}
    return {
        **{k: v for k, v in defaults.items() if k.removeprefix("base_") not in said},
        **values,
    }


def _as_base(values: dict[str, Any]) -> dict[str, Any]:
    """Resolved sizes as the ``base_*`` sizes that a scale multiplies."""
    return {f"base_{k}" if f"base_{k}" in _SCALED else k: v for k, v in values.items()}


def _stem(source: str) -> str:
    path = Path(source)
    return (
        path.resolve().parent.name
        if path.name == "config.json"
        else path.stem
        if (path.suffix in (".yml", ".yaml", ".json"))
        else path.name
    )


def _read_json(path: Path) -> dict[str, Any]:
    text = read_config_text(path)
    try:
        values = json.loads(text, object_pairs_hook=_once_each)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no usable JSON: {_first_line(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object, got a {type(values).__name__}")
    if "model_type" not in values:
        raise UserError(
            f"{path} has no model_type, which says what its other fields mean; every Hugging Face "
            f"config.json has one (is this the model's own config?)"
        )
    return values


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UserError(f"{shown(twice)} is given twice; leave one of the two out")
    return values


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _with_named_model(values: dict[str, Any]) -> dict[str, Any]:
    """Merges the bundled model that a training YAML names, under MaxText's override rule.

    A key that the file and the model file both set must agree, unless ``override_model_config``.
    """
    name = values.get("model_name")
    name = name.replace("-Instruct", "") if isinstance(name, str) else ""
    if "num_decoder_layers" in values or name not in model_names():
        return values
    model = read_mapping(model_file(name))
    if "decoder_block" in values and "vocab_size" in values:
        return values  # a model file of its own that happens to have a bundled name
    own = dict(values)
    for key, value in values.items():
        resolved = key.removeprefix("base_")
        if resolved in model and model[resolved] != value:
            if not values.get("override_model_config"):
                raise UserError(
                    f"{key}={shown(value)} contradicts model_name {name!r}, which has "
                    f"{shown(model[resolved])}; set override_model_config: true to let it win"
                )
            del model[resolved]
    return {**(_as_base(model) if "global_parameter_scale" in own else model), **own}


def _other_spelling(key: str) -> str:
    """``emb_dim`` replaces ``base_emb_dim``, and the other way round."""
    return key.removeprefix("base_") if key.startswith("base_") else f"base_{key}"


def _from_maxtext(values: dict[str, Any], overrides: dict[str, Any]) -> ModelShape:
    """Resolved names as they are; ``base_*`` names scaled by ``global_parameter_scale``."""
    resolved = {k: v for k, v in values.items() if not k.startswith("base_")}
    base = {k: v for k, v in values.items() if k in _SCALED}
    if base:
        exponents = _scale_exponents(values.get("global_parameter_scale", 1))
        for key, kind in _SCALED.items():
            if key not in base:
                continue
            field, value = key.removeprefix("base_"), base[key]
            if not isinstance(value, int) or isinstance(value, bool):
                raise UserError(f"{key}={shown(value)}: expected a whole number")
            scaled = value << exponents[kind] if value > 0 else value
            if resolved.setdefault(field, scaled) != scaled:
                raise UserError(
                    f"{key} gives {field}={scaled}, but the file also says {field}="
                    f"{shown(resolved[field])}; leave one of the two out"
                )
        resolved = {**_MAXTEXT_DEFAULTS, **resolved}
    if missing := [f for f in ("vocab_size", "num_decoder_layers", "emb_dim") if f not in resolved]:
        names = [f"base_{f}" if f"base_{f}" in _SCALED else f for f in missing]
        raise UserError(
            f"the config has no {', '.join(names)}; expected MaxText's fields (base_emb_dim, "
            f"vocab_size, …); give it as key=value"
        )
    fields = ModelShape.field_names()
    _refuse_misspelt(values, [field for field in fields if field not in resolved])
    known = {field: resolved[field] for field in fields if field in resolved}
    _known({k: v for k, v in overrides.items() if k not in _EXTRA_KEYS}, ModelShape)
    return ModelShape.from_mapping(known)


# How alike a key must be to an absent field to be taken for that field, misspelt.
_MISSPELT = 0.9


def _refuse_misspelt(values: Mapping[str, Any], absent: list[str]) -> None:
    """Most keys of a config are of no use here; one that almost names an absent field is a slip."""
    for key in values:
        if key in ModelShape.field_names() or key in _EXTRA_KEYS:
            continue
        slips = difflib.get_close_matches(key.removeprefix("base_"), absent, n=1, cutoff=_MISSPELT)
        if slips:
            raise UserError(f"unknown key {key!r}; did you mean {slips[0]!r}?")


_EXTRA_KEYS = frozenset({*_SCALED, "global_parameter_scale", "override_model_config"})


def override_keys() -> list[str]:
    """Every key that may follow a model's name on the command line."""
    return [*ModelShape.field_names(), *sorted(_EXTRA_KEYS)]


def parse_override(key: str, text: str) -> Any:
    """``key=text`` of a command line, in the type of the field.

    Raises:
        UserError: naming the nearest key, or the type that was expected.
    """
    if key in _EXTRA_KEYS:
        kind = "bool" if key == "override_model_config" else "int"
        return parse_value(key, kind, text)
    kinds = ModelShape.field_kinds()
    if key not in kinds:
        raise UserError(f"unknown key {key!r}{nearest(key, override_keys())}")
    return parse_value(key, kinds[key], text)


def _known(overrides: Mapping[str, Any], shape: type[ModelShape]) -> dict[str, Any]:
    names = shape.field_names()
    for key in overrides:
        if key not in names:
            raise UserError(f"unknown key {key!r}{nearest(key, override_keys())}")
    return dict(overrides)


def _scale_exponents(scale: Any) -> dict[str, int]:
    """Powers of two for each kind of size: a scale of 2, 4, 8 doubles heads, width, layers in turn.

    >>> _scale_exponents(4)
    {'width': 1, 'heads': 1, 'layers': 0}
    """
    whole = isinstance(scale, int) and not isinstance(scale, bool)
    if not whole or scale < 1 or scale & (scale - 1) or scale > 2**30:
        raise UserError(
            f"global_parameter_scale={shown(scale)}: expected a power of two (1, 2, 4, …)"
        )
    cycles, rest = divmod(scale.bit_length() - 1, 3)
    return {"width": cycles + (rest > 1), "heads": cycles + (rest > 0), "layers": cycles}
