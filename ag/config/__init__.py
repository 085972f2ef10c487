"""What can be set: the schema of every recipe, and how recipes and command lines are read."""

from ag.config.gate import GateConfig as GateConfig
from ag.config.schema import CheckpointConfig as CheckpointConfig
from ag.config.schema import Config as Config
from ag.config.schema import DataConfig as DataConfig
from ag.config.schema import ExportConfig as ExportConfig
from ag.config.schema import LoraConfig as LoraConfig
from ag.config.schema import LossConfig as LossConfig
from ag.config.schema import ModelConfig as ModelConfig
from ag.config.schema import OptimConfig as OptimConfig
from ag.config.schema import TrainerConfig as TrainerConfig
from ag.config.schema import WandbConfig as WandbConfig
from ag.config.schema import WarmupConfig as WarmupConfig
from ag.config.schema import key as key
from ag.config.schema import mapping as mapping
