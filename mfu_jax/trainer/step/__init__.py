"""The trainer's step: state, losses, mesh, and the compiled functions."""
