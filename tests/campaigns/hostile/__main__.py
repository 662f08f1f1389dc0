"""`python -m tests.campaigns.hostile`: exit code 1 if a promise is broken."""

from __future__ import annotations

from tests.campaigns.hostile import hostile_inputs, promises
from tests.campaigns.promises import seeded, verdict

parser = seeded(__doc__)
parser.add_argument("--count", type=int, default=300, help="of inputs")
given = parser.parse_args()
raise SystemExit(verdict(promises(hostile_inputs(random_seed=given.seed, count=given.count))))
