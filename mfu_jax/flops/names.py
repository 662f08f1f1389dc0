"""Lines of the ledger, by name: what writes one and what looks for it agree here."""

# From model FLOPs to executed FLOPs.
MODEL = "model"
MASKED_PAIRS = "masked pairs"
REMATERIALISED = "rematerialised"
RECOMPUTED_BY_XLA = "recomputed by XLA to save memory"
DUPLICATED = "duplicated by XLA"
ZERO_PADDING = "zero padding"
DENSE_EXPANSION = "dense expansion"
FFT_BY_MATMULS = "FFT by matmuls"
FFT_BY_AXES = "FFT of one axis after the other"
OTHER = "other"
# Forward work that trains nothing and is missing from the model.
EVALUATION = "evaluation"
REMATERIALISED_BACKWARD = "rematerialised backward"
REPEATED_BY_THE_MODEL = "repeated by the model as well"
ON_HOST = "moved to the host"
THREE_REAL = "complex products by three real ones"
# Model work that the compiler removed.
REMOVED = "removed by XLA"
# An overhead of attention over all pairs; if kernels run it, the pairs they compute are counted.
OVERHEAD_ATTENTION = "pipeline bubble: attention"
# What Pallas kernels multiply where their blocks overhang their arrays.
OVERHANG = "Pallas blocks beyond their arrays"
OVERHANG_ATTENTION = "Pallas blocks beyond their arrays: attention"

# Rows of the table around these.
RESIDUAL = "+ unexplained"
EXECUTED = "= executed"
VECTOR_UNITS = "matmuls run on vector units"

# What the hardware runs beyond executed FLOPs.
TILES_STATED = "tiles, stated"
TILES_ASSUMED = "tiles, assumed"
ON_PADDING = "window positions on padding"
