"""What is measured from a checkout, and not part of the package; VERSION.json and history.png are of releases."""
