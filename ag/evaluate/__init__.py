"""Tasks for models with an evicting cache, and comparisons of policies on them."""
