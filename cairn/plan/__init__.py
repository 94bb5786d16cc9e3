"""Predict before you buy: does it fit, which layout, how fast, what does it cost; from the code that runs."""
