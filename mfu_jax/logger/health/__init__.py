"""Is the run healthy? Slow steps, drifting MFU, loss spikes, hot devices, doubtful FLOP counts.

Everything runs on the recorder's thread or its own, on what the records contain anyway.
"""
