"""Answering many requests at once: a batch that requests join and leave between two tokens."""

from ag.serve.batcher import Batcher
from ag.serve.request import Request, Stream, Token
from ag.serve.snapshot import Snapshot

__all__ = ["Batcher", "Request", "Snapshot", "Stream", "Token"]
