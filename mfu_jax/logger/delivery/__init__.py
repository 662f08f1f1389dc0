"""A step on its way from the loop to the sinks: queued, built into a record, written or kept."""
