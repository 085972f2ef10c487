"""The gates: what they compute, how they act on a forward pass, and how they are exported."""
