"""Kernel tooling: find, compile, lint, explain, measure, tune, show."""
