"""YAML files and key=value arguments → one validated, frozen `Config`.

Only ``configs/base.yml`` holds defaults; this module knows the type of every key and the rules
between them. Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mfu_jax.arguments import parse
from mfu_jax.errors import UserError, nearest
from mfu_jax.storage.addresses import Address, check_path, path_of
from mfu_jax.values import field_types, shown, typed
from mfu_jax.yaml_files import CONFIG_FOLDER, model_file, read_mapping

REMAT_NAMES = (
    "query_proj",
    "key_proj",
    "value_proj",
    "context",
    "out_proj",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
)
DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run. ``configs/base.yml`` explains each key and gives its default."""

    run_name: str
    base_output_directory: str
    steps: int
    seed: int

    model_name: str
    override_model_config: bool
    decoder_block: Literal["llama2", "mistral", "gpt2", "gpt3", "default"]
    vocab_size: int
    num_decoder_layers: int
    emb_dim: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    mlp_activations: tuple[str, ...]
    normalization: Literal["rmsnorm", "layernorm", "auto"]
    position_embedding: Literal["rope", "learned", "auto"]
    trainable_position_size: int
    rope_max_timescale: int
    normalization_layer_epsilon: float
    logits_via_embedding: bool
    use_bias: bool

    attention: Literal["auto", "dot_product", "jax", "cudnn_flash", "flash", "splash"]
    scan_layers: bool
    remat_policy: Literal["none", "minimal", "full", "names"]
    remat_save_names: tuple[str, ...]
    dtype: DType
    weight_dtype: DType

    dataset_type: Literal["text", "synthetic"]
    dataset_path: str
    dataset_suffixes: tuple[str, ...]
    eval_fraction: float
    max_target_length: int
    per_device_batch_size: float

    learning_rate: float
    warmup_steps_fraction: float
    cosine_learning_rate_final_fraction: float
    adam_b1: float
    adam_b2: float
    adam_weight_decay: float
    gradient_clipping_threshold: float
    gradient_accumulation_steps: int

    eval_interval: int
    eval_steps: int

    data: int
    fsdp: int
    tensor: int
    distributed: bool
    coordinator_address: str
    num_processes: int
    process_id: int
    heartbeat_timeout_seconds: int

    enable_checkpointing: bool
    checkpoint_period: int
    checkpoints_to_keep: int
    on_checkpoint_error: Literal["warn", "stop"]

    metrics_file: str
    tensorboard_dir: str
    fsync_seconds: float
    write_period_seconds: float
    heartbeat_file: str
    hang_factor: float
    hang_seconds: float
    profile_steps: str
    profile_dir: str
    dump_program: str
    log_period: int
    warmup_steps: int
    convention: Literal["maxtext", "exact", "dense"]
    hardware: str
    peak_tflops_per_device: float
    abort_on_nan_loss: bool
    abort_on_inf_loss: bool
    progress_bar: bool

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def run_directory(self) -> Path | Address:
        """The folder of everything that the run writes."""
        return path_of(self.base_output_directory) / self.run_name

    @property
    def metrics_path(self) -> Path | Address | None:
        """The JSONL file; None: none is written."""
        return _auto_path(self.metrics_file, self.run_directory / "metrics.jsonl")

    @property
    def tensorboard_path(self) -> Path | Address | None:
        """The folder of TensorBoard's events; None: none are written."""
        return _auto_path(self.tensorboard_dir, self.run_directory / "tensorboard")

    @property
    def profile_path(self) -> Path | Address | None:
        """The folder of device traces; None: none are written."""
        return _auto_path(self.profile_dir, self.run_directory / "profile")

    @property
    def heartbeat_path(self) -> Path | Address | None:
        """The heartbeat; None: none is written, as beside an object store's run folder."""
        default = self.run_directory / "heartbeat.json"
        return _auto_path(self.heartbeat_file, "" if isinstance(default, Address) else default)


def load(arguments: Sequence[str] = ()) -> Config:
    """Reads ``[FILE.yml] key=value …`` into a `Config`.

    Without a file it reads the bundled ``configs/demo.yml``.

    Raises:
        UserError: something is wrong in the files or arguments; the message names the key.

    >>> load(["configs/base.yml", "steps=7", "learning_rate=3e-4"]).steps
    7
    """
    words = parse(arguments)
    path = _config_path(words.one_name("YAML file")) if words.names else CONFIG_FOLDER / "demo.yml"
    values = read_mapping(path)
    if path.resolve().parent == CONFIG_FOLDER:
        return from_mapping({}, defaults=values, overrides=words.values)
    return from_mapping(values, overrides=words.values, where=str(path))


