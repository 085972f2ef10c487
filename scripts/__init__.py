"""What is run from a checkout, and not part of the package."""
