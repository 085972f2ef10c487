"""Measuring models whose cache forgets."""

from ag.evaluate.responses import Scores as Scores
from ag.evaluate.responses import score_responses as score_responses
