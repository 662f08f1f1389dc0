"""The steps of a metrics file or log: ours, MaxText's, levanter's and torchtitan's."""
