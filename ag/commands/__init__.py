"""The keys of each command, and the function that it runs."""
