"""All that is known of one run: its steps, time, set-up, processes, and its plan."""
