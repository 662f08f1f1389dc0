"""`instrument`: observes a step function, analyses its programs, reads its outputs."""
