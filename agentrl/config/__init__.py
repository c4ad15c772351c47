"""A run's configuration: frozen sections, and the one door that builds them.

Values come from five places, the later ones winning: the defaults, what a model preset recommends,
a YAML file, overrides `a.b.c=1`, flags. All mistakes are said at once.
"""

from agentrl.config.checks import without_effect
from agentrl.config.load import load_config
from agentrl.config.sections import (
    FIELDS,
    TINY,
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
)

__all__ = [
    "FIELDS",
    "TINY",
    "AlgorithmConfig",
    "Config",
    "DataConfig",
    "InteractionConfig",
    "ModelConfig",
    "OptimConfig",
    "RewardConfig",
    "RolloutConfig",
    "SandboxConfig",
    "ToolsConfig",
    "TrainerConfig",
    "ValConfig",
    "load_config",
    "without_effect",
]
