"""Cairn: the AI-infrastructure stack, stone on stone. This file holds the version and imports nothing."""

__version__ = "0.1.0"
