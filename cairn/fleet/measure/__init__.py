"""Comparison of routers under the same load."""
