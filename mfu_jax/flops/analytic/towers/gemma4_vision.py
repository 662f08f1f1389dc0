"""Gemma 4's vision tower."""

from __future__ import annotations

from mfu_jax.flops.analytic.components import Layer
from mfu_jax.flops.analytic.matmuls import attention, mlp, norm, projection, table
from mfu_jax.flops.analytic.shapes.model import ModelShape
from mfu_jax.flops.masks import Full


def gated_vision_transformer(
    shape: ModelShape, *, heads: int, kv_heads: int, head_dim: int, pooling: int
) -> tuple[Layer, ...]:
    """Patches ``[3·p², C]``, a table for each axis, layers of attention and a gated MLP.

    k × k tokens are averaged before the projector. Which ones follows from their positions: there
    is no weight, and nothing to multiply.

    Args:
        pooling: the side k.
    """
    width, images = shape.hidden_size_for_vit, shape.images_per_sequence
    patch, size = shape.patch_size_for_vit, shape.image_size_for_vit
    sides = size if isinstance(size, tuple) else (size, size)
    rows, columns = (side // patch for side in sides)
    tokens = rows * columns
    attended = attention(
        width,
        heads,
        kv_heads,
        head_dim,
        Full(queries=tokens),
        qk_norm=True,
        tokens=tokens * images,
    )
    block = (
        norm("norms", width, copies=4),
        *(p.replace(macs=p.macs * images) if p.mask is not None else p for p in attended),
        *mlp(width, shape.intermediate_size_for_vit, gated=True, tokens=tokens * images),
    )
    pooled = (rows // pooling) * (columns // pooling) * images
    return (
        Layer(
            name="vision/patches",
            components=(
                projection("patch_embedding", 3 * patch**2, width, tokens=tokens * images),
                table("vision/positions", 2 * shape.num_position_embeddings_for_vit, width),
            ),
        ),
        Layer(name="vision/layers", components=block, repeats=shape.num_hidden_layers_for_vit),
        Layer(
            name="vision/projector",
            components=(projection("projection", width, shape.emb_dim, tokens=pooled),),
        ),
    )
