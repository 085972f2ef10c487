"""The commands: each file opens with the keys of one, and ends with what it calls."""
