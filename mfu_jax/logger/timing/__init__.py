"""When a step starts and ends: clocks, the outputs that mark its end, compilations inside it."""
