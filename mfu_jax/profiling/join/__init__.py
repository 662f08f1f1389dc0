"""Which instruction of which program each op of a trace runs."""
