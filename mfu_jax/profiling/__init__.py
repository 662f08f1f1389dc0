"""Device traces joined with programs: where a step's time went, instruction by instruction."""
