"""Device traces joined with programs: where the time of a step went, instruction by instruction."""
