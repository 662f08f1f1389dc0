"""One module per command: a new file here, or in a folder here, is one, found by `mfu_jax.cli`.

Its docstring is the manual: a first line that says what it does, then ``usage: mfu-jax NAME …``.
Its ``main(argv)`` parses the words after the name with `mfu_jax.util.arguments.parse`, prints text
(one JSON object with ``--json``) and returns the exit code. Wrong input raises a `UserError`. Its
keys are a row of tests/commands/test_spellings.py.
"""
