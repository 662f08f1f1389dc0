"""Names of layers and components that other code looks for; all others are only shown."""

LOGITS = "logits"  # the output head's matmul
POSITIONS = "positions"  # the table of learned positions
ROUTER = "moe/router"
EXPERTS = "moe/experts"  # …/wi_0, …/wi_1, …/wo
SHARED_EXPERTS = "moe/shared"
SHARED_GATE = "moe/shared_gate"
DELTA_NET = "delta_net"
CORE_CHUNKED = "core_chunked"  # …/core_chunked: a recurrence in chunks
INDEXER = "indexer"  # indexer/…
LORA_A, LORA_B = "lora_a", "lora_b"  # the halves of an adapter: PROJECTION/lora_a
FIRST = "first"  # LAYERS/first: the layer below which nothing trains
MULTI_TOKEN_PREDICTION = "multi_token_prediction"  # a layer
