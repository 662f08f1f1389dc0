"""Products with weights: dense, embedded, grouped, gathered, quantised, with adapters."""
