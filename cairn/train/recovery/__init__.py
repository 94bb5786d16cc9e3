"""A run that does not care which of its processes dies: found, answered, and gone on with."""
