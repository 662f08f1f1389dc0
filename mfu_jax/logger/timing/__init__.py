"""When a step starts and ends: the clocks, the outputs that show it, the compilations in it."""
