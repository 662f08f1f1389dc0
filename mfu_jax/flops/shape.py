"""`ModelShape`: the sizes that FLOPs and parameters are counted from, in MaxText's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.masks import Number, integral


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One architecture and one step. Sizes that an architecture lacks are 0.

    A family with fields of its own subclasses this. MaxText writes -1 for some absent sizes; it is
    read as 0.
    """

    model_name: str = ""
    decoder_block: str = "llama2"
    vocab_size: int
    num_decoder_layers: int
    emb_dim: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int = 0
    mlp_activations: tuple[str, ...] = ("silu", "linear")
    logits_via_embedding: bool = False

    attention_bias: bool = False
    use_bias: bool = False
    normalization: str = "auto"
    position_embedding: str = "auto"

    # the step
    per_device_batch_size: Number = 1
    max_target_length: int = 2048
    gradient_accumulation_steps: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _checked(field.name, str(field.type), getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        for name in _REQUIRED_POSITIVE:
            if getattr(self, name) <= 0:
                raise UserError(f"{name}={getattr(self, name)!r}: expected a positive number")

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """`config` as a shape: a `ModelShape`, a mapping, or an object with MaxText's field names.

        Fields that are not about the architecture or the step are ignored in objects.

        Raises:
            UserError: a field is missing, of the wrong type, or out of range.
        """
        if isinstance(config, ModelShape):
            return config
        if isinstance(config, Mapping):
            return cls.from_mapping(config)
        values = {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(cls)
            if hasattr(config, field.name)
        }
        return cls._made(values, f"a {type(config).__name__}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """A shape from a mapping; keys that are no field are errors.

        Raises:
            UserError: naming the field.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                raise UserError(f"unknown key {key!r}{nearest(key, names)}")
        return cls._made(values, "the config")

    @classmethod
    def _made(cls, values: Mapping[str, Any], where: str) -> Self:
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING and field.name not in values
        ]
        if missing:
            raise UserError(f"{where} has no {', '.join(missing)}; give it as key=value")
        return cls(**values)

    @property
    def sequences_per_step(self) -> Number:
        """Sequences of one device in one optimizer step."""
        return integral(self.per_device_batch_size * self.gradient_accumulation_steps)

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP has two input matrices: one activation each."""
        return len(self.mlp_activations) > 1


_REQUIRED_POSITIVE = (
    "vocab_size",
    "num_decoder_layers",
    "emb_dim",
    "num_query_heads",
    "num_kv_heads",
    "head_dim",
    "per_device_batch_size",
    "max_target_length",
    "gradient_accumulation_steps",
)


def _checked(name: str, kind: str, value: Any) -> Any:
    """`value` in the field's type; the annotations are strings (postponed evaluation)."""
    if kind == "int":
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"{name}={value!r}: expected a whole number")
        return max(value, 0) if value == -1 else _not_negative(name, value)
    if kind == "Number":
        if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
            raise UserError(f"{name}={value!r}: expected a number")
        try:
            return integral(Fraction(value).limit_denominator(2**20))
        except (ValueError, OverflowError):
            raise UserError(f"{name}={value!r}: expected a finite number") from None
    if kind == "bool":
        if not isinstance(value, bool):
            raise UserError(f"{name}={value!r}: expected true or false")
        return value
    if kind == "str":
        value = getattr(value, "value", value)  # MaxText's enums
        if not isinstance(value, str):
            raise UserError(f"{name}={value!r}: expected text")
        return value
    return tuple(value)


def _not_negative(name: str, value: int) -> int:
    if value < 0:
        raise UserError(f"{name}={value}: expected 0 or more")
    return value
