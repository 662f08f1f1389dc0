"""One module per command; a new file here is a new command, found by `mfu_jax.cli`.

Its docstring is the manual: the first line says what it does, then comes ``usage: mfu-jax NAME …``.
Its ``main(argv)`` reads the words after the name with `mfu_jax.arguments.parse`, prints text (with
``--json`` one JSON object) and returns the exit code. Wrong input is a `UserError`.
"""
