"""Tasks: documents that become requests, and results that become scores. Pure Python; no model, no torch."""
