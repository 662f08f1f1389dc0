"""`python -m tests.campaigns.hostile [COUNT [SEED]]`: a campaign; exit code 1 if a promise broke."""

from __future__ import annotations

import sys

from tests.campaigns.hostile import hostile_inputs, render

given = [int(word) for word in sys.argv[1:]]
results = hostile_inputs(random_seed=(given[1:] or [0])[0], count=(given or [300])[0])
print(render(results))
raise SystemExit(any(result.failures for result in results))
