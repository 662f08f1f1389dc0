"""The few integers that decide what a program runs: values, and the instructions on them."""
