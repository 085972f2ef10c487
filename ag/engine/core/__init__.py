"""The engine's core as one path over sequences: append, attend, observe, evict, compact."""
