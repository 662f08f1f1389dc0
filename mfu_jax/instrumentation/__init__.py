"""`instrument`: watches a step function, analyses its programs, reads its outputs."""
