"""What would make a step faster: one rule per cause, from a closed list."""
