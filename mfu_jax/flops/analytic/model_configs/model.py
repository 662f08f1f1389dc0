"""`ModelConfig`: one architecture and one step, with fields grouped by concern."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import Field, field
from typing import Any, Self

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.model_configs.attention import (
    AttentionConfig,
    LatentAttentionConfig,
    LinearAttentionConfig,
    SparseAttentionConfig,
    StateSpaceConfig,
)
from mfu_jax.flops.analytic.model_configs.group import (
    POSITIVE,
    FieldGroup,
    field_group,
    group_of,
    in_maxtext,
    own_fields,
)
from mfu_jax.flops.analytic.model_configs.layers import (
    EmbeddingConfig,
    EngramConfig,
    ExpertsConfig,
    FeedForwardConfig,
    LayerStackConfig,
)
from mfu_jax.flops.analytic.model_configs.towers import AudioConfig, EncoderConfig, VisionConfig
from mfu_jax.flops.analytic.model_configs.training import StepConfig, TrainingConfig
from mfu_jax.flops.exact import Number, integral
from mfu_jax.util.values import field_types

# Layers are listed one by one; a larger number means a damaged file.
_MOST_LAYERS = 100_000


@field_group
class ModelConfig(FieldGroup):
    """One architecture and one step.

    Field names are unique across groups, so a flat mapping of MaxText's names is enough:
    `from_mapping`, `replace`, `value` and `require` take flat names.

    >>> config = ModelConfig.from_mapping(
    ...     {"vocab_size": 10, "num_decoder_layers": 2, "emb_dim": 4, "head_dim": 8}
    ... )
    >>> config.attention.head_dim, config.replace(max_target_length=64).step.max_target_length
    (8, 64)
    """

    model_name: str = ""
    decoder_block: str = "llama2"
    vocab_size: int = field(metadata=POSITIVE)
    num_decoder_layers: int = field(metadata=POSITIVE)
    emb_dim: int = field(metadata=POSITIVE)

    attention: AttentionConfig = field(default_factory=AttentionConfig)
    latent_attention: LatentAttentionConfig = field(default_factory=LatentAttentionConfig)
    sparse_attention: SparseAttentionConfig = field(default_factory=SparseAttentionConfig)
    linear_attention: LinearAttentionConfig = field(default_factory=LinearAttentionConfig)
    state_space: StateSpaceConfig = field(default_factory=StateSpaceConfig)
    feed_forward: FeedForwardConfig = field(default_factory=FeedForwardConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    stack: LayerStackConfig = field(default_factory=LayerStackConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    engram: EngramConfig = field(default_factory=EngramConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    audio: AudioConfig = field(default_factory=AudioConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    step: StepConfig = field(default_factory=StepConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = self.num_decoder_layers
        if layers > _MOST_LAYERS:
            raise UserError(f"num_decoder_layers={layers}: expected at most {_MOST_LAYERS}")
        for name in ("first_num_dense_layers", "num_kv_shared_layers"):
            self.require_at_most(name, self.value(name), "num_decoder_layers", layers)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "the config") -> Self:
        """A config from flat names.

        Args:
            values: field → value.
            where: what `values` are, for the error message.

        Raises:
            UserError: a key is unknown, a value is wrong, or a field of `REQUIRED` is missing.
        """
        own, grouped = _by_group(values)
        if missing := [name for name in REQUIRED if name not in own]:
            raise UserError(
                f"{where} has no {', '.join(missing)}",
                hint="give it as key=value",
            )
        groups: dict[str, Any] = {name: _GROUPS[name](**given) for name, given in grouped.items()}
        return cls(**own, **groups)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, named as in `from_mapping` and rechecked."""
        own, grouped = _by_group(changes)
        groups = {
            name: dataclasses.replace(getattr(self, name), **given)
            for name, given in grouped.items()
        }
        return dataclasses.replace(self, **own, **groups)

    def flat(self) -> dict[str, Any]:
        """All fields of all groups → their values."""
        return {name: self.value(name) for name in _GROUP_OF}

    def value(self, name: str) -> Any:
        """The value of the field `name`, in whichever group."""
        group = _GROUP_OF[name]
        return getattr(getattr(self, group) if group else self, name)

    def require(self, *names: str) -> None:
        """Raises a `UserError` listing those of the fields `names` that are absent."""
        if missing := self.missing(names):
            raise UserError(
                f"decoder_block={self.decoder_block!r} needs {', '.join(missing)}: absent or 0 "
                "in the config",
                hint="give it as key=value",
            )

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of the fields `names` that are absent."""
        return [name for name in names if not self.value(name)]

    @property
    def sequences_per_step(self) -> Number:
        """Sequences per device and optimizer step; each DPO pair has two."""
        rows = self.step.per_device_batch_size * (1 + self.training.use_dpo)
        return integral(rows * self.step.gradient_accumulation_steps)


_GROUPS: dict[str, type[FieldGroup]] = {
    field.name: group for field in dataclasses.fields(ModelConfig) if (group := group_of(field))
}
_HELD: list[tuple[str, Field[Any]]] = [
    *(("", field) for field in own_fields(ModelConfig)),
    *((group, field) for group, kind in _GROUPS.items() for field in own_fields(kind)),
]
# Field → the group that holds it; "" for fields of `ModelConfig` itself.
_GROUP_OF: dict[str, str] = {field.name: group for group, field in _HELD}
# The fields that a user may set, under MaxText's names.
MAXTEXT_FIELDS: tuple[str, ...] = tuple(field.name for _, field in _HELD if in_maxtext(field))
# The fields without a default.
REQUIRED: tuple[str, ...] = tuple(
    field.name for field in own_fields(ModelConfig) if field.default is dataclasses.MISSING
)


def field_type(name: str) -> Any:
    """The declared type of a field, in whichever group."""
    held_by: type = _GROUPS.get(_GROUP_OF[name], ModelConfig)
    return field_types(held_by)[name]


def _by_group(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The fields of `ModelConfig` itself, and those of each group."""
    own: dict[str, Any] = {}
    grouped: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in values.items():
        if name not in _GROUP_OF:
            raise UserError(
                f"unknown key {name!r}",
                hint=nearest(name, _GROUP_OF),
            )
        if holder := _GROUP_OF[name]:
            grouped[holder][name] = value
        else:
            own[name] = value
    return own, grouped
