"""The steps of a metrics file or log: ours and MaxText's."""
