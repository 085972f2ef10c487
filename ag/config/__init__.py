"""The schema of recipes, and readers of recipes and command lines."""

from ag.config.data import DataConfig as DataConfig
from ag.config.gate import GateConfig as GateConfig
from ag.config.loss import LossConfig as LossConfig
from ag.config.schema import Config as Config
from ag.config.sections import CheckpointConfig as CheckpointConfig
from ag.config.sections import ExportConfig as ExportConfig
from ag.config.sections import LoraConfig as LoraConfig
from ag.config.sections import ModelConfig as ModelConfig
from ag.config.sections import OptimConfig as OptimConfig
from ag.config.sections import TrainerConfig as TrainerConfig
from ag.config.sections import WandbConfig as WandbConfig
from ag.config.sections import WarmupConfig as WarmupConfig
from ag.config.sections import key as key
from ag.config.sections import mapping as mapping
