"""Two runs compared, with what chance explains left out; the gate of a CI."""
