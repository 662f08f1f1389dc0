"""The audio tower of Qwen3-Omni: mel frames → tokens of the decoder's width."""

from __future__ import annotations

from mfu_jax.flops.analytic.components import Layers, layer
from mfu_jax.flops.analytic.formulas import norm, projection
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.towers.encoder import encoder_block
from mfu_jax.flops.masks import Full


def qwen3_audio(config: ModelConfig) -> Layers:
    """Qwen3-Omni's audio encoder: three strided convolutions over chunks of mel frames, full
    attention inside a chunk, two projections.

    A 3 × 3 convolution from c to d channels takes 9·c·d multiply-adds per output position.
    """
    sizes = config.audio
    width, channels = sizes.d_model_for_audio, sizes.downsample_hidden_size_for_audio
    bins, frames = sizes.num_mel_bins_for_audio, 2 * sizes.n_window_for_audio
    chunks = config.step.audio_frames_per_sequence // frames
    convolutions = []
    for i, inputs in enumerate((1, channels, channels)):
        bins, frames = (bins + 1) // 2, (frames + 1) // 2
        positions = bins * frames * chunks
        name = f"convolution_{i + 1}"
        convolutions.append(projection(name, 9 * inputs, channels, bias=True, tokens=positions))
    tokens = frames * chunks
    block = encoder_block(
        width, sizes.encoder_ffn_dim_for_audio, Full(queries=frames), tokens=frames, copies=chunks
    )
    return (
        layer("audio/convolutions", *tuple(convolutions)),
        layer("audio/entry", projection("conv_out", channels * bins, width, tokens=tokens)),
        layer("audio/layers", *block, repeats=sizes.encoder_layers_for_audio),
        layer("audio/final", norm("norm", width, bias=True)),
        layer(
            "audio/projector",
            projection("proj1", width, width, bias=True, tokens=tokens),
            projection("proj2", width, sizes.output_dim_for_audio, bias=True, tokens=tokens),
        ),
    )
