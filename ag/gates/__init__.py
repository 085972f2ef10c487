"""The gates: their logits, their effect on a forward pass, and their export."""
