"""How often each computation runs: calls, loops, branches, and the integers that decide them."""
