"""Smaller models: quantised, pruned, and measured against what they were."""
