"""Long random checks of what docs promise, with seeds and thresholds; exit code 1 if one is missed.

`scripts/campaigns.sh` runs them all; `python -m tests.campaigns.NAME` runs one.
"""
