"""Labs about language models: one file each, found by `cairn.labs.catalogue`."""
