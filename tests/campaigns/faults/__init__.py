"""Kills, bad sinks, full disks, bad records and clocks: what each kind of fault costs."""
