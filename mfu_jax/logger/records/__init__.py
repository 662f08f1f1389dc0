"""What a record is made of: costs, values, losses, impossible numbers, and the totals of a run."""
