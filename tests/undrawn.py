"""`python -m ag.fit` without its pictures, which take half the time of a tiny run: a script for tests that run it."""

from ag import fit
from ag.callbacks.figures import Figures

if __name__ == "__main__":
    del Figures.on_validation_end, Figures.on_train_end
    raise SystemExit(fit.main())
