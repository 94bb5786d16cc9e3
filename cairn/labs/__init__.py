"""Experiments a person runs: each idea of the field with a prediction, a measurement and a verdict."""
