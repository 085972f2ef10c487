"""The frozen base model: found, loaded, quantised, adapted, and how other attention enters it."""
