"""What is measured from a checkout, and not part of the package."""
