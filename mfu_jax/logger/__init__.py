"""Times steps, turns each into a record, and hands the records to the sinks."""
