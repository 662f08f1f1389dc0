"""The parts of the reference trainer: data, mesh, state, step, checkpoints."""
