"""Lines of the ledger that other rooms know by name."""

MASKED_PAIRS = "masked pairs"
REMATERIALISED = "rematerialised"
RECOMPUTED_BY_XLA = "recomputed by XLA to save memory"
# Forward work that trains nothing and is missing from the model.
EVALUATION = "evaluation"
OTHER = "other"
# An overhead of attention over all pairs; if kernels run it, the pairs they compute are counted.
OVERHEAD_ATTENTION = "pipeline bubble: attention"
