"""What the devices of a trace did when, platform by platform, and how wall time is divided."""
