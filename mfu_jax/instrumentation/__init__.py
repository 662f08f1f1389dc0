"""`instrument`: one step function watched, its program analysed, its outputs read."""
