"""What a trace's devices did when, platform by platform, and how wall time is divided."""
