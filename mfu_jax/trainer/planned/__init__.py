"""The trainer's step for plans: on chips that are not attached, or after a measured run."""
