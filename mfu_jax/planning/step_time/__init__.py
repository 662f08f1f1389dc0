"""How long a compiled step takes on given chips: its ops, its schedule, its range."""
