"""The scorers by name: to add one, write its file, a line here and a row of SHIPPED in ag/config/policies.py."""

from ag.engine.scorer_inputs import Needs as Needs
from ag.engine.scorer_inputs import ScorerInputs as ScorerInputs
from ag.engine.scorers.base import RowScorer as RowScorer
from ag.engine.scorers.base import Scorer as Scorer
from ag.engine.scorers.cake import Cake
from ag.engine.scorers.controls import KNorm, Random
from ag.engine.scorers.expected_attention import ExpectedAttention
from ag.engine.scorers.gates import Gates
from ag.engine.scorers.h2o import H2O
from ag.engine.scorers.keydiff import KeyDiff
from ag.engine.scorers.kvzip import KVzip
from ag.engine.scorers.rkv import RKV
from ag.engine.scorers.scissorhands import Scissorhands
from ag.engine.scorers.snapkv import SnapKV
from ag.engine.scorers.streaming_llm import StreamingLLM
from ag.engine.scorers.tova import Tova

SCORERS: dict[str, type[Scorer]] = {
    "streaming_llm": StreamingLLM,
    "h2o": H2O,
    "scissorhands": Scissorhands,
    "tova": Tova,
    "snapkv": SnapKV,
    "cake": Cake,
    "expected_attention": ExpectedAttention,
    "keydiff": KeyDiff,
    "rkv": RKV,
    "kvzip": KVzip,
    "gates": Gates,
    "random": Random,
    "knorm": KNorm,
}
