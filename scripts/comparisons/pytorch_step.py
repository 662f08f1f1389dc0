"""A training step in PyTorch, compiled, timed on one GPU, to compare with ours.

    python -m scripts.comparisons.pytorch_step model_name=llama3.2-1b [key=value …] [--hf] [--cpu]

Keys are the trainer's; a batch that does not fit is halved. By default the model is this file's
dense decoder, with RMSNorm and rotary positions (neither is a matmul); with --hf it is Hugging
Face's, with PyTorch's fused attention: GPT-2, Mixtral, or Llama. Both recompute their layers with
remat_policy=full, and nothing otherwise. Prints one JSON object. Needs torch; imports no JAX.
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
        config = load([word for word in argv if not word.startswith("--")])
        print(json.dumps(timed(config, device, hugging_face="--hf" in argv)))
    except UserError as error:
        print(one_line(str(error)), file=sys.stderr)
        return 2
    return 0


def timed(config: Config, device: str, *, hugging_face: bool = False) -> dict[str, float]:
    """Seconds per step, tokens per second, peak memory, and the batch, halved until it fits.

    Args:
        config: of the model.
        device: ``cuda``, or ``cpu`` for a trial.
        hugging_face: whether the model is Hugging Face's.

    Raises:
        UserError: PyTorch or the GPU is missing, the model is not implemented, or nothing fits.
    """
    torch = _torch(device)
    batch = max(1, round(config.per_device_batch_size))
    while batch:
        try:
            return _timed(torch, config, device, batch, hugging_face)
        except torch.cuda.OutOfMemoryError:
            batch //= 2
        torch.compiler.reset()
        torch.cuda.empty_cache()
    raise UserError("out of memory even with batch 1")


def _timed(
    torch: Any, config: Config, device: str, batch: int, hugging_face: bool
) -> dict[str, float]:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = _step(torch, config, device, batch, hugging_face)
    seconds = []
    for _ in range(_WARM_UP + config.steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds[_WARM_UP:])
    return {
        "batch": batch,
        "median_seconds": median,
        "tokens_per_sec": batch * config.max_target_length / median,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
    }


def _torch(device: str) -> Any:
    try:
        import torch
    except ImportError:
        raise UserError("PyTorch is not installed; pip install torch") from None
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU; usually a build without CUDA")
    torch.set_float32_matmul_precision("high")
    return torch


def _step(
    torch: Any, config: Config, device: str, batch: int, hugging_face: bool
) -> Callable[[], None]:
    """An AdamW step on one batch of random tokens; returns when the device has finished it."""
    torch.manual_seed(0)
    make = _hugging_face if hugging_face else _dense
    model, loss_of = make(torch, config)
    model.to(device, getattr(torch, config.weight_dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    shape = (batch, config.max_target_length + 1)
    tokens = torch.randint(0, config.vocab_size, shape, device=device)
    dtype = getattr(torch, config.dtype)

    def loss() -> Any:
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            return loss_of(tokens[:, :-1], tokens[:, 1:])

    compiled = torch.compile(loss)

    def step() -> None:
        compiled().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


_ModelAndLoss = tuple[Any, Callable[[Any, Any], Any]]


def _dense(torch: Any, config: Config) -> _ModelAndLoss:
    """This file's decoder, and its loss, in `num_vocab_tiling` parts that are recomputed."""
    if config.num_experts > 1 or config.attention_type == "mla":
        raise UserError("the dense step has no experts or latent attention; --hf has some")
    model, tiles = _decoder(torch, config), config.num_vocab_tiling
    cross_entropy, again = torch.nn.functional.cross_entropy, torch.utils.checkpoint.checkpoint

    def of_part(hidden: Any, targets: Any) -> Any:
        return cross_entropy(model.head(hidden).float().flatten(0, 1), targets.flatten())

    def loss_of(inputs: Any, targets: Any) -> Any:
        hidden = model(inputs)
        if tiles == 1:
            return of_part(hidden, targets)
        parts = zip(hidden.chunk(tiles, 1), targets.chunk(tiles, 1), strict=True)
        return sum(again(of_part, *part, use_reentrant=False) for part in parts) / tiles

    return model, loss_of


def _hugging_face(torch: Any, config: Config) -> _ModelAndLoss:
    """The model of transformers that has these layers, with random weights, and its loss."""
    try:
        import transformers
    except ImportError:
        raise UserError("transformers is not installed; pip install transformers") from None
    if config.attention_type == "mla":
        raise UserError("no latent attention here")
    if config.decoder_block == "gpt2":
        sizes = transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_target_length,
            n_embd=config.emb_dim,
            n_layer=config.num_decoder_layers,
            n_head=config.num_query_heads,
            n_inner=config.mlp_dim,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
    else:
        has_experts = config.num_experts > 1
        experts = {
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
        }
        make = transformers.MixtralConfig if has_experts else transformers.LlamaConfig
        sizes = make(
            vocab_size=config.vocab_size,
            hidden_size=config.emb_dim,
            intermediate_size=config.moe_mlp_dim if has_experts else config.mlp_dim,
            num_hidden_layers=config.num_decoder_layers,
            num_attention_heads=config.num_query_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_target_length,
            tie_word_embeddings=config.logits_via_embedding,
            **(experts if has_experts else {}),
        )
    sizes.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(sizes, attn_implementation="sdpa")
    model.train()
    if config.remat_policy == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def loss_of(inputs: Any, targets: Any) -> Any:
        logits = model(input_ids=inputs).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return model, loss_of


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
