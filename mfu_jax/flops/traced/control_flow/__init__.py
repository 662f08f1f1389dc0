"""How often the parts of a jaxpr run, and on which branch."""
