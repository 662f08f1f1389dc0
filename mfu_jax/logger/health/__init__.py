"""Is the run well? Slow steps and their causes, MFU that drifts, losses that jump, hot GPUs.

All of it on the builder's thread or one of its own, from what the records have anyway.
"""
