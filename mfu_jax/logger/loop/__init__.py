"""What the training loop does between two records: spans, phases, compilations, step numbers."""
