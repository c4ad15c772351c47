"""The configuration of a run: frozen sections, and the function that builds them.

Values come from five places, of which later ones override earlier ones: the defaults, the settings
of a model preset, a YAML file, overrides `a.b.c=1`, and flags. One error reports all mistakes.
"""

from agentrl.config.checks import without_effect
from agentrl.config.load import load_config
from agentrl.config.sections import (
    FIELDS,
    AgentConfig,
    AlgorithmConfig,
    Config,
    DataConfig,
    InteractionConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    SandboxConfig,
    ToolsConfig,
    TrainerConfig,
    ValConfig,
    file_names,
    row_files,
)
from agentrl.config.tiny import TINY, TINY_SETTINGS

__all__ = [
    "FIELDS", "TINY", "TINY_SETTINGS", "AgentConfig", "AlgorithmConfig", "Config", "DataConfig",
    "InteractionConfig", "ModelConfig", "OptimConfig", "RewardConfig", "RolloutConfig",
    "SandboxConfig", "ToolsConfig", "TrainerConfig", "ValConfig", "file_names", "load_config",
    "row_files", "without_effect",
]  # fmt: skip
