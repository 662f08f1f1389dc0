"""What a step executes beyond the model's FLOPs, against arithmetic."""

from fractions import Fraction

import pytest

from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.run.overheads import known_overheads

TOKENS, LENGTH, WIDTH, HIDDEN, LAYERS = 8 * 128, 128, 128, 352, 4  # of configs/base.yml
PROJECTIONS = 3 * 2 * TOKENS * WIDTH * 32 * (4 + 2 + 2 + 4)  # queries, keys, values, output
PAIRS = 3 * 2 * 2 * TOKENS * LENGTH * 32 * 4  # scores and values
MLP = 3 * 3 * 2 * TOKENS * WIDTH * HIDDEN
ROUTER = 3 * 2 * TOKENS * WIDTH * 4
EXPERTS = ["num_experts=4", "num_experts_per_tok=2", "moe_mlp_dim=352"]
NEIGHBOURS = "rows of other devices' experts"
HALVES = "halves of adapters on every device"
RANK = 4
# Of an expert's adapters: a of wi_0 and wi_1, b of wo; two experts a token.
HALVES_OF_A_LAYER = 3 * 3 * 2 * (2 * TOKENS) * WIDTH * RANK
# Of qwen3-next-80b-a3b at `scale=tiny`: six delta nets of four heads; 100 tokens are two chunks.
CHUNK, KEYS, VALUES, DELTA_HEADS = 64, 16, 16, 6 * 4
IN_CHUNK = CHUNK**2 * (3 * KEYS + 2 * VALUES) + 3 * CHUNK * KEYS * VALUES
RECURRENCE = 100 * 4 * KEYS * VALUES
Q_ADAPTER = 3 * 2 * TOKENS * RANK * (WIDTH + 32 * 4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["fsdp=8", "tensor=2"], {}),
        # Four microbatches, twice around two stages: one turn of nine is the bubble.
        (
            ["pipeline=2", "num_pipeline_microbatches=4"],
            {
                "pipeline bubble": Fraction(LAYERS * (PROJECTIONS + MLP), 8),
                "pipeline bubble: attention": Fraction(LAYERS * PAIRS, 8),
            },
        ),
        (["expert=4", *EXPERTS], {NEIGHBOURS: 3 * LAYERS * 2 * MLP}),
        (["expert=4", *EXPERTS, "capacity_factor=1"], {}),
        (
            ["expert=2", "pipeline=2", *EXPERTS],
            {
                "pipeline bubble": Fraction(LAYERS * (PROJECTIONS + ROUTER + 2 * MLP), 4),
                "pipeline bubble: attention": Fraction(LAYERS * PAIRS, 4),
                NEIGHBOURS: Fraction(LAYERS * 2 * MLP * 5, 4),
            },
        ),
        (
            ["tensor=2", "lora_rank=4", "lora_targets=[q_proj,wi_0,wi_1,wo]", *EXPERTS],
            {HALVES: LAYERS * HALVES_OF_A_LAYER},
        ),
        # Two microbatches, twice around: one turn of five. Frozen weights have two of three
        # products; the first layer lacks the gradients of its input, and of keys and values.
        (
            ["pipeline=2", "lora_rank=4", "lora_targets=[q_proj]"],
            {
                "pipeline bubble": LAYERS * ((PROJECTIONS + MLP) * Fraction(2, 3) + Q_ADAPTER) / 4,
                "pipeline bubble: attention": LAYERS * Fraction(PAIRS, 4) + Fraction(PAIRS, 3),
                "gradients below the first layer": (
                    2 * TOKENS * WIDTH * 32 * (4 + 2 + 2) + 2 * TOKENS * WIDTH * RANK
                ),
            },
        ),
        # Two triangular systems, and a product of two matrices, for each chunk and head.
        (
            [*"model_name=qwen3-next-80b-a3b scale=tiny max_target_length=100".split()],
            {
                "delta nets in chunks": 8
                * DELTA_HEADS
                * (3 * 2 * (2 * IN_CHUNK - RECURRENCE) + 2 * 4 * CHUNK**3)
            },
        ),
    ],
)
def test_named_flops_beyond_the_model(words: list[str], expected: dict[str, int]) -> None:
    assert known_overheads(pyconfig.load(["configs/base.yml", *words])) == expected
