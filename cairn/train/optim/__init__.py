"""How gradients change weights: AdamW, Muon, and what they remember in 32, 16 or 8 bits."""
