"""A step is timed, made a record of, written down, and handed to the sinks."""
