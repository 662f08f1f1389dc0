"""Hostile command lines and files over all subcommands: placeholder until the generator lands."""
