"""Where the time of a step went on the devices, and what the host did meanwhile."""
