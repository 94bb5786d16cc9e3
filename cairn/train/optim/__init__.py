"""Optimizers AdamW and Muon with states in 32, 16 or 8 bits."""
