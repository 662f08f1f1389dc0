"""What would make a step faster: one rule per cause, from a closed list."""

from mfu_jax.profiling.advice.facts import LEAST, Advice, Facts
from mfu_jax.profiling.advice.host import unexplained_idle
from mfu_jax.profiling.advice.rules import RULES, advice_for

__all__ = ["LEAST", "RULES", "Advice", "Facts", "advice_for", "unexplained_idle"]
