"""HLO text as a program: computations, instructions, shapes, and where values come from."""
