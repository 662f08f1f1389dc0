"""The trainer's batches: text, images, pairs for preference optimisation."""
