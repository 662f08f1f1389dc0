"""A search for the fastest settings of a step: plans prune, runs decide, their ratio is learned."""
