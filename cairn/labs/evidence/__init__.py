"""Evidence to read: profiles of real runs with a fault in them, and the programs that made them."""
