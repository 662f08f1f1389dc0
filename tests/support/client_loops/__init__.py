"""Training loops of many kinds, each as its users write it, with its FLOPs worked out by hand."""

from tests.support.client_loops import flax_loops, packages, plain, reinforcement

CLIENTS = (*plain.CLIENTS, *flax_loops.CLIENTS, *reinforcement.CLIENTS, *packages.CLIENTS)
