"""What would make a step faster: one rule per cause, from a closed list."""

from mfu_jax.profiling.advice.host import unexplained_idle
from mfu_jax.profiling.advice.rules import RULES, advice_for
from mfu_jax.profiling.advice.stats import LEAST, Advice, ProfileStats

__all__ = ["LEAST", "RULES", "Advice", "ProfileStats", "advice_for", "unexplained_idle"]
