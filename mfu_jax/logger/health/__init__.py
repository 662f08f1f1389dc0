"""Is the run healthy? Slow steps and their causes, drifting MFU, loss spikes, hot GPUs.

Everything runs on the builder thread or its own, on what the records contain anyway.
"""
