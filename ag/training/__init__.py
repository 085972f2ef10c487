"""Training: the Lightning module, its losses and metrics, sharding, and the memory plan."""
