"""Labs about collectives and networking: one file each, found by `cairn.labs.catalogue`."""
