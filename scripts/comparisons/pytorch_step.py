"""A dense model's training step in PyTorch, compiled, timed on one GPU, to compare with ours.

    python -m scripts.comparisons.pytorch_step model_name=llama3.2-1b [key=value …] [--cpu]

Keys are the trainer's. All models have RMSNorm and rotary positions here; neither is a matmul.
Prints one JSON object. Needs torch; imports no JAX.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from mfu_jax.errors import UserError, one_line
from mfu_jax.trainer.config.pyconfig import Config, load

_WARM_UP = 3


def main(argv: Sequence[str]) -> int:
    """Times the step of a config; returns the exit code."""
    device = "cpu" if "--cpu" in argv else "cuda"
    try:
        config = load([word for word in argv if word != "--cpu"])
        print(json.dumps(timed(config, device)))
    except UserError as error:
        print(one_line(str(error)), file=sys.stderr)
        return 2
    return 0


def timed(config: Config, device: str) -> dict[str, float]:
    """Seconds per step, and peak memory.

    Args:
        config: of a dense model.
        device: ``cuda``, or ``cpu`` for a trial.

    Raises:
        UserError: PyTorch or the GPU is missing, or this file does not implement such layers.
    """
    torch = _torch(device)
    if config.num_experts > 1 or config.attention_type == "mla":
        raise UserError("the PyTorch step has dense layers only, no experts or latent attention")
    step = _step(torch, config, device)
    seconds = []
    for _ in range(_WARM_UP + config.steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {
        "median_seconds": statistics.median(seconds[_WARM_UP:]),
        "peak_memory_bytes": memory,
    }


def _torch(device: str) -> Any:
    try:
        import torch
    except ImportError:
        raise UserError("PyTorch is not installed; pip install torch") from None
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU; usually a build without CUDA")
    return torch


def _step(torch: Any, config: Config, device: str) -> Callable[[], None]:
    """An AdamW step on one batch of random tokens; returns when the device has finished it."""
    F = torch.nn.functional
    torch.manual_seed(0)
    model = _decoder(torch, config).to(device, getattr(torch, config.weight_dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    shape = (round(config.per_device_batch_size), config.max_target_length + 1)
    tokens = torch.randint(0, config.vocab_size, shape, device=device)
    dtype = getattr(torch, config.dtype)
    again = torch.utils.checkpoint.checkpoint

    def of_part(hidden: Any, targets: Any) -> Any:
        return F.cross_entropy(model.head(hidden).float().flatten(0, 1), targets.flatten())

    def loss() -> Any:
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            hidden, tiles = model(tokens[:, :-1]), config.num_vocab_tiling
            parts = zip(hidden.chunk(tiles, 1), tokens[:, 1:].chunk(tiles, 1), strict=True)
            return sum(again(of_part, *part, use_reentrant=False) for part in parts) / tiles

    compiled = torch.compile(loss)

    def step() -> None:
        compiled().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def _decoder(torch: Any, config: Config) -> Any:
    """Pre-norm blocks with grouped heads, causal attention and an MLP, gated where ours is."""
    nn, F = torch.nn, torch.nn.functional
    D, N, K, h = config.emb_dim, config.num_query_heads, config.num_kv_heads, config.head_dim
    gated = len(config.mlp_activations) > 1

    def rotated(x: Any) -> Any:
        half, places = h // 2, torch.arange(x.shape[-2], device=x.device)
        inverse = 10000.0 ** (-torch.arange(half, device=x.device) / half)
        angle = places[:, None] * inverse
        a, b = x.float().chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    class Block(nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.RMSNorm(D), nn.RMSNorm(D)])
            self.qkv = nn.Linear(D, (N + 2 * K) * h, bias=False)
            self.out = nn.Linear(N * h, D, bias=False)
            self.up = nn.Linear(D, config.mlp_dim * (1 + gated), bias=False)
            self.down = nn.Linear(config.mlp_dim, D, bias=False)

        def forward(self, x: Any) -> Any:
            B, S, _ = x.shape
            q, k, v = self.qkv(self.norms[0](x)).split([N * h, K * h, K * h], -1)
            q, k, v = (y.view(B, S, -1, h).transpose(1, 2) for y in (q, k, v))
            q, k = rotated(q), rotated(k)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=K < N)
            x = x + self.out(y.transpose(1, 2).reshape(B, S, N * h))
            up = self.up(self.norms[1](x))
            if not gated:
                return x + self.down(F.gelu(up))
            gate, up = up.chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    class Decoder(nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(config.vocab_size, D)
            self.blocks = nn.ModuleList(Block() for _ in range(config.num_decoder_layers))
            self.norm = nn.RMSNorm(D)
            self.head = nn.Linear(D, config.vocab_size, bias=False)
            if config.logits_via_embedding:
                self.head.weight = self.embed.weight

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                if config.remat_policy == "full":
                    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
            return self.norm(x)

    return Decoder()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
