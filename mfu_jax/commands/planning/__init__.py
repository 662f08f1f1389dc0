"""Commands for steps that have not run yet: `plan`, `tune` and `project`."""
