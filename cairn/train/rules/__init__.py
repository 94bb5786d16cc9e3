"""Losses of post-training, one short pure file each; every one returns its slope, and no graph is recorded."""
