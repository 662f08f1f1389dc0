"""A step's time against the peak: the waterfall and the tables."""
