"""Measurements: of ours, beside the best there is, in the same run, with the ceiling of the machine."""
