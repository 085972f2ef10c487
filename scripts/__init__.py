"""Programs of a checkout that are not part of the package."""