def from_mapping(
    values: Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    where: str = "config",
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Merges base.yml < `defaults` < model file < `values` < `overrides`.

    Args:
        values: a user's own file. In a copy of base.yml only what differs from base.yml counts.
        overrides: keys of the command line.
        where: the file's name, for messages.
        defaults: a bundled file, whose sizes give way to those of a named model.

    Raises:
        UserError: a key is unknown, a value is wrong, or a size contradicts the named model.
    """
    base = base_defaults()
    overrides = overrides or {}
    for source, name in ((values, where), (overrides, "command line")):
        for key in source:
            if key not in base:
                hint = nearest(key, base) or "; configs/base.yml lists them all"
                raise UserError(f"{name}: unknown key {key!r}{hint}")
    model_name = str(overrides.get("model_name", values.get("model_name", "")))
    model = _model_values(model_name, base) if model_name else {}
    own = _own_values(values, model, base)
    given = {**own, **overrides}
    kinds = field_types(Config)
    may_override = typed("override_model_config", given.get("override_model_config", False), bool)
    if not may_override:
        remaining = {key: value for key, value in own.items() if key not in overrides}
        _refuse_contradictions(remaining, where, model_name, model)
        _refuse_contradictions(overrides, "command line", model_name, model)
    merged = {**base, **(defaults or {}), **model, **given}
    return Config(**{key: typed(key, value, kinds[key]) for key, value in merged.items()})


def _own_values(
    values: Mapping[str, Any], model: Mapping[str, Any], base: Mapping[str, Any]
) -> dict[str, Any]:
    """What a user's file chooses: of a copy of base.yml, only what differs from it.

    A file that gives every size of the model is such a copy; in any other file, a value that
    happens to be the default was chosen.
    """
    is_copy = model.keys() <= values.keys()
    return {k: v for k, v in values.items() if v != base[k] or not is_copy}


def _refuse_contradictions(
    given: Mapping[str, Any], where: str, model_name: str, model: Mapping[str, Any]
) -> None:
    """Refuses a size that the named model has, too, with another value."""
    kinds = field_types(Config)
    for key in (key for key in model if key in given):
        wanted, has = typed(key, given[key], kinds[key]), typed(key, model[key], kinds[key])
        if wanted != has:
            raise UserError(
                f"{where}: {key}={_shown(wanted)} contradicts model_name={model_name}, which has "
                f"{key}={_shown(has)}; leave {key} out, or set override_model_config=true to "
                f"train a changed model"
            )


def _shown(value: Any) -> str:
    return shown(list(value) if isinstance(value, tuple) else value)


@functools.cache
def base_defaults() -> Mapping[str, Any]:
    """The keys and defaults of ``configs/base.yml``."""
    return read_mapping(CONFIG_FOLDER / "base.yml")


def _model_values(name: str, base: Mapping[str, Any]) -> Mapping[str, Any]:
    values = read_mapping(model_file(name))
    foreign = [key for key in values if key not in base]
    blocks = typing.get_args(field_types(Config)["decoder_block"])
    if values.get("decoder_block", "default") not in blocks:
        foreign.insert(0, f"decoder_block={values['decoder_block']}")
    if foreign:
        raise UserError(
            f"model_name {name!r} needs {', '.join(foreign)}, which the reference trainer does not "
            f"build (its blocks are {', '.join(blocks)}); `mfu-jax flops {name}` counts it "
            "nevertheless"
        )
    return values


def _config_path(text: str) -> Path:
    """The file itself, or the bundled one of that name (``configs/base.yml`` in a wheel)."""
    path = Path(text)
    bundled = CONFIG_FOLDER / path.name
    exists = os.path.exists  # unlike Path.exists, it knows no name that is too long
    if not exists(path) and path.parent.name in ("", "configs") and exists(bundled):
        return bundled
    return path


def _auto_path(setting: str, default: Path | Address | str) -> Path | Address | None:
    chosen = default if setting == "auto" else setting
    return path_of(chosen) if chosen else None


_POSITIVE = (
    "vocab_size num_decoder_layers emb_dim num_query_heads num_kv_heads head_dim mlp_dim "
    "rope_max_timescale max_target_length per_device_batch_size gradient_accumulation_steps "
    "eval_steps num_processes checkpoint_period checkpoints_to_keep log_period learning_rate "
    "normalization_layer_epsilon fsdp tensor"
).split()
_NOT_NEGATIVE = (
    "steps seed eval_interval gradient_clipping_threshold adam_weight_decay warmup_steps "
    "peak_tflops_per_device process_id trainable_position_size heartbeat_timeout_seconds"
).split()
_FRACTIONS = (
    "eval_fraction warmup_steps_fraction cosine_learning_rate_final_fraction adam_b1 adam_b2"
).split()


_ACTIVATIONS = ("silu", "gelu", "relu", "linear")


def _validate(config: Config) -> None:
    _check_ranges(config)
    _check_model(config)
    _check_remat(config)
    _check_run(config)


def _check_ranges(config: Config) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not abs(value) < float("inf"):
            raise UserError(f"{field.name}={value}: expected a finite number")
        bits = 63 if field.name == "seed" else 31  # JAX's integers
        if isinstance(value, int) and abs(value) >= 2**bits:
            raise UserError(f"{field.name}={shown(value)}: expected a number below 2^{bits}")
    for key in _POSITIVE:
        if getattr(config, key) <= 0:
            raise UserError(f"{key}={getattr(config, key)}: expected more than 0")
    for key in _NOT_NEGATIVE:
        if getattr(config, key) < 0:
            raise UserError(f"{key}={getattr(config, key)}: expected 0 or more")
    for key in _FRACTIONS:
        if not 0 <= getattr(config, key) <= 1:
            raise UserError(f"{key}={getattr(config, key)}: expected a fraction from 0 to 1")


def _check_model(config: Config) -> None:
    if config.num_query_heads % config.num_kv_heads:
        raise UserError(
            f"num_query_heads={config.num_query_heads} is not divisible by "
            f"num_kv_heads={config.num_kv_heads}: every key/value head serves as many query heads"
        )
    if not 1 <= len(config.mlp_activations) <= 2:
        raise UserError(
            f"mlp_activations={list(config.mlp_activations)}: expected one entry (plain MLP) or "
            "two (gated MLP), for example [silu, linear]"
        )
    for activation in config.mlp_activations:
        if activation not in _ACTIVATIONS:
            raise UserError(
                f"mlp_activations: unknown activation {activation!r}"
                f"{nearest(activation, _ACTIVATIONS)}; expected {', '.join(_ACTIVATIONS)}"
            )
    rows = config.trainable_position_size
    if rows and rows < config.max_target_length:
        raise UserError(
            f"max_target_length={config.max_target_length} needs as many learned positions, but "
            f"trainable_position_size={rows}; shorten the sequences"
        )
    if config.head_dim % 2:
        raise UserError(
            f"head_dim={config.head_dim} is odd; RoPE rotates pairs, so it must be even"
        )


def _check_remat(config: Config) -> None:
    for name in config.remat_save_names:
        if name not in REMAT_NAMES:
            raise UserError(
                f"remat_save_names: unknown name {name!r}{nearest(name, REMAT_NAMES)}; "
                f"expected {', '.join(REMAT_NAMES)}"
            )
    if bool(config.remat_save_names) != (config.remat_policy == "names"):
        raise UserError(
            f"remat_policy={config.remat_policy} with remat_save_names="
            f"{list(config.remat_save_names)}: expected at least one name with the policy "
            f"'names' and none with the others; for example remat_policy=names "
            f"remat_save_names=[context]"
        )


def _check_run_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise UserError(
            f"run_name={name!r}: expected the name of a folder: printable, without '/', not '.' "
            f"or '..'"
        )
    if len(name.encode(errors="surrogatepass")) > 255:
        raise UserError(f"run_name={name[:40]!r}… is too long: expected at most 255 bytes")


def _check_run(config: Config) -> None:
    if config.data < 1 and config.data != -1:
        raise UserError(f"data={config.data}: expected 1 or more, or -1 for all remaining devices")
    _check_run_name(config.run_name)
    for key in ("base_output_directory", "metrics_file", "tensorboard_dir", "profile_dir"):
        check_path(getattr(config, key), key)
    if config.process_id >= config.num_processes:
        raise UserError(
            f"process_id={config.process_id} with num_processes={config.num_processes}: "
            "processes are numbered from 0"
        )
