"""Names of matmul dtypes, and what a float32 matmul becomes on a chip's matrix unit."""

from __future__ import annotations

import re

from mfu_jax.errors import UserError

# hardware.yml's name of a dtype -> its names in configs, numpy, jaxprs and HLO text
_DTYPE_NAMES = {
    "fp64": "fp64 float64 f64 double",
    "fp32": "fp32 float32 f32 float single",
    "tf32": "tf32 tensorfloat32",
    "bf16": "bf16 bfloat16",
    "fp16": "fp16 float16 f16 half",
    "fp8": "fp8 float8 f8e4m3 f8e4m3fn f8e5m2 f8e4m3b11fnuz f8e4m3fnuz f8e5m2fnuz f8e3m4 "
    "float8_e4m3 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e3m4",
    "fp6": "fp6 f6e2m3fn f6e3m2fn float6_e2m3fn float6_e3m2fn",
    "fp4": "fp4 f4e2m1fn float4_e2m1fn nvfp4 mxfp4",
    "int8": "int8 s8 u8 i8 ui8 uint8",
    "int4": "int4 s4 u4 i4 ui4 uint4",
}
DTYPES = tuple(_DTYPE_NAMES)
_CANONICAL = {alias: name for name, aliases in _DTYPE_NAMES.items() for alias in aliases.split()}

# jax_default_matmul_precision, by lax.Precision's names or by dot algorithm. What a float32 matmul
# runs as at each level, on TPUs and on NVIDIA chips with TF32: (unit, passes) (jax.lax.Precision).
_PRECISION_NAMES = {
    "default": "default fastest bfloat16",
    "high": "high tensorfloat32 bfloat16_3x",
    "highest": "highest float32 bfloat16_6x f32_f32_f32",
}
_PRECISIONS = {
    alias: name for name, aliases in _PRECISION_NAMES.items() for alias in aliases.split()
}
_FLOAT32_ON_TPU = {"default": ("bf16", 1), "high": ("bf16", 3), "highest": ("bf16", 6)}
_FLOAT32_ON_NVIDIA = {"default": ("tf32", 1), "high": ("tf32", 1), "highest": ("fp32", 1)}
_ALGORITHM = re.compile(r"(bf16|tf32|f16)_\1_f32(?:_x(\d))?")


def dtype_names() -> dict[str, str]:
    """Every name of a dtype → the name that peaks are listed under."""
    return dict(_CANONICAL)


def is_wide_integer(dtype: str) -> bool:
    """Whether HLO's dtype is one of integers of over 8 bits, which no matrix unit takes.

    >>> is_wide_integer("s32"), is_wide_integer("s8"), is_wide_integer("bf16")
    (True, False, False)
    """
    return dtype[:1] in ("s", "u") and dtype not in _CANONICAL


def canonical_dtype(dtype: object) -> str:
    """The name that peaks are listed under: 'bf16' for 'bfloat16', jnp.bfloat16, HLO's 'bf16'.

    Raises:
        UserError: the dtype has no matmul peak anywhere (bool, strings, complex).
    """
    name = dtype if isinstance(dtype, str) else str(getattr(dtype, "__name__", dtype))
    try:
        return _CANONICAL[name.strip().lower()]
    except KeyError:
        raise UserError(
            f"dtype {name!r} has no matmul peak; expected one of {', '.join(_DTYPE_NAMES)} or "
            "JAX's names for them",
            hint="usually a typo; pass, for example, dtype=bf16",
        ) from None


def float32_unit(precision: str | None, *, vendor: str, has_tf32: bool) -> tuple[str, int] | None:
    """The dtype that a float32 matmul runs in at `precision`, and its passes; None: float32 itself.

    Args:
        precision: `jax_default_matmul_precision`; None for the default.
        vendor: the chip's vendor, as in hardware.yml.
        has_tf32: whether the chip's matrix unit has TF32.

    Raises:
        UserError: the precision is not known.
    """
    level = (precision or "default").lower()
    algorithm = _ALGORITHM.fullmatch(level)
    if algorithm:
        return canonical_dtype(algorithm[1]), int(algorithm[2] or 1)
    if level not in _PRECISIONS:
        raise UserError(
            f"matmul precision {precision!r} is not known here; expected default, high, "
            "highest or a dot algorithm such as BF16_BF16_F32_X3",
            hint="usually another kind of algorithm; pass peak_tflops_per_device=… for it",
        )
    if vendor == "google":
        return _FLOAT32_ON_TPU[_PRECISIONS[level]]
    if vendor == "nvidia" and has_tf32:
        return _FLOAT32_ON_NVIDIA[_PRECISIONS[level]]
    return None
