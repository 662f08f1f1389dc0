"""The reference model: a decoder-only transformer in Flax NNX, one room per kind of part.

Every layer and component runs under a `jax.named_scope` of its own name, by which FLOPs and device
time are attributed.
"""
