"""Inference with evicted keys and values really freed."""

from ag.config.spec import PolicySpec as PolicySpec
from ag.engine.cache import EvictionCache as EvictionCache
from ag.engine.policy import Policy as Policy
from ag.engine.policy import policy as policy
from ag.engine.prompt import read_prompt as read_prompt
